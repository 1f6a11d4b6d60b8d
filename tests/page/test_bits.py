import math
import re
from decimal import Decimal

import pytest
import torch

from helpers.page import bits

BY_NAME = {one.name: one for one in bits.FORMATS}
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def patterns(dtype):
    """Every pattern of a dtype of at most 16 bits, as that dtype."""
    size = torch.finfo(dtype).bits
    whole = torch.arange(2**size, dtype=torch.int32)
    return whole.to(WHOLE[size // 8]).view(dtype)


def as_patterns(tensor):
    """The bit patterns of a tensor, as whole numbers without a sign."""
    size = torch.finfo(tensor.dtype).bits
    return (tensor.view(WHOLE[size // 8]).long() & (2**size - 1)).tolist()


def same(first, second):
    """Equal, with the sign of zero; every NaN is the same."""
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return first == second and math.copysign(1, first) == math.copysign(1, second)


def samples(one):
    """Values in and around the range of a format: random ones, values, middles between them."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(-(2**31), 2**31, (2000,), generator=generator, dtype=torch.int64)
    random = draw.to(torch.int32).view(torch.float32)
    limit = 2.0 ** (2**one.exponent - one.bias)
    inside = random.abs().remainder(1) * limit / 8 ** torch.arange(2000).remainder(12)
    count = 2 ** (one.exponent + one.mantissa)
    stored = [one.decode(pattern) for pattern in range(0, count, max(1, count // 3001))]
    neighbours = [one.decode(pattern) for pattern in range(count // 2, count // 2 + 50)]
    stored = torch.tensor([*stored, *neighbours], dtype=torch.float64)
    stored = stored[stored.isfinite()]
    middles = (stored[1:] + stored[:-1]) / 2
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4028235e38])
    beyond = torch.tensor([448.0, 464.0, 464.0001, 480.0, 57344.0, 61439.0, 61440.0, 65519.0])
    beyond = torch.cat([beyond, torch.tensor([65520.0, 65504.0, 3.39e38, 3.3961e38])])
    tiny = 2.0 ** (1 - one.bias - one.mantissa) * torch.tensor([0.5, 0.5001, 1, 1.5, 2.5, 0.4999])
    parts = [random, inside, -inside, stored, middles, special, beyond, -beyond, tiny, -tiny]
    return torch.cat([part.float() for part in parts])


# ---- formats


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_decodes_as_in_pytorch(name):
    values = patterns(getattr(torch, name)).double().tolist()
    assert len(values) in (2**8, 2**16)
    for pattern, value in enumerate(values):
        assert same(BY_NAME[name].decode(pattern), value), pattern


def test_float32_decodes_as_in_pytorch():
    values = torch.cat([samples(BY_NAME["float32"]), 1.5e-45 * torch.arange(20)])
    for pattern, value in zip(as_patterns(values), values.tolist(), strict=True):
        assert same(BY_NAME["float32"].decode(pattern), value), hex(pattern)


@pytest.mark.parametrize("name", ["float32", *SMALL])
def test_rounding_is_that_of_pytorch(name):
    values = samples(BY_NAME[name])
    if name == "float32":  # from more digits than it holds
        values = torch.cat([values.double(), values.double() * (1 + 2**-24), values[:500] / 3.0])
        values = torch.cat([values, values.double() * (1 + 3 * 2**-25)])
    cast = values.to(getattr(torch, name))
    for value, stored, pattern in zip(
        values.tolist(), cast.double().tolist(), as_patterns(cast), strict=True
    ):
        got = BY_NAME[name].encode(value)
        assert math.isnan(stored) or got == pattern, value
        assert same(BY_NAME[name].decode(got), stored), value


@pytest.mark.parametrize("one", bits.FORMATS, ids=lambda one: one.name)
def test_a_value_comes_back(one):
    count = 2 ** (1 + one.exponent + one.mantissa)
    for pattern in range(0, count, max(1, count // 65537)):
        value = one.decode(pattern)
        assert math.isnan(value) or one.encode(value) == pattern


def test_tf32_is_float32_without_its_last_13_bits():
    tf32 = BY_NAME["tf32"]
    values = samples(BY_NAME["float32"])
    for pattern, value in zip(as_patterns(values), values.tolist(), strict=True):
        assert pattern % 2**13 or same(tf32.decode(pattern >> 13), value)
        size = pattern % 2**31
        low, rest = divmod(size, 2**13)
        up = rest > 2**12 or (rest == 2**12 and low % 2 == 1)
        if math.isfinite(value):
            assert tf32.encode(value) == (pattern >> 31 << 18) + low + up


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float8_e4m3fn", 448.0, 0x7E),
        ("float8_e4m3fn", 464.0, 0x7E),  # half-way to what would be 480: to the even pattern
        ("float8_e4m3fn", 465.0, 0x7E),  # there is no infinity
        ("float8_e4m3fn", -math.inf, 0xFE),
        ("float8_e5m2", 61440.0, 0x7C),  # infinity
        ("float16", 65519.0, 0x7BFF),
        ("float16", 65520.0, 0x7C00),
        ("float16", 2.0**-25, 0),
        ("float16", -(2.0**-24), 0x8001),
    ],
)
def test_rounding_at_the_ends(name, value, expected):
    assert BY_NAME[name].encode(value) == expected


@pytest.mark.parametrize("name", SMALL)
def test_the_next_value_is_the_next_in_order(name):
    one = BY_NAME[name]
    values = patterns(getattr(torch, name)).float()
    ordered = sorted({v for v in values.tolist() if not math.isnan(v)})
    following = dict(zip(ordered, [*ordered[1:], None], strict=True))
    for pattern, value in enumerate(values.tolist()):
        found = one.above(pattern)
        if math.isnan(value):
            assert found is None
        elif value == 0 or following[value] != 0:
            assert (None if found is None else one.decode(found)) == following[value]
        else:
            assert one.decode(found) == 0


def test_the_next_value_of_float32_is_that_of_pytorch():
    values = samples(BY_NAME["float32"])
    values = values[values.isfinite()]
    expected = torch.nextafter(values, torch.tensor(math.inf))
    for pattern, following in zip(as_patterns(values), expected.tolist(), strict=True):
        found = BY_NAME["float32"].above(pattern)
        assert BY_NAME["float32"].decode(found) == following


@pytest.mark.parametrize(
    ("name", "pattern", "kind"),
    [
        ("float16", 0x3C00, "normal"),
        ("float16", 0x8000, "zero"),
        ("float16", 0x0001, "subnormal"),
        ("float16", 0x83FF, "subnormal"),
        ("float16", 0xFC00, "infinity"),
        ("float16", 0x7C01, "nan"),
        ("float8_e4m3fn", 0x7E, "normal"),
        ("float8_e4m3fn", 0x78, "normal"),
        ("float8_e4m3fn", 0xFF, "nan"),
    ],
)
def test_kinds(name, pattern, kind):
    assert BY_NAME[name].kind(pattern) == kind


# ---- numbers as text


def test_exact_is_exact():
    for value in samples(BY_NAME["bfloat16"]).tolist():
        text = bits.exact(value)
        if math.isfinite(value) and not text.startswith("≈"):
            assert Decimal(text) == Decimal(value)
        elif math.isfinite(value):
            assert len(f"{Decimal(value):f}".replace(".", "")) > bits.DIGITS
    assert bits.exact(0.1).startswith("≈ 0.1")
    assert bits.exact(BY_NAME["float32"].decode(0x3DCCCCCD)) == "0.100000001490116119384765625"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.1, 9, "0.1"),
        (65504.0, 9, "65504"),
        (1.5e-8, 9, "1.5e-8"),
        (-3.4028234663852886e38, 9, "-3.40282347e38"),
        (2.0**-13, 9, "1.22070313e-4"),  # a half goes away from zero, as in the browser
        (0.0, 9, "0"),
        (-0.0, 9, "-0"),
        (math.inf, 9, "inf"),
        (math.nan, 9, "nan"),
        (1 / 3, 2, "0.33"),
        (0.0625, 2, "0.063"),
    ],
)
def test_short(value, digits, text):
    assert bits.short(value, digits) == text


# ---- the output


@pytest.fixture
def bundle(monkeypatch):
    """What `toggle_bits` hands to the notebook."""
    shown = []
    monkeypatch.setattr(bits, "display", lambda data, raw: shown.append(data))

    def make(*args, **options):
        bits.toggle_bits(*args, **options)
        return shown.pop()

    return make


def visible(html):
    """The markup without style, hidden words and script."""
    return re.sub(r"<style>.*?</style>|<script>.*?</script>", "", html, flags=re.DOTALL).split(
        '<p class="bits__words"'
    )[0]


def test_one_small_output_in_two_languages(bundle):
    shown = bundle()
    html = shown["text/html"]
    assert set(shown) == {"text/plain", "text/html"}
    assert len(html) < 60_000
    for tag in ("zh", "en"):
        assert html.count(f"<!--{tag}-->") == html.count(f"<!--/{tag}-->") > 20
    assert "[[" not in html and "{{" not in html
    assert not any(word in html for word in ("http:", "https:", "src=", "@import", "url("))
    assert shown["text/plain"].startswith("<bits of 0.1 in float32, tf32, float16")
    assert bundle() == shown


def test_the_first_state_needs_no_script(bundle):
    html = visible(bundle(0.1, chosen="float16")["text/html"])
    pressed = re.findall(r'aria-pressed="(true|false)"', html)
    assert "".join(str(int(one == "true")) for one in pressed) == f"{0x2E66:016b}"
    assert "0.0999755859375" in html
    assert "<i>614</i>/2<sup>10</sup>) × 2<sup><b>11</b>−15</sup>" in html
    assert "11 − 15 = −4" in html and "0x2E66" in html
    assert "正规数" in html and "normal number" in html
    assert "0.100036621" in html and "2<sup>−14</sup>" in html
    assert html.count("<tr>") == 7 and "0.1015625" in html


@pytest.mark.parametrize(
    ("value", "chosen", "words"),
    [
        (2.0**-24, "float16", ["subnormal number", "0 → 1 − 15 = −14", "<i>1</i>/2", "−24</sup>"]),
        (0.0, "float16", ["zero:", "0x0000"]),
        (-1e9, "float16", ["infinity:", "-inf", "0xFC00", "-65504"]),
        (math.nan, "float32", ["not a number (NaN): the exponent bits", "0x7FC00000"]),
        (449.0, "float8_e4m3fn", [">448<", "none"]),
        (1000.0, "float8_e4m3fn", [">448<", "5.5e-1</td>"]),
        (math.nan, "float8_e4m3fn", ["has no infinity", "0x7F"]),
        (65504.0, "float16", ["<dd>inf</dd>"]),
        (1.0, "tf32", ["0x3F800000", "the matrix multiplication ignores them"]),
    ],
)
def test_the_first_state_says_what_the_number_is(bundle, value, chosen, words):
    html = visible(bundle(value, chosen=chosen)["text/html"])
    for word in words:
        assert word in html, word


def test_it_speaks_the_one_language_of_an_exported_notebook(bundle, monkeypatch):
    monkeypatch.setenv("PYTORCH_BOOK_LANG", "zh")
    html = bundle()["text/html"]
    assert "输入一个数" in html
    assert "Type a number" not in html


def test_an_unknown_format_is_refused(bundle):
    with pytest.raises(ValueError, match=r"expected chosen to be one of \['float32', .*got 'fp16'"):
        bundle(chosen="fp16")
