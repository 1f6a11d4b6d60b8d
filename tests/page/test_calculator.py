import re

import pytest

from helpers.page import calculator
from helpers.page.calculator import Choice, Part, Size, translate


def step(*, width: int, batch: int, kind: str = "full") -> dict[str, dict[str, int]]:
    """A small formula of the same form as that of the chapter."""
    if width > 4000:
        raise ValueError(f"width {width} is too much")
    each = {"full": 4, "half": 2}[kind]
    weights = each * width * width
    return {
        "forward": {"weights": weights, "rest": each * batch * width},
        "update": {"weights": weights, "rest": 2 * count(width=width)},
    }


def count(*, width: int) -> int:
    return width * width


WORDS = {
    "sizes": {
        "heads": Size(label="heads | 头", values=[1, 2, 4, 8], start=4),
        "width": Size(
            label="width | 宽", values=range(64, 4097, 64), start=1024, multiple_of="heads"
        ),
        "batch": Size(label="batch | 批次", values=[1, 10, 100], start=10),
    },
    "choices": {
        "kind": Choice(
            label="kind | 种类", options={"full": "float32", "half": "half | 一半"}, start="full"
        )
    },
    "presets": {"thin <1>": {"heads": 2, "width": 128}, "wide": {"heads": 4, "width": 1024}},
    "moments": {"forward": "forward | 前向", "update": "update | 更新"},
    "parts": {
        "weights": Part(label="weights | 权重", color="#0072B2"),
        "rest": Part(label="<rest> | <其余>", color="#D55E00"),
    },
    "facts": {"count": "weights | 个权重"},
    "capacities": (8, 16),
    "capacity": 16,
    "note": "a note | 说明",
}


@pytest.fixture
def bundle(monkeypatch):
    """What `calculator` hands to the notebook."""
    shown = []
    monkeypatch.setattr(calculator, "display", lambda data, raw: shown.append(data))

    def make(**changes):
        calculator.calculator(step, count, **WORDS | changes)
        return shown.pop()

    return make


# ---- the translation


def constants(*, x):
    return 1 + 2.5 - x * 3 / 4 // 5 % 6


def texts(*, x, unit="MiB"):
    return 'a"b' if x == unit else unit


def signs(*, x):
    return -x + +1


def decisions(*, x, y):
    z = 1 if x < 0 <= y else 2
    if x and not y or x != 3:
        z = min(z, x, 7)
    elif x >= 2:
        z = max(x, y)
    else:
        z = 0
    return z


def tables(*, x):
    always = {"a": 1}
    return {**always, "b": {"one": 1, "two": 2}[x]}


def membership(*, x):
    return x in ("a", "b") and x not in (1, 2.5, True)


def calls(*, x):
    return constants(x=2 * x)


def errors(*, x):
    if x > 1:
        raise ValueError(f"{x} of {x} is too much")
    raise ValueError("too little")


GOLDEN = [
    (constants, "return ((1 + 2.5) - python.mod(python.floordiv(python.div((x * 3), 4), 5), 6));"),
    (texts, 'function texts({ x, unit = "MiB" })'),
    (texts, 'return ((x === unit) ? "a\\"b" : unit);'),
    (decisions, "let z;"),
    (decisions, "z = ((x < 0 && 0 <= y) ? 1 : 2);"),
    (decisions, "if (((x && (!y)) || (x !== 3))) {"),
    (decisions, "z = Math.min(z, x, 7);"),
    (decisions, "} else {\n    if ((x >= 2)) {"),
    (tables, 'always = ({ "a": 1 });'),
    (tables, 'return ({ ...always, "b": python.at(({ "one": 1, "two": 2 }), x) });'),
    (membership, 'return ((["a", "b"].includes(x)) && (![1, 2.5, true].includes(x)));'),
    (errors, 'throw new RangeError("" + String(x) + " of " + String(x) + " is too much");'),
    (errors, 'throw new RangeError("too little");'),
]


@pytest.mark.parametrize(("function", "expected"), GOLDEN)
def test_each_construct(function, expected):
    assert expected in translate(function)


def test_calls_of_other_functions_that_are_translated_too():
    text = translate(calls, constants)
    assert "return constants({ x: (2 * x) });" in text
    assert text.count("function ") == 2


def test_a_docstring_is_left_out_and_the_text_repeats():
    assert "small formula" not in translate(step, count)
    assert translate(step, count) == translate(step, count)


def test_what_it_refuses_is_named_with_its_line():
    def power(*, x):
        y = x + 1
        return y**2

    first = power.__code__.co_firstlineno
    expected = rf"cannot translate line {first + 2} of .*test_calculator.py: return y\*\*2 \(Pow"
    with pytest.raises(ValueError, match=expected):
        translate(power)


# ---- what cannot be translated

SIZE = 3


def loop(*, x):
    for i in x:
        return i


def positional(x):
    return x


def many(*, x, **more):
    return x


def other(*, x):
    return len(x)


def unnamed(*, x):
    return constants(x)


def one(*, x):
    return max(x)


def outside(*, x):
    return x + SIZE


def pair(*, x):
    a, b = x
    return a


def chained(*, x):
    a = b = x
    return a + b


def large(*, x):
    return x + 9007199254740992


def nothing(*, x):
    return None


def bare(*, x):
    return


def inside(*, x):
    return x in [1, 2]


def keys(*, x):
    return {x: 1}


def formatted(*, x):
    raise ValueError(f"{x:,}")


def another(*, x):
    raise TypeError("no")


def reserved(*, new):
    return new


def reserved_local(*, x):
    var = x
    return var


def attribute(*, x):
    return x.real


def part(*, x):
    return x[1:2]


def identity(*, x):
    return x is SIZE


def added(*, x):
    x += 1
    return x


REFUSED = [
    (loop, "For is outside of what can be translated"),
    (positional, "expected arguments by keyword only"),
    (many, "expected arguments by keyword only"),
    (other, "expected min, max, or a function given"),
    (unnamed, "expected min, max, or a function given"),
    (one, "expected min, max, or a function given"),
    (outside, "SIZE is neither an argument nor assigned here"),
    (pair, "expected one name on the left"),
    (chained, "expected one name on the left"),
    (large, "expected a string or a number below"),
    (nothing, "expected a string or a number below"),
    (bare, "expected a value"),
    (inside, "expected a tuple after"),
    (keys, "expected strings as keys"),
    (formatted, "alone"),
    (another, "expected ValueError with a message"),
    (reserved, "new is a word of JavaScript"),
    (reserved_local, "var is a word of JavaScript"),
    (attribute, "Attribute is outside of what can be translated"),
    (part, "Slice is outside of what can be translated"),
    (identity, "Is is outside of what can be translated"),
    (added, "AugAssign is outside of what can be translated"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=lambda f: getattr(f, "__name__", ""))
def test_what_is_outside_of_the_subset_is_refused(function, message):
    with pytest.raises(ValueError, match=f"cannot translate line .*{message}"):
        translate(function, constants)


def test_a_lambda_is_refused():
    nameless = lambda *, x: x  # noqa: E731
    with pytest.raises(ValueError, match="expected a function made by def"):
        translate(nameless)


# ---- the page


def test_it_is_one_small_output_in_two_languages(bundle):
    shown = bundle()
    html = shown["text/html"]
    assert set(shown) == {"text/plain", "text/html"}
    for language in ("zh", "en"):
        assert html.count(f"<!--{language}-->") == html.count(f"<!--/{language}-->") > 20
    assert "[[" not in html
    assert not any(word in html for word in ("http:", "https:", "src=", "@import", "url("))
    assert all(text in html for text in ("thin &lt;1&gt;", "&lt;rest&gt;", "&lt;其余&gt;"))
    assert "<rest>" not in html
    assert '<option value="full" selected>float32</option>' in html
    assert bundle() == shown


def test_it_says_its_first_result_without_a_script(bundle):
    shown = bundle()
    text = re.sub(r"<[^>]*>", "", shown["text/html"].split("<script>")[0].split("</style>")[1])
    assert "6.00 MiB" in text  # weights 4, the rest 2
    assert "1,048,576" in text
    assert shown["text/plain"] == (
        "<calculator of bytes: heads=4, width=1024, batch=10, kind=full: peak 6.00 MiB>"
    )


def test_it_speaks_the_one_language_of_an_exported_notebook(bundle, monkeypatch):
    monkeypatch.setenv("PYTORCH_BOOK_LANG", "en")
    html = bundle()["text/html"]
    assert "It fits" in html
    assert re.search("[一-鿿]", html) is None


def test_the_first_verdict_can_be_that_it_does_not_fit(bundle):
    sizes = WORDS["sizes"] | {"batch": Size(label="b | 批", values=[1, 10**7], start=10**7)}
    html = bundle(sizes=sizes)["text/html"]
    assert '<p data-when="fits" hidden>' in html
    assert '<p data-when="fails" >' in html


@pytest.mark.parametrize("missing", ["moments", "parts"])
def test_every_moment_and_part_needs_a_label(bundle, missing):
    fewer = dict(list(WORDS[missing].items())[1:])
    with pytest.raises(ValueError, match="expected a label for each of"):
        bundle(**{missing: fewer})


def test_what_could_end_the_script_is_escaped(bundle):
    html = bundle(presets={"</script>": {"width": 64}})["text/html"]
    assert html.count("</script>") == 1
