"""What chapter 15 draws."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from helpers import budget, pipeline
from helpers.page import decisions
from helpers.page.calculator import translate
from helpers.pictures import sharding as pictures
from helpers.pictures.draw import BLUE, PALE, PURPOSES


def shown(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


def faces(ax):
    return [to_hex(patch.get_facecolor()).upper() for patch in ax.patches]


@pytest.mark.parametrize("level", range(4))
def test_each_level_shards_one_thing_more(ax, level):
    pictures.draw_level(ax, level)
    colored = {name: faces(ax).count(PURPOSES[name].upper()) for name in pictures.STORED}
    for number, name in enumerate(("optimizer", "gradients", "parameters")):
        assert colored[name] == (4 if number < level else 16)
    sizes = ["8P", "4P", "4P"]  # of each; on the page from left to right the other way round
    terms = [f"{size}/4" if number < level else size for number, size in enumerate(sizes)]
    assert shown(ax)[-1] == " + ".join(reversed(terms))


@pytest.mark.parametrize("moment", range(len(pictures.MOMENTS)))
def test_only_the_block_that_computes_is_complete(ax, moment):
    what, computing = pictures.MOMENTS[moment]
    pictures.draw_gathered(ax, moment)
    blocks = [faces(ax)[4 * block : 4 * block + 4] for block in range(3)]
    for block, parts in enumerate(blocks):
        other = PALE if block == computing else "#FFFFFF"
        assert parts == [BLUE, other, other, BLUE]
    assert what in ("", *shown(ax))
    bold = [text.get_text() for text in ax.texts if text.get_weight() == "bold"]
    assert bold == ([] if computing is None else [f"blocks[{computing}]"])


def test_a_step_goes_through_the_blocks_and_back():
    assert [block for _, block in pictures.MOMENTS if block is not None] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_in_parts_have_a_row_for_each_rank(ax, ranks):
    pictures.draw_split(ax, ranks)
    rows = [f"{name} {rank}" for rank in range(ranks) for name in ("up", "h", "down")]
    want = ["x", "y", *rows, *(["all_reduce"] if ranks > 1 else [])]
    assert shown(ax) == want


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", 16), ("1f1b", 4)])
def test_a_schedule_says_its_bubble_and_what_it_holds(ax, schedule, held):
    pictures.draw_schedule(ax, schedule, 16)
    assert ax.get_title().split() == ["bubble", "=", "16%", "most_stored", "=", str(held)]
    assert len(ax.patches) == 4 * 16 * 2


def test_the_tree_is_shown_and_links_to_sections_that_exist(monkeypatch):
    bundles = []
    monkeypatch.setattr(decisions, "display", lambda bundle, raw: bundles.append(bundle))
    pictures.parallelism_tree()
    assert bundles[0]["text/plain"].endswith(" 11 endings>")

    labels = set()
    for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            labels.update(re.findall(r"^\(([\w-]+)\)=$", "".join(cell["source"]), re.M))
    tree = decisions.read_tree(pictures.PARALLELISM)
    for end in decisions.advice(tree):
        assert end.sections and {one.label for one in end.sections} <= labels


def test_a_pipeline_shows_every_piece_of_work_at_its_place(ax):
    works = pipeline.timeline(pipeline.one_forward_one_backward(2, 3), 1, 2)
    pictures.draw_pipeline(ax, works)
    boxes = [(p.get_x(), p.get_width()) for p in ax.patches]
    assert boxes == [(w.start, w.end - w.start) for w in works]
    texts = [text.get_text() for text in ax.texts if text.get_text()]
    assert texts == [*(str(w.micro_batch) for w in works), "0", "1"]


def test_the_calculator_is_one_output_that_repeats(monkeypatch):
    shown = []
    monkeypatch.setattr(pictures.page, "display", lambda bundle, raw: shown.append(bundle))
    pictures.calculator()
    pictures.calculator()
    assert shown[0] == shown[1]
    assert len(shown[0]["text/html"]) < 60_000
    start = {"vocabulary": 50257, "context": 2048, "layers": 32, "heads": 32, "width": 4096}
    start |= {"micro_batch": 1, "precision": "amp", "optimizer": "fused adam"}
    moments = budget.rank_step_bytes(**start, checkpointing="blocks", sharding="ddp", gpus=8)
    peak = max(sum(parts.values()) for parts in moments.values())
    assert f"peak {peak / 2**30:.2f} GiB>" in shown[0]["text/plain"]


def test_the_formula_can_be_translated():
    functions = (budget.rank_step_bytes, budget.rank_bytes, budget.step_bytes)
    assert "function rank_step_bytes" in translate(
        *functions, budget.block_bytes, budget.parameter_count
    )
