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
