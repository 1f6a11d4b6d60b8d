import pytest
import torch

from helpers import loading
from helpers.pictures import data as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_the_time_line_states_the_stall(ax):
    pictures.draw_workers(ax, load=3.0, workers=2)
    assert ax.get_title() == "a step every 1.50; it waits for 33% of the time"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["main process", "worker 0", "worker 1"]


def test_no_workers_take_turns(ax):
    pictures.draw_workers(ax, load=1.0, workers=0)
    assert ax.get_title() == "a step every 2.00; it waits for 50% of the time"


@pytest.mark.parametrize(("load", "workers"), [(0.5, 1), (3.0, 4), (2.0, 0)])
def test_every_span_before_the_end_is_drawn(ax, load, workers):
    pictures.draw_workers(ax, load, workers, until=16)
    spans = loading.simulate_workers([load] * 60, 1.0, workers)
    shown = [span for span in spans if span.start < 16]
    _background, *blocks = ax.patches
    assert len(blocks) == len(shown)
    for block, span in zip(blocks, shown, strict=True):
        assert block.get_x() == span.start
        assert block.get_x() + block.get_width() == pytest.approx(min(span.end, 16))


def test_samplers_show_every_index(ax):
    pictures.draw_samplers(ax, {"a": [0, 1, 2], "b": [2, 2]}, [0, 1, 2])
    assert texts(ax) == ["a", "0", "1", "2", "b", "2", "2"]
    a0, _, a2, b2, _ = ax.patches
    assert a0.get_facecolor() != a2.get_facecolor() == b2.get_facecolor()  # by class


@pytest.mark.parametrize("n", [1, 3, 6])
def test_a_box_lies_around_its_pixels(ax, n):
    samples = []
    for k in range(n):
        image = torch.zeros(1, 28, 28, dtype=torch.float64)
        image[0, 8 : 20 - k, 10 + k : 18] = 1
        samples.append((image, torch.tensor([[10 + k, 8, 18, 20 - k]])))
    pictures.draw_boxed(ax, samples)
    assert len(ax.child_axes) == n
    for small in ax.child_axes:
        ink = torch.as_tensor(small.images[0].get_array()).nonzero()
        (outline,) = small.patches
        x, y = outline.get_xy()
        assert [y + 0.5, x + 0.5] == ink.amin(0).tolist()
        size = [outline.get_height(), outline.get_width()]
        assert size == (ink.amax(0) - ink.amin(0) + 1).tolist()


@pytest.mark.parametrize("way", loading.WAYS_TO_COPY)
def test_copies_are_drawn_with_their_waits(ax, way):
    pictures.draw_copies(ax, way)
    spans = loading.simulate_copies(way, 0.5, 1.0, 1.5)
    assert ax.get_title() == f"batch 3 is done at {spans[-1].end:g}"
    hatched = [block for block in ax.patches if block.get_hatch()]
    assert len(hatched) == sum(span.kind == "wait" for span in spans)
    assert len(ax.texts) == len(spans) - len(hatched)
