import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import loading
from helpers.pictures import data as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_the_pipeline_names_its_stations(ax):
    pictures.draw_pipeline(ax)
    found = " ".join(texts(ax))
    for word in ("main process", "sampler", "worker 0", "worker 1", "pin_memory", "result queue"):
        assert word in found


@given(st.floats(0.1, 5), st.floats(0.1, 5), st.integers(0, 6), st.integers(1, 4))
def test_the_simulation_settles_at_the_predicted_period(load, step, workers, prefetch):
    spans = pictures.simulate([load] * 200, step, workers, prefetch)
    starts = [start for _, _, start, _ in spans[1::2]]
    cost = loading.Cost(load, load, 0.0, 0.0, step)
    window = 60  # divisible by every number of workers: they deliver in bursts
    each = (starts[-1] - starts[-1 - window]) / window
    assert each == pytest.approx(loading.period(cost, workers, 99), rel=1e-6)


@given(st.lists(st.floats(0.1, 5), max_size=30), st.integers(1, 5), st.integers(1, 3))
def test_the_simulation_keeps_the_protocol(loads, workers, prefetch):
    spans = pictures.simulate(loads, 1.0, workers, prefetch)
    jobs, steps = spans[::2], spans[1::2]
    assert [lane for lane, *_ in jobs] == [b % workers for b in range(len(loads))]
    for (_, _, _, end), (lane, _, start, _) in zip(jobs, steps, strict=True):
        assert lane == -1 and start >= end - 1e-9
    for before, after in zip(steps, steps[1:], strict=False):
        assert after[2] >= before[3] - 1e-9  # one step at a time, in order
    for b in range(prefetch * workers, len(loads)):
        assert jobs[b][2] >= steps[b - prefetch * workers][2] - 1e-9  # not ordered earlier


def test_the_time_line_states_the_stall(ax):
    pictures.draw_workers(ax, load=3.0, workers=2)
    assert ax.get_title() == "a step every 1.50; it waits for 33% of the time"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["main process", "worker 0", "worker 1"]


def test_no_workers_take_turns(ax):
    pictures.draw_workers(ax, load=1.0, workers=0)
    assert ax.get_title() == "a step every 2.00; it waits for 50% of the time"
    assert pictures.simulate([], 1.0, 0) == []


def test_samplers_show_every_index(ax):
    pictures.draw_samplers(ax, {"a": [0, 1, 2], "b": [2, 2]}, [0, 1, 2])
    assert texts(ax) == ["a", "0", "1", "2", "b", "2", "2"]


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_augmentations_draw_six_and_leave_the_global_generator(ax, kind):
    image = torch.zeros(1, 28, 28, dtype=torch.float64)
    image[0, 8:20, 10:18] = 1
    before = torch.get_rng_state()
    pictures.draw_augmented(ax, image, kind, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert len(ax.child_axes) == 6 and all(small.images for small in ax.child_axes)


def test_the_box_moves_with_the_image(ax):
    image = torch.zeros(1, 28, 28, dtype=torch.float64)
    image[0, 8:20, 10:18] = 1
    pictures.draw_augmented(ax, image, "shift", 2)
    for small in ax.child_axes:
        ink = torch.as_tensor(small.images[0].get_array()).nonzero()
        (box,) = small.patches
        x, y = box.get_xy()
        assert [y + 0.5, x + 0.5] == ink.amin(0).tolist()
        assert [box.get_height(), box.get_width()] == (ink.amax(0) - ink.amin(0) + 1).tolist()


WAYS = ["pageable", "pinned", "non_blocking", "side stream"]


@pytest.mark.parametrize("way", WAYS)
def test_copies_obey_the_streams(way):
    spans = pictures.copy_spans(way, 0.5, 1.0, 1.5, n=6)
    lanes = [[s for s in spans if s[0] == lane] for lane in range(3)]
    for lane in lanes:
        assert all(b[2] >= a[3] - 1e-9 for a, b in zip(lane, lane[1:], strict=False))
    for copy, step in zip(lanes[1], lanes[2], strict=True):
        assert step[2] >= copy[3]
    overlap = any(c[2] < s[3] and s[2] < c[3] for c in lanes[1] for s in lanes[2])
    assert overlap == (way == "side stream")


def test_only_the_side_stream_overlaps_and_ends_first(ax):
    ends = []
    for way in WAYS:
        ax.clear()
        pictures.draw_copies(ax, way)
        ends.append(float(ax.get_title().split()[-1]))
    assert ends[0] > ends[1] == ends[2] > ends[3]
