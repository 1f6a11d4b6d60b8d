"""Chapter 10: the bits of a number to click on, in six formats, on a page without a kernel."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from importlib import resources

from IPython.display import display

from helpers.page.ledger import languages

DIGITS = 30  # a value with more is shown rounded


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: sign, exponent field, mantissa field, from left to right.

    exponent, mantissa: bits of each field. bias: what is subtracted from the exponent field.
    infinities: with all exponent bits 1 there are infinities and NaN; otherwise only the pattern of
    all ones after the sign is special, a NaN, and what is too large becomes the largest value.
    unused: bits on the right that are there and do not count.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    infinities: bool = True
    unused: int = 0

    def decode(self, pattern: int) -> float:
        """Return the value of a bit pattern, given without the unused bits."""
        negative, size = divmod(pattern, self._sign)
        field, fraction = divmod(size, 2**self.mantissa)
        sign = -1.0 if negative else 1.0
        if size > self._largest:
            return sign * math.inf if size == self._top else math.nan
        digits = fraction + (2**self.mantissa if field else 0)
        return sign * math.ldexp(digits, max(field, 1) - self.bias - self.mantissa)

    def encode(self, value: float) -> int:
        """Return the pattern of the nearest value, of two equally near ones the even pattern."""
        sign = self._sign if math.copysign(1, value) < 0 else 0
        if value == 0:
            return sign
        if math.isnan(value):
            return sign + self._nan
        if math.isinf(value):
            return sign + self._top
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias)
        steps = round(math.ldexp(abs(value), self.mantissa - exponent))  # a half to even
        size = (exponent + self.bias - 1) * 2**self.mantissa + steps
        return sign + (size if size <= self._largest else self._top)

    def above(self, pattern: int) -> int | None:
        """Return the pattern of the next value above, None where there is none."""
        negative, size = divmod(pattern, self._sign)
        if size > self._top or (size == self._top and not negative):
            return None
        if negative:
            return pattern - 1 if size else 1
        return pattern + 1

    def kind(self, pattern: int) -> str:
        """Return "normal", "subnormal", "zero", "infinity" or "nan"."""
        value = self.decode(pattern)
        if math.isnan(value):
            return "nan"
        if math.isinf(value):
            return "infinity"
        if value == 0:
            return "zero"
        return "normal" if pattern % self._sign >= 2**self.mantissa else "subnormal"

    @property
    def _sign(self) -> int:
        return 2 ** (self.exponent + self.mantissa)

    @property
    def _largest(self) -> int:
        """The largest finite value."""
        return self._sign - 2 - (2**self.mantissa - 1 if self.infinities else 0)

    @property
    def _top(self) -> int:
        """Infinity, or the largest finite value in a format without: what is too large."""
        return self._largest + 1 if self.infinities else self._largest

    @property
    def _nan(self) -> int:
        return self._top + (2 ** (self.mantissa - 1) if self.infinities else 1)


FORMATS = (
    Format("float32", 8, 23, 127),
    Format("tf32", 8, 10, 127, unused=13),
    Format("float16", 5, 10, 15),
    Format("bfloat16", 8, 7, 127),
    Format("float8_e4m3fn", 4, 3, 7, infinities=False),
    Format("float8_e5m2", 5, 2, 15),
)


def toggle_bits(
    value: float = 0.1, *, chosen: str = "float16", formats: Sequence[Format] = FORMATS
) -> None:
    """Show the bits of `value`, each a button, and what they mean.

    One self-contained output: `bits.html`, which decodes and rounds in the browser. The number
    typed there appears rounded to each of `formats`.
    chosen: the name of the format whose bits are shown first.
    """
    names = [one.name for one in formats]
    if chosen not in names:
        raise ValueError(f"expected chosen to be one of {names}, got {chosen!r}")
    picked = formats[names.index(chosen)]
    pattern = picked.encode(value)
    template = resources.files("helpers.page").joinpath("bits.html").read_text(encoding="utf-8")
    parts = {
        "number": _plain(value),
        "choices": "".join(_choice(name, name == chosen) for name in names),
        "fields": _fields(picked, pattern),
        "reading": _reading(picked, pattern),
        "rows": "".join(_row(one, value) for one in formats),
        "spec": json.dumps({"formats": [asdict(one) for one in formats], "chosen": chosen}),
    }
    for name, part in parts.items():
        template = template.replace(f"[[{name}]]", part)
    # words that depend on the pattern stand once, hidden: the script takes them from there
    words = dict(re.findall(r'data-word="(\w+)">(.*?)</b>', template))
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], template)
    for other in {"zh", "en"} - set(languages()):
        page = re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", page, flags=re.DOTALL)
    text = f"<bits of {short(value)} in {', '.join(names)}>"
    display({"text/plain": text, "text/html": page}, raw=True)


def exact(value: float) -> str:
    """Return all decimal digits of `value`, or the first nine where there are more than thirty."""
    if not math.isfinite(value):
        return short(value)
    digits = f"{Decimal(value):f}"
    too_long = sum(letter.isdigit() for letter in digits) > DIGITS
    return f"≈ {short(value)}" if too_long else digits


def short(value: float, digits: int = 9) -> str:
    """Return `value` with at most so many significant digits, as 0.1, 65504 or 1.5e-8."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(Decimal(value))
    exponent = rounded.adjusted()
    if -3 <= exponent <= 9:
        return _strip(f"{rounded:f}")
    return f"{_strip(f'{rounded.scaleb(-exponent):f}')}e{exponent}"


def _strip(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _plain(value: float) -> str:
    """As one would type it."""
    return repr(float(value)).removesuffix(".0")


# ---- the first state, which a page without a script shows


def _choice(name: str, chosen: bool) -> str:
    checked = " checked" if chosen else ""
    return (
        f'<label><input type="radio" name="format" value="{name}"{checked}>'
        f"<code>{name}</code></label>"
    )


def _fields(one: Format, pattern: int) -> str:
    """The bits from left to right, in their fields, as the script makes them for other formats."""
    bits = f"{pattern:0{1 + one.exponent + one.mantissa}b}"
    field, fraction = int(bits[1 : 1 + one.exponent], 2), pattern % 2**one.mantissa
    power = f"{field} − {one.bias} = {field - one.bias}"
    if field == 0:
        power = f"0 → 1 − {one.bias} = {1 - one.bias}"
    if not math.isfinite(one.decode(pattern)):
        power = str(field)
    parts = [
        ("sign", bits[:1], ["±"], "−" if bits[0] == "1" else "+"),
        (
            "exponent",
            bits[1 : 1 + one.exponent],
            [f"2^{k}" for k in reversed(range(one.exponent))],
            power.replace("= -", "= −"),
        ),
        (
            "mantissa",
            bits[1 + one.exponent :],
            [f"2^-{k}" for k in range(1, one.mantissa + 1)],
            f"{fraction} / {2**one.mantissa}",
        ),
    ]
    made = [_field(*part) for part in parts]
    if one.unused:
        empty = "<span></span>" * one.unused
        made.append(
            f'<div class="bits__field bits__field--unused"><div class="bits__row">{empty}</div>'
            "<p>{{unused}}</p></div>"
        )
    return "".join(made)


def _field(name: str, bits: str, places: list[str], meaning: str) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="{"true" if bit == "1" else "false"}" '
        f'aria-label="{place}" title="{place}">{bit}</button>'
        for bit, place in zip(bits, places, strict=True)
    )
    return (
        f'<div class="bits__field bits__field--{name}" role="group">'
        f'<div class="bits__row">{buttons}</div>'
        f'<p><b>{{{{{name}}}}}</b> <span class="bits__meaning">{meaning}</span></p></div>'
    )


def _reading(one: Format, pattern: int) -> str:
    """What the bits mean, line by line."""
    value, kind, above = one.decode(pattern), one.kind(pattern), one.above(pattern)
    if kind == "nan" and not one.infinities:
        kind = "nan_alone"
    lines = [
        ("value", f'<output class="bits__value">{exact(value)}</output>'),
        ("formula", _formula(one, pattern)),
        ("kind", f"{{{{{kind}}}}}"),
        ("next", "{{none}}" if above is None else _step(value, one.decode(above))),
        ("hex", f"<code>0x{pattern << one.unused:0{_hex_digits(one)}X}</code>"),
    ]
    return "".join(f"<dt>{{{{{name}}}}}</dt><dd>{line}</dd>" for name, line in lines)


def _hex_digits(one: Format) -> int:
    return (1 + one.exponent + one.mantissa + one.unused) // 4


def _formula(one: Format, pattern: int) -> str:
    if one.kind(pattern) not in ("normal", "subnormal"):
        return "–"
    sign = "−" if one.decode(pattern) < 0 else "+"
    field, fraction = divmod(pattern % 2 ** (one.exponent + one.mantissa), 2**one.mantissa)
    return (
        f'<span class="bits__formula">{sign}({min(field, 1)} + <i>{fraction}</i>/'
        f"2<sup>{one.mantissa}</sup>) × 2<sup><b>{max(field, 1)}</b>−{one.bias}</sup></span>"
    )


def _step(value: float, above: float) -> str:
    """The next value and how far it is; two neighbours always lie a power of two apart."""
    if not math.isfinite(above - value):
        return short(above)
    power = math.frexp(above - value)[1] - 1
    return f"{short(above)}{{{{gap}}}} 2<sup>{power}</sup> ≈ {short(above - value, 3)}".replace(
        "<sup>-", "<sup>−"
    )


def _scientific(value: float) -> str:
    """Two digits, as JavaScript writes them."""
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent):+d}"


def _row(one: Format, value: float) -> str:
    stored = one.decode(one.encode(value))
    error = "–"
    if math.isfinite(value) and math.isfinite(stored):
        error = "0" if stored == value else _scientific(abs(stored - value) / abs(value))
    return (
        f'<tr><th scope="row"><code>{one.name}</code></th><td>{short(stored)}</td>'
        f"<td>{error}</td></tr>"
    )
