"""The calculator in a real browser: Python's numbers, and a page that can be used."""

import random
import re

import pytest

from helpers import budget
from helpers.page.calculator import translate
from helpers.pictures import memory as pictures

pytestmark = pytest.mark.browser

GIB = 2**30
FUNCTIONS = (
    budget.step_bytes,
    budget.block_bytes,
    budget.parameter_count,
    budget.tokens_per_update,
)


@pytest.fixture(scope="module")
def html(html_of):
    return html_of(pictures.calculator)


@pytest.fixture
def page(open_page, html):
    return open_page(html)


def settings(count):
    """Random arguments over all that the page lets one set; some sizes that no model has."""
    draw = random.Random(0)
    for _ in range(count):
        heads = draw.randint(1, 128)
        width = heads * draw.randint(1, max(1, 16384 // heads))
        yield {
            "vocabulary": round(256 * 1000 ** draw.random()),
            "context": round(16 * 1024 ** draw.random()),
            "layers": draw.randint(1, 128),
            "heads": heads,
            "width": width + (draw.random() < 0.05),
            "micro_batch": round(256 ** draw.random()),
            "precision": draw.choice(["fp32", "amp", "bf16"]),
            "optimizer": draw.choice(["none", "sgd", "momentum", "adam", "fused adam"]),
            "attention": draw.choice(["fused", "matrix"]),
            "checkpointing": draw.choice(["none", "blocks"]),
            "accumulation": draw.choice([1, 1, 7]),
            "gpus": draw.choice([1, 8]),
        }


def python_result(setting):
    try:
        return budget.step_bytes(**setting)
    except ValueError as error:
        return str(error)


CALL = """(settings) => settings.map((s) => {
    try { return document.querySelector(".calculator").calculator.step_bytes(s); }
    catch (error) { return error.message; }
})"""


def test_the_browser_computes_what_python_computes(page):
    given = list(settings(1000))
    got = page.evaluate(CALL, given)
    assert got == [python_result(setting) for setting in given]
    assert 20 < sum(isinstance(result, str) for result in got) < 80  # refused by both, same words


def test_whole_numbers_of_the_page_stay_exact():
    """The largest sizes that the page allows, with whatever makes the result largest."""
    largest = {
        "vocabulary": 256000,
        "context": 16384,
        "layers": 128,
        "heads": 128,
        "width": 16384,
        "micro_batch": 256,
        "accumulation": 512,
        "gpus": 4096,
        "attention": "matrix",
    }
    for precision in ("fp32", "amp", "bf16"):
        assert budget.peak_bytes(**largest, precision=precision) < 2**53


# ---- each operation, also where the languages differ


def plus(*, x, y):
    return x + 2.5 - y * x


def quotient(*, x, y):
    return x / y


def floor(*, x, y):
    return x // y


def rest(*, x, y):
    return x % y


def limits(*, x, y):
    return min(-x, y, 3) - max(x, y)


def chain(*, x, y):
    return x < y <= 7 or x == y


def member(*, x, y):
    return x in (1, 3) and not y


def either(*, x, y):
    return x or y


def both(*, x, y):
    return x and y


def branches(*, x, y):
    if x > y:
        z = 1
    elif x != -3:
        z = 2
    else:
        z = 3
    return {"big": 5, "small": 6}["big" if z >= 2 else "small"]


OPERATIONS = (plus, quotient, floor, rest, limits, chain, member, either, both, branches)
VALUES = [-7, -3, -0.5, 0, 0.25, 1, 2, 3, 7, 10**15 + 1]


def in_python(function, x, y):
    try:
        return function(x=x, y=y)
    except ZeroDivisionError:
        return "error"


@pytest.mark.parametrize("function", OPERATIONS, ids=lambda function: function.__name__)
def test_every_operation_gives_python_s_result(open_page, function):
    pairs = [(x, y) for x in VALUES for y in VALUES]
    script = f"""(pairs) => {{
        {translate(function)}
        return pairs.map(([x, y]) => {{
            try {{ return {function.__name__}({{ x, y }}); }}
            catch (error) {{ if (error instanceof RangeError) return "error"; throw error; }}
        }});
    }}"""
    got = open_page("").evaluate(script, pairs)
    for (x, y), found in zip(pairs, got, strict=True):
        expected = in_python(function, x, y)
        assert found == expected, (x, y)
        assert isinstance(found, bool) == isinstance(expected, bool)


# ---- the page


def numbers(page):
    """Peak, verdict, and what the bars say."""
    return page.locator(".calculator__result").inner_text()


def control(page, name):
    return page.locator(f'[data-name="{name}"]')


def shown_peak(page):
    number, unit = page.locator("b[data-peak]").inner_text().split()
    return float(number.replace(",", "")) * {"GiB": GIB, "MiB": 2**20}[unit]


def setting_of(page):
    """What the controls say, as arguments of the formula."""
    found = {}
    for field in page.locator("[data-name]").all():
        box = field.locator("input[type=number], select")
        value = box.input_value()
        found[field.get_attribute("data-name")] = int(value) if value.isdigit() else value
    return found


def assert_agrees(page):
    peak = budget.peak_bytes(**setting_of(page))
    assert shown_peak(page) == pytest.approx(peak, abs=0.006 * GIB)


@pytest.mark.parametrize("language", ["zh", "en"])
def test_the_first_state_is_what_the_script_shows(open_page, html, language):
    other = "en" if language == "zh" else "zh"
    body = re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", html)
    still = open_page(body, java_script_enabled=False).locator(".calculator").inner_text()
    live = open_page(body).locator(".calculator").inner_text()
    assert still == live
    assert re.search("10.54 GiB", live)


def test_a_slider_moves_by_keyboard_and_every_number_follows(page):
    slider = page.get_by_role("slider", name="sequences in a micro-batch")
    before = numbers(page)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert control(page, "micro_batch").locator("input[type=number]").input_value() == "9"
    assert slider.get_attribute("aria-valuetext") == "9"
    assert numbers(page) != before
    assert_agrees(page)
    page.keyboard.press("End")
    assert setting_of(page)["micro_batch"] == 256
    assert "does not fit" in page.get_by_role("status").inner_text()
    assert_agrees(page)


def test_a_number_that_the_slider_does_not_know_can_be_typed(page):
    box = control(page, "context").locator("input[type=number]")
    box.fill("1000")
    assert_agrees(page)
    box.fill("99999")
    box.blur()
    assert box.input_value() == "16384"
    box.fill("")
    box.blur()
    assert box.input_value() == "16384"
    assert_agrees(page)


def test_the_width_stays_a_multiple_of_the_heads(page):
    told = control(page, "width").locator("[data-rounded]")
    assert not told.is_visible()
    heads = control(page, "heads").locator("input[type=number]")
    heads.fill("7")
    assert setting_of(page)["width"] == 770
    assert told.inner_text().endswith("rounded to a multiple of: heads")
    page.get_by_label("Preset").select_option("GPT-2 small")
    assert not told.is_visible()
    heads.fill("7")
    assert_agrees(page)
    width = control(page, "width").locator("input[type=number]")
    width.fill("16384")
    width.blur()
    assert setting_of(page)["width"] == 16380
    assert_agrees(page)


def test_presets_set_the_model_and_go_when_it_changes(page):
    preset = page.get_by_label("Preset")
    assert preset.evaluate("(e) => e.selectedOptions[0].text") == "GPT-2 small"
    for name, shape in pictures.SHAPES.items():
        preset.select_option(name)
        found = setting_of(page)
        assert tuple(found[size] for size in pictures.SHAPE) == shape
        assert_agrees(page)
    control(page, "layers").locator("input[type=number]").fill("5")
    assert preset.input_value() == ""
    control(page, "layers").locator("input[type=number]").fill("96")
    assert preset.evaluate("(e) => e.selectedOptions[0].text") == "GPT-3 175B"


@pytest.mark.parametrize("name", ["precision", "optimizer", "attention", "checkpointing"])
def test_every_choice_changes_the_result_to_python_s(page, name):
    select = control(page, name).locator("select")
    values = select.locator("option").evaluate_all("(all) => all.map((e) => e.value)")
    for value in values:
        select.select_option(value)
        assert setting_of(page)[name] == value
        assert_agrees(page)


def test_the_verdict_compares_with_the_memory_of_the_card(page):
    status = page.get_by_role("status")
    memory = page.get_by_label("GPU memory")
    assert "It fits, with 5.46 GiB to spare" in status.inner_text()
    memory.select_option("8")
    assert "It does not fit: 2.54 GiB too much" in status.inner_text()
    line = page.locator(".calculator__track i").first
    assert float(line.evaluate("(e) => parseFloat(e.style.left)")) == pytest.approx(75.9, abs=0.1)


def test_the_table_adds_up_to_the_peak(page):
    control(page, "precision").locator("select").select_option("amp")
    cells = page.locator(".calculator__numbers > table td:nth-child(2)").all_inner_texts()
    total = sum(float(cell.split()[0]) for cell in cells)
    assert total == pytest.approx(shown_peak(page) / GIB, abs=0.03)
    page.locator("summary").click()
    rows = page.locator(".calculator__every tbody tr").all()
    moments = budget.step_bytes(**setting_of(page))
    for row, parts in zip(rows, moments.values(), strict=True):
        said = [float(c.split()[0].replace(",", "")) for c in row.locator("td").all_inner_texts()]
        assert said[0] == pytest.approx(sum(parts.values()) / GIB, abs=0.006)
        assert sum(said[1:]) == pytest.approx(said[0], abs=0.05)


def test_on_a_phone_the_verdict_stays_in_sight_beside_the_controls_alone(open_page, html):
    page = open_page(html, viewport={"width": 375, "height": 800})
    verdict = page.locator(".calculator__verdict")
    for name in ("layers", "gpus"):
        control(page, name).evaluate("(one) => scrollTo(0, one.offsetTop - 200)")
        box = verdict.bounding_box()
        assert 0 <= box["y"] <= 1 and box["height"] < 100
    page.locator("summary").click()
    page.locator("summary").evaluate("(one) => scrollTo(0, one.offsetTop - 200)")
    assert verdict.bounding_box()["y"] < -100
    total = page.locator(".calculator__every tbody td").first
    assert total.bounding_box()["x"] + total.bounding_box()["width"] < 375


def test_two_calculators_do_not_meet(open_page, html):
    page = open_page(html + html)
    first, second = page.locator(".calculator").all()
    before = first.locator(".calculator__result").inner_text()
    second.get_by_label("GPU memory").select_option("8")
    assert first.locator(".calculator__result").inner_text() == before
    assert second.locator(".calculator__result").inner_text() != before


def test_no_name_leaks(open_page, html):
    names = "() => Object.getOwnPropertyNames(window)"
    empty = open_page("").evaluate(names)
    assert set(open_page(html).evaluate(names)) == set(empty)


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize(("paper", "ink"), [("#ffffff", "#222222"), ("#121212", "#eeeeee")])
def test_accessible_in_both_languages_and_themes(open_page, html, language, paper, ink):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    other = "en" if language == "zh" else "zh"
    body = re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", html)
    page = open_page(body, f"body {{ background: {paper}; color: {ink} }}")
    page.locator("summary").click()
    assert [v["id"] for v in axe.run(page).response["violations"]] == []


@pytest.mark.parametrize("width", [320, 375, 800, 1280])
def test_it_fits_the_window(open_page, html, width):
    page = open_page(html, viewport={"width": width, "height": 700})
    page.locator("summary").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
