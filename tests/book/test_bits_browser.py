"""The toggling of bits in a real browser: the same numbers as PyTorch, usable by mouse and keys."""

import math
import random
import re
import struct

import pytest
import torch

from helpers.page import bits

pytestmark = pytest.mark.browser

SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
NAMES = [one.name for one in bits.FORMATS]
WHOLE = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


@pytest.fixture
def html(monkeypatch):
    """The text/html that `toggle_bits` shows."""
    shown = []
    monkeypatch.setattr(bits, "display", lambda bundle, raw: shown.append(bundle["text/html"]))

    def make(*args, **options):
        bits.toggle_bits(*args, **options)
        return shown.pop()

    return make


def call(page, name, format_name, values):
    """`root.bits.name(format, value)` for each of the values; JSON has no nan, so text comes back.

    A number of JavaScript as text is the shortest that gives the same number again.
    """
    return page.evaluate(
        """([name, format, values]) => {
            const { formats, ...functions } = document.querySelector(".bits").bits;
            const one = formats.find((f) => f.name === format);
            const text = (x) => Object.is(x, -0) ? "-0" : String(x);
            return values.map((v) => text(functions[name](one, Number(v))));
        }""",
        [name, format_name, [js(value) for value in values]],
    )


def js(value):
    return repr(value).replace("inf", "Infinity").replace("nan", "NaN")


def number(text):
    return math.nan if text == "null" else float(text.replace("Infinity", "inf"))


def same(first, second):
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return first == second and math.copysign(1, first) == math.copysign(1, second)


def pattern_values(dtype, patterns):
    size = torch.finfo(dtype).bits
    whole = torch.tensor(patterns, dtype=torch.int64)
    whole = torch.where(whole >= 2 ** (size - 1), whole - 2**size, whole) if size > 8 else whole
    return whole.to(WHOLE[size]).view(dtype).double().tolist()


def random_floats(count):
    """Random float32 bit patterns, and everyday values."""
    pick = random.Random(0)
    patterns = [pick.getrandbits(32) for _ in range(count)]
    found = [struct.unpack("<f", struct.pack("<I", one))[0] for one in patterns]
    everyday = [pick.uniform(-1, 1) * 10 ** pick.randint(-9, 6) for _ in range(count)]
    return found + torch.tensor(everyday).tolist()


def edges(one):
    """Where rounding decides: values, middles between two and close to them, the ends."""
    size = 2 ** (one.exponent + one.mantissa)
    places = sorted({0, size // 2, size - 2 ** (one.mantissa + 1), 2**one.mantissa - 3})
    found = []
    for place in places:
        near = [one.decode(place + k) for k in range(6)]
        middles = [(a + b) / 2 for a, b in zip(near, near[1:], strict=False)]
        found += near + middles + [m * (1 + 2**-20) for m in middles]
        found += [m * (1 - 2**-20) for m in middles]
    largest = one.decode(size - 2**one.mantissa - 1 if one.infinities else size - 2)
    gap = largest - one.decode(one.encode(largest) - 1)
    found += [largest + k * gap / 4 for k in range(1, 9)]
    found += [0.0, math.inf, math.nan, 1e-45, 3.4028234663852886e38]
    return torch.tensor([*found, *(-v for v in found)], dtype=torch.float64).float().tolist()


# ---- the numbers


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_decodes_as_in_pytorch(open_page, html, name):
    page = open_page(html())
    dtype = getattr(torch, name)
    patterns = list(range(2 ** torch.finfo(dtype).bits))
    got = [number(text) for text in call(page, "decode", name, patterns)]
    expected = pattern_values(dtype, patterns)
    wrong = [p for p, g, e in zip(patterns, got, expected, strict=True) if not same(g, e)]
    assert wrong == []


def test_random_patterns_decode_as_float32(open_page, html):
    page = open_page(html())
    pick = random.Random(1)
    patterns = [pick.getrandbits(32) for _ in range(20_000)]
    patterns += [sign + k for sign in (0, 2**31) for k in (0, 1, 2**23 - 1, 2**23, 255 << 23)]
    got = [number(text) for text in call(page, "decode", "float32", patterns)]
    expected = pattern_values(torch.float32, patterns)
    assert [p for p, g, e in zip(patterns, got, expected, strict=True) if not same(g, e)] == []


@pytest.mark.parametrize("name", ["float32", *SMALL])
def test_rounding_is_that_of_pytorch(open_page, html, name):
    page = open_page(html())
    (one,) = [one for one in bits.FORMATS if one.name == name]
    values = random_floats(4000) + edges(one)
    if name == "float32":  # decimals of more digits
        values += [v * (1 + k * 2**-25) for v in random_floats(2000) for k in (1, 2, 3)]
    cast = torch.tensor(values, dtype=torch.float64).to(getattr(torch, name))
    size = torch.finfo(cast.dtype).bits
    patterns = (cast.view(WHOLE[size]).long() & (2**size - 1)).tolist()
    got = call(page, "encode", name, values)
    for value, expected, stored, found in zip(
        values, patterns, cast.double().tolist(), got, strict=True
    ):
        assert math.isnan(stored) or int(found) == expected, value
        assert same(one.decode(int(found)), stored), value


@pytest.mark.parametrize("one", bits.FORMATS, ids=lambda one: one.name)
def test_the_script_and_the_first_state_agree(open_page, html, one):
    """The page's numbers come from Python first and from the script afterwards."""
    page = open_page(html())
    values = [v for v in random_floats(500) + edges(one) if not math.isnan(v)]
    patterns = [one.encode(value) for value in values]
    assert [int(text) for text in call(page, "encode", one.name, values)] == patterns
    got = [number(text) for text in call(page, "above", one.name, patterns)]
    expected = [one.above(pattern) for pattern in patterns]
    assert [None if math.isnan(g) else g for g in got] == expected
    texts = page.evaluate(
        """(values) => values.map((v) => ["exact", "short"].map((name) =>
            document.querySelector(".bits").bits[name](Number(v))))""",
        [js(value) for value in values],
    )
    assert texts == [[bits.exact(value), bits.short(value)] for value in values]


@pytest.mark.parametrize("chosen", NAMES)
@pytest.mark.parametrize("value", [0.1, -1e-7, 0.0, 2.0**-140, 1e6, -math.inf, math.nan, 448.0])
def test_the_first_state_is_what_the_script_shows(open_page, html, value, chosen):
    page = open_page(html(value, chosen=chosen), java_script_enabled=False)
    still = (
        page.locator(".bits form").inner_text(),
        page.locator("button[aria-pressed=true]").count(),
    )
    page = open_page(html(value, chosen=chosen))
    live = (
        page.locator(".bits form").inner_text(),
        page.locator("button[aria-pressed=true]").count(),
    )
    assert still == live
    page.get_by_label("float8_e5m2").check()
    page.get_by_label(chosen, exact=True).check()  # the buttons are made anew
    assert page.locator(".bits form").inner_text() == live[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        (" -3.5e-2 ", -0.035),
        (".5", 0.5),
        ("5.", 5),
        ("1/3", 1 / 3),
        ("2^-24", 2.0**-24),
        ("−1", -1),  # a typographic minus
        ("inf", math.inf),
        ("-Infinity", -math.inf),
        ("nan", math.nan),
        ("1e400", math.inf),
    ],
)
def test_what_can_be_typed(open_page, html, text, value):
    page = open_page(html())
    got = page.evaluate("(t) => String(document.querySelector('.bits').bits.parse(t))", text)
    assert same(number(got), value)


@pytest.mark.parametrize("text", ["", "abc", "1..2", "1,5", "2**3", "0x10", "1/2/3", "e5", "--1"])
def test_what_is_no_number_changes_nothing(open_page, html, text):
    page = open_page(html())
    before = page.locator("dl").inner_text()
    field = page.get_by_role("textbox")
    field.fill(text)
    told = page.locator(".bits__wrong")
    assert field.get_attribute("aria-invalid") == "true"
    assert told.inner_text().endswith("Below is still 0.1")
    assert page.locator("dl").inner_text() == before
    field.fill("2")
    assert field.get_attribute("aria-invalid") is None and not told.is_visible()


# ---- the page


def value_shown(page, nth=0):
    return page.locator(".bits__value").nth(nth).inner_text()


def press(page, place, nth=0):
    page.locator(".bits").nth(nth).get_by_role("button", name=place, exact=True).click()


def test_a_bit_flips_and_the_number_follows(open_page, html):
    page = open_page(html(1.0))
    press(page, "2^-1")
    assert value_shown(page) == "1.5"
    assert page.get_by_role("textbox").input_value() == "1.5"
    press(page, "±")
    assert value_shown(page) == "-1.5"
    press(page, "2^0")
    assert value_shown(page) == "-0.75"
    assert page.locator("tbody tr").nth(3).inner_text().split() == ["bfloat16", "-0.75", "0"]
    last = page.get_by_role("button", name="2^0", exact=True)
    assert last.get_attribute("aria-pressed") == "false"
    press(page, "2^4")
    assert value_shown(page) == "-49152"
    press(page, "2^0")
    assert value_shown(page) == "nan"
    assert page.get_by_role("textbox").input_value() == "nan"


def test_the_typed_number_stays_when_the_format_changes(open_page, html):
    page = open_page(html())
    page.get_by_role("textbox").fill("65519")
    assert value_shown(page) == "65504"
    page.get_by_label("float8_e4m3fn").check()
    assert value_shown(page) == "448"
    assert page.locator(".bits__row button").count() == 8
    page.get_by_label("float32").check()
    assert value_shown(page) == "65519"
    page.get_by_label("tf32").check()
    assert value_shown(page) == "65536" or value_shown(page) == "65504"
    assert page.locator(".bits__row button").count() == 19
    assert page.locator(".bits__row span").count() == 13


def test_next_and_previous(open_page, html):
    page = open_page(html(65504.0))
    up, down = page.locator("[data-move='1']"), page.locator("[data-move='-1']")
    up.click()
    assert value_shown(page) == "inf"
    assert up.is_disabled()
    down.click()
    down.click()
    assert value_shown(page) == "65472"
    page.get_by_role("textbox").fill("0")
    down.click()
    assert page.locator(".bits dd").nth(2).inner_text().startswith("次正规数")


def test_keys_move_and_flip(open_page, html):
    page = open_page(html(1.0))
    page.locator(".bits__row button").first.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert value_shown(page) == "1.5"
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert value_shown(page) == "1.5009765625"
    page.keyboard.press("ArrowRight")  # there is no further one
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    assert value_shown(page) == "-1.5009765625"
    assert page.evaluate("() => document.activeElement.ariaLabel") == "±"
    assert page.locator(".bits__row button[tabindex='0']").count() == 1
    page.keyboard.press("ArrowLeft")
    page.get_by_role("textbox").press("Enter")  # sends nothing
    assert value_shown(page) == "-1.5009765625"


def test_two_of_them_do_not_meet(open_page, html):
    page = open_page(html(1.0) + html(3.0, chosen="float32"))
    press(page, "2^-1", nth=1)
    assert (value_shown(page), value_shown(page, 1)) == ("1", "2")
    page.get_by_label("bfloat16").first.check()
    assert page.get_by_label("float32").nth(1).is_checked()


def test_no_name_leaks(open_page, html):
    names = "() => Object.getOwnPropertyNames(window)"
    empty = open_page("").evaluate(names)
    assert set(open_page(html()).evaluate(names)) == set(empty)


def test_the_script_finds_its_place_where_the_page_moved_it(open_page, html):
    """Classic notebooks run the script from <head>; JupyterLab replaces it in its place."""
    markup, script = re.search(r"(.*)<script>(.*)</script>", html(1.0), re.DOTALL).groups()
    page = open_page(markup)
    page.add_script_tag(content=script)
    press(page, "2^-1")
    assert value_shown(page) == "1.5"


def in_one_language(markup, language):
    other = "en" if language == "zh" else "zh"
    return re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", markup, flags=re.DOTALL)


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize(("paper", "ink"), [("#ffffff", "#222222"), ("#121212", "#ced6dd")])
def test_accessible_in_both_languages_and_themes(open_page, html, language, paper, ink):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    body = in_one_language(html(), language)
    page = open_page(body, f"body {{ background: {paper}; color: {ink} }}")
    label = page.locator(".bits__word").get_attribute("aria-label")
    assert bool(re.search("[一-鿿]", label)) == (language == "zh")
    assert bool(re.search("[一-鿿]", page.locator(".bits").inner_text())) == (language == "zh")
    violations = axe.run(page).response["violations"]
    assert [v["id"] for v in violations] == []


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("chosen", NAMES)
@pytest.mark.parametrize("width", [320, 375, 1280])
def test_it_fits_the_window(open_page, html, width, chosen, language):
    body = in_one_language(html(-1e-7, chosen=chosen), language)
    page = open_page(body, viewport={"width": width, "height": 700})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    frame = page.locator(".bits").bounding_box()
    for part in (".bits table", ".bits__word", ".bits dl"):
        box = page.locator(part).bounding_box()
        assert box["x"] + box["width"] <= frame["x"] + frame["width"]
    sizes = [b.bounding_box() for b in page.get_by_role("button").all()]
    assert min(min(box["width"], box["height"]) for box in sizes) >= 24
