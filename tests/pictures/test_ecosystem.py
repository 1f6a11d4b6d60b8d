"""What the pictures of chapter 19 show is what they were given."""

import pytest
import torch

from helpers.pictures import ecosystem as pictures


@pytest.mark.parametrize("library", pictures.OWNERS)
def test_each_part_has_an_owner(ax, library):
    pictures.draw_owners(ax, library)
    shown = [text.get_text() for text in ax.texts]
    assert shown[1::2] == list(pictures.PARTS)
    assert shown[::2] == list(pictures.OWNERS[library])
    assert len(ax.patches) == len(pictures.PARTS)
    assert ax.get_title(loc="right") == library


def test_the_gap_is_where_it_is_widest(ax):
    reference, window = torch.tensor([1.0, 2, 3, 4]), torch.tensor([3.0, 4, 5, 6])
    pictures.draw_gap(ax, reference, window, label="two apart")
    (segment,) = ax.collections[0].get_segments()
    assert segment[:, 0].tolist() == [2, 2] and sorted(segment[:, 1].tolist()) == [0, 0.5]
    assert ax.get_title() == "two apart: largest gap 0.50"
