import pytest
import torch
from torch.profiler import record_function

from helpers import profiling
from helpers.pictures import profiling as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.fixture
def slices(tmp_path):
    def job():
        with record_function("outer"):
            torch.ones(300, 300) @ torch.ones(300, 300)

    path = tmp_path / "trace.json"
    profiling.trace(job).export_chrome_trace(str(path))
    return profiling.read_trace(path)


def test_a_trace_is_drawn_from_the_range_down(ax, slices):
    pictures.draw_trace(ax, slices, "outer")
    assert "outer" in texts(ax) and ax.get_xlim()[1] > 0
    with pytest.raises(ValueError, match=r"no range 'nowhere' in the trace; expected one of \['ou"):
        pictures.draw_trace(ax, slices, "nowhere")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (("add", 8), "add, n = 8: 0.5 FLOP/B, 2.5e-09 GFLOP/s, 50% of its memory roof"),
        (("mm", 8), "mm, n = 8: 20 FLOP/B, 1e-07 GFLOP/s, 100% of its compute roof"),
        (("hot", 8), "hot, n = 8: 0.5 FLOP/B, 1e-08 GFLOP/s, above its memory roof: cached"),
    ],
)
def test_the_roofline_says_how_near_the_roof(ax, chosen, words):
    roof = profiling.Roofline(bandwidth=10.0, peak_flops=100.0)
    points = [("add", 8, 5, 10, 2.0), ("mm", 8, 200, 10, 2.0), ("hot", 8, 5, 10, 0.5)]
    pictures.draw_roofline(ax, roof, points, chosen)
    assert ax.get_title() == words


def test_ranges_and_waiting(ax):
    ranges = {"data": {"us": 30.0, "calls": 1200}, "compute": {"us": 10.0, "calls": 3}}
    pictures.draw_ranges(ax, ranges)
    assert texts(ax) == ["75%, 1,200 calls", "25%, 3 calls"]
    ax.clear()
    pictures.draw_stall(ax, {0: 0.75, 2: 0.5}, lambda workers: 0.5 / (1 + workers))
    assert [bar.get_height() for bar in ax.patches] == [0.75, 0.5]
    assert list(ax.lines[0].get_ydata()) == [0.5, pytest.approx(1 / 6)]
