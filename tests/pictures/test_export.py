import json
import re
from pathlib import Path

import pytest

from helpers.export import GraphNode
from helpers.page import decisions
from helpers.pictures import export as pictures

NODES = [
    GraphNode("Cast", ("images",), {}, {"a": ("batch", 3)}),
    GraphNode("Gemm", ("a",), {"head.weight": (2, 3), "w" * 40: ()}, {"b": ("batch", 2)}),
]


def texts(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


def test_every_route_ends_in_a_file_and_what_runs_it(ax):
    pictures.draw_routes(ax)
    found = [text.replace("\n", " ") for text in texts(ax)]
    for file, runs in pictures.ROUTES:
        assert file in found and runs in found


def test_a_step_shows_its_result_and_its_weights(ax):
    pictures.draw_graph(ax, NODES, 2)
    found = texts(ax)
    assert found[:2] == ["1  Cast", "2  Gemm"]
    assert {"writes  b: [batch, 2]", "reads  a", "head.weight  [2, 3]"} <= set(found)
    assert f"…{'w' * 25}  one number" in found
    low, high = ax.get_ylim()
    assert all(low < text.get_position()[1] < high + 1.5 for text in ax.texts)


def test_a_step_without_weights_draws_no_box_for_them(ax):
    pictures.draw_graph(ax, NODES, 1)
    assert len(ax.patches) == 2
    assert "reads  images" in texts(ax)


def row(engine, batch, p50, p99):
    times = {"p50": [p50, p50, 2 * p50], "p99": [p99] * 3}
    return {"model": "GPT", "engine": engine, "batch": batch} | times


def test_latencies_of_one_model_and_batch(ax):
    rows = [row("eager", 1, 2.0, 8.0), row("ORT", 1, 1.0, 4.0), row("eager", 64, 9.0, 9.0)]
    pictures.draw_latency(ax, rows, "GPT", 1)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["eager", "ORT"]
    assert texts(ax) == ["2", "8", "1", "4"]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_color() for line in dots] == [pictures.BLUE, pictures.ORANGE]
    assert ax.get_xlim() == pytest.approx((1 / 1.4, 8 * 1.4))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "5", "10"]
    assert not ax.get_xticklabels(minor=True)  # they would overlap


def test_the_tree_is_shown_and_links_to_sections_that_exist(monkeypatch):
    bundles = []
    monkeypatch.setattr(decisions, "display", lambda bundle, raw: bundles.append(bundle))
    pictures.targets_tree()
    assert bundles[0]["text/plain"].endswith(" 7 endings>")

    labels = set()
    path = Path(__file__).parents[2] / "notebooks" / "17_export.ipynb"
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        labels.update(re.findall(r"^\(([\w-]+)\)=$", "".join(cell["source"]), re.M))
    tree = decisions.read_tree(pictures.TARGETS)
    for end in decisions.advice(tree):
        assert end.sections and {one.label for one in end.sections} <= labels
