import json

import pytest
import torch
from torch.profiler import record_function

from helpers import profiling
from helpers.pictures import profiling as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_the_loop_names_every_bound(ax):
    pictures.draw_loop(ax)
    assert {"data", "overhead", "memory", "compute"} <= set(texts(ax))


@pytest.fixture
def slices(tmp_path):
    def job():
        with record_function("outer"):
            torch.ones(300, 300) @ torch.ones(300, 300)

    path = tmp_path / "trace.json"
    profiling.trace(job).export_chrome_trace(str(path))
    return pictures.read_trace(path)


def test_a_trace_is_read_as_nested_slices(slices):
    first = slices[0]
    assert (first["name"], first["kind"], first["depth"]) == ("outer", "user_annotation", 0)
    by_name = {s["name"]: s for s in slices}
    assert by_name["aten::matmul"]["depth"] == 1 and by_name["aten::mm"]["depth"] == 2
    assert all(0 <= s["start"] <= s["end"] <= first["end"] + 1 for s in slices)


def test_threads_do_not_nest_in_each_other(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.0, "dur": 10.0, "tid": 1}
    events = [event, event | {"tid": 2, "ts": 6.0, "dur": 1.0}, {"ph": "M", "name": "other"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = [(s["start"], s["end"], s["depth"]) for s in pictures.read_trace(path)]
    assert found == [(0.0, 10.0, 0), (1.0, 2.0, 0)]


def test_an_empty_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    assert pictures.read_trace(path) == []


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
    roof = profiling.Roofline(bandwidth=10.0, rate=100.0)
    points = [("add", 8, 5, 10, 2.0), ("mm", 8, 200, 10, 2.0), ("hot", 8, 5, 10, 0.5)]
    pictures.draw_roofline(ax, roof, points, chosen)
    assert ax.get_title() == words


def test_stages_and_waiting(ax):
    stages = {"data": {"us": 30.0, "calls": 1200}, "compute": {"us": 10.0, "calls": 3}}
    pictures.draw_stages(ax, stages)
    assert texts(ax) == ["75%, 1,200 calls", "25%, 3 calls"]
    ax.clear()
    pictures.draw_stall(ax, {0: stages, 2: stages}, lambda workers: 0.5 / (1 + workers))
    assert [bar.get_height() for bar in ax.patches] == [0.75, 0.75]
    assert list(ax.lines[0].get_ydata()) == [0.5, pytest.approx(1 / 6)]
