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


def test_calls_are_drawn_by_unknowns_on_logarithmic_axes(ax):
    pictures.draw_scaling(ax, {"a": {5: 50, 10: 40, 50: 100}, "b": {5: 31, 10: 56}})
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["5", "10", "50"]
    drawn = [list(zip(*line.get_data(), strict=True)) for line in ax.lines]
    assert drawn == [[(5, 50), (10, 40), (50, 100)], [(5, 31), (10, 56)]]


def test_estimates_are_dots_and_the_truth_is_a_cross(ax):
    pictures.draw_estimates(ax, torch.tensor([[9.0, 0.1], [10.0, 0.2]]), torch.tensor([9.5, 0.15]))
    drawn = [[list(axis) for axis in line.get_data()] for line in ax.lines]
    assert drawn[0] == [[9.0, 10.0], pytest.approx([0.1, 0.2])]
    assert drawn[1] == [[9.5], pytest.approx([0.15])]
    assert (ax.lines[0].get_marker(), ax.lines[1].get_marker()) == (".", "+")
