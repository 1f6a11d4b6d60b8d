import pytest
import torch

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
