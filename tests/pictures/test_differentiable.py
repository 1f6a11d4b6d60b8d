import pytest
import torch
from matplotlib.figure import Figure

from helpers.pictures import differentiable as pictures


@pytest.fixture
def ax():
    return Figure().subplots()


def test_a_flight_has_a_line_and_its_measurements(ax):
    seen, computed = torch.rand(5, 2), torch.rand(9, 2)
    pictures.draw_flight(ax, seen, computed, "step 3")
    assert [len(line.get_xdata()) for line in ax.lines] == [9, 5, 2]
    assert ax.get_title() == "step 3"


def test_a_budget_s_histories_are_steps_on_logarithmic_axes(ax):
    pictures.draw_budget(ax, {"a": [(1, 5.0), (2, 3.0)], "b": [(6, 1.0)]}, goal=1.0)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert ax.lines[0].get_ydata()[-1] == 3.0


def test_temperatures_stand_over_their_cells(ax):
    pictures.draw_temperatures(ax, torch.zeros(4), torch.ones(4), "smooth")
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.0] * 4, [1.0] * 4]


def test_swings_are_named_and_the_truth_is_wide(ax):
    seconds = torch.arange(4)
    curves = {"true": torch.zeros(4), "network": torch.ones(4), "hybrid": 2 * torch.ones(4)}
    pictures.draw_swings(ax, seconds, curves, "from 2 rad")
    assert [line.get_label() for line in ax.lines] == ["true", "network", "hybrid"]
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert [line.get_linewidth() for line in ax.lines] == [3.5, 1.5, 1.5]
    assert ax.get_title() == "from 2 rad"


def test_two_images_stand_side_by_side(ax):
    pictures.draw_images(ax, torch.rand(3, 8, 8), 2 * torch.ones(3, 8, 8), "step 1")
    left, right = ax.images
    assert [*left.get_extent(), *right.get_extent()] == [0, 8, 8, 0, 11, 19, 8, 0]
    assert right.get_array().max() == 1.0  # brighter than white is white


def test_a_path_stands_among_its_disks(ax):
    pictures.draw_path(ax, torch.rand(6, 2), torch.rand(2, 2), torch.tensor([0.1, 0.2]), "plan")
    assert [patch.radius for patch in ax.patches] == pytest.approx([0.1, 0.2])
    assert [len(line.get_xdata()) for line in ax.lines] == [6, 2]
