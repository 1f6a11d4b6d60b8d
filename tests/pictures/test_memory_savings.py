import json
import re
from pathlib import Path

from helpers.page import decisions
from helpers.pictures import memory_savings as pictures


def test_steps_share_one_axis_and_each_marks_its_peak(ax):
    pictures.draw_steps(
        ax,
        {
            "plain": [("a", 1_000_000), ("b", 5_000_000), ("c", 2_000_000)],
            "lean": [("a", 1_000_000), ("b", 3_000_000)],
        },
    )
    plain, plain_top, lean, lean_top = ax.lines
    assert list(plain.get_xdata()) == [0, 0.5, 1] and list(plain.get_ydata()) == [1, 5, 2]
    assert [line.get_ydata()[0] for line in (plain_top, lean_top)] == [5, 3]
    assert list(lean.get_xdata()) == [0, 1]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["plain", "lean"]


def test_the_best_group_is_marked(ax):
    pictures.draw_groups(ax, layers=64, ratio=1)
    assert "best k = 8" in ax.get_title()  # the square root
    axes = ax.get_xlim(), ax.get_ylim()
    ax.clear()
    pictures.draw_groups(ax, layers=16, ratio=16)
    assert "best k = 1" in ax.get_title()
    assert (ax.get_xlim(), ax.get_ylim()) == axes  # whatever is drawn


def test_each_step_is_a_bar_in_the_color_of_the_cards_that_hold_it(ax):
    pictures.draw_fit(ax, {"a": 100e9, "b": 80e9, "c": 24.5e9, "d": 12e9}, cards=(24, 80))
    assert [bar.get_width() for bar in ax.patches] == [100, 80, 24.5, 12]
    gray, blue, still_blue, green = (bar.get_facecolor() for bar in ax.patches)
    assert blue == still_blue and len({gray, blue, green}) == 3
    assert [text.get_text() for text in ax.texts] == ["100.0", "80.0", "24.5", "12.0"]
    assert [line.get_xdata()[0] for line in ax.lines] == [24, 80]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c", "d"]
    assert ax.yaxis_inverted()  # the first step is on top


def test_the_tree_for_out_of_memory_is_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(decisions, "display", lambda bundle, raw: shown.append(bundle))
    pictures.out_of_memory_tree()
    assert shown[0]["text/plain"] == "<decision tree: When does the error occur? 22 endings>"
    assert "什么时候报错" in shown[0]["text/html"]


def test_the_tree_links_to_sections_that_exist():
    labels = set()
    for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        labels.update(
            label for text in texts for label in re.findall(r"^\(([\w-]+)\)=$", text, re.M)
        )

    tree = decisions.read_tree(pictures.OUT_OF_MEMORY)
    linked = [{one.label for one in end.sections} - {None} for end in decisions.advice(tree)]
    assert set.union(*linked) <= labels
    assert sum(map(bool, linked)) >= 20  # of 22: two lead only to chapters that are not written yet
