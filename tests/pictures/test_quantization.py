import pytest
import torch

from helpers.page.records import PROVENANCE, Record
from helpers.pictures import quantization as pictures

WEIGHT = torch.linspace(-1, 1, 40).view(4, 10)


def lines(ax):
    return sum(len(c.get_segments()) for c in ax.collections)


@pytest.mark.parametrize(("bits", "numbers"), [(2, 3), (3, 7), (4, 15)])
def test_the_numbers_of_the_grid_are_drawn(ax, bits, numbers):
    pictures.draw_grid(ax, WEIGHT, bits, 1)
    assert lines(ax) == numbers


def test_an_outlier_leaves_fewer_numbers_and_a_larger_error_for_one_scale(ax):
    pictures.draw_grid(ax, WEIGHT, 4, 1)
    few, before = lines(ax), ax.get_title()
    ax.clear()
    pictures.draw_grid(ax, WEIGHT, 4, 16)
    assert lines(ax) < few
    shared, own = ax.get_title().split("one scale ")[1].split("   a scale per row ")
    was_shared, was_own = before.split("one scale ")[1].split("   a scale per row ")
    assert float(shared[:-1]) > float(was_shared[:-1]) and own == was_own
    assert WEIGHT[0, 0] == -1  # the reader's weight stays


def test_each_way_has_its_bar_and_its_size(ax):
    units = dict.fromkeys(("model", "method", "batch", "size", "same"), "x")
    rows = [
        {"model": "m", "method": "float32", "batch": 1, "size": 400, "same": [1, 1, 1]},
        {"model": "m", "method": "int8", "batch": 1, "size": 100, "same": [2, 3, 4]},
        {"model": "m", "method": "slow", "batch": 1, "size": 200, "same": [0.2, 0.3, 0.4]},
        {"model": "other", "method": "int8", "batch": 1, "size": 100, "same": [2, 3, 4]},
    ]
    record = Record("quantization", dict.fromkeys(PROVENANCE, "x"), units, rows)
    pictures.draw_trade(ax, record, "m", 1)
    assert [bar.get_width() for bar in ax.patches] == [1, 3, 0.3]
    assert [t.get_text().strip() for t in ax.texts] == [
        "1.0× smaller",
        "4.0× smaller",
        "2.0× smaller",
    ]
    assert len({bar.get_facecolor() for bar in ax.patches}) == 3
