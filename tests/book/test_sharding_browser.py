"""The calculator of chapter 15 in a real browser: Python's numbers."""

import random

import pytest

from helpers import budget
from helpers.pictures import sharding as pictures

pytestmark = pytest.mark.browser

CALL = """(settings) => settings.map((s) => {
    try { return document.querySelector(".calculator").calculator.rank_step_bytes(s); }
    catch (error) { return error.message; }
})"""


@pytest.fixture(scope="module")
def html(html_of):
    return html_of(pictures.calculator)


def settings(count):
    draw = random.Random(0)
    for _ in range(count):
        heads = draw.randint(1, 128)
        yield {
            "vocabulary": round(256 * 1000 ** draw.random()),
            "context": round(16 * 1024 ** draw.random()),
            "layers": draw.randint(1, 128),
            "heads": heads,
            "width": heads * draw.randint(1, max(1, 16384 // heads)) + (draw.random() < 0.05),
            "micro_batch": round(256 ** draw.random()),
            "precision": draw.choice(["fp32", "amp", "bf16"]),
            "optimizer": draw.choice(["none", "sgd", "momentum", "adam", "fused adam"]),
            "attention": draw.choice(["fused", "matrix"]),
            "checkpointing": draw.choice(["none", "blocks"]),
            "sharding": draw.choice(["ddp", "zero1", "zero2", "zero3"]),
            "gpus": draw.choice([1, 2, 3, 7, 8, 64, 4096]),
        }


def python_result(setting):
    try:
        return budget.rank_step_bytes(**setting)
    except ValueError as error:
        return str(error)


def test_the_browser_computes_what_python_computes(open_page, html):
    given = list(settings(500))
    got = open_page(html).evaluate(CALL, given)
    assert got == [python_result(setting) for setting in given]
    assert 5 < sum(isinstance(result, str) for result in got) < 50  # refused by both, same words


def test_what_the_page_shows_grows_small_with_more_sharding(open_page, html):
    page = open_page(html)
    choice = page.locator('[data-name="sharding"] select')
    peaks = []
    for stage in ("ddp", "zero1", "zero2", "zero3"):
        choice.select_option(stage)
        number, unit = page.locator("b[data-peak]").inner_text().split()
        assert unit == "GiB"
        peaks.append(float(number.replace(",", "")))
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
