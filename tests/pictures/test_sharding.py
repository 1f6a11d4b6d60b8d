"""What chapter 15 draws."""

from helpers import budget, pipeline
from helpers.page.calculator import translate
from helpers.pictures import sharding as pictures


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
