import pytest
import torch
from matplotlib.figure import Figure

from helpers.pictures import differentiable_programs as pictures


@pytest.fixture
def ax():
    return Figure().subplots()


def test_ends_are_drawn_beside_the_right_line_with_dots(ax):
    pictures.draw_ends(ax, [0.2, 0.5, 0.8], [0.1, 0.4, 0.3], [0.5], [0.4])
    drawn = [[list(axis) for axis in line.get_data()] for line in ax.lines]
    assert drawn[0] == [[0.2, 0.5, 0.8], pytest.approx([0.8, 0.5, 0.2])]
    assert drawn[1:] == [[[0.2, 0.5, 0.8], [0.1, 0.4, 0.3]], [[0.5], [0.4]]]


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
