"""Chapter 09: a formula of Python as a calculator on a page, without a kernel."""

import ast
import html
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn

from IPython.display import display

from helpers.page.ledger import languages

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, kw_only=True)
class Size:
    """A number that the reader sets: by slider, which stops at `values`, or by typing another.

    label: "English | 中文", as all texts here, or one text for both. start: its first value.
    multiple_of: another size; this one is rounded to a multiple of it.
    """

    label: str
    values: Sequence[int]
    start: int
    multiple_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A word that the reader chooses: value -> text; `start` is the first one."""

    label: str
    options: Mapping[str, str]
    start: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of each bar; `color` as CSS writes it."""

    label: str
    color: str


def calculator(
    formula: Callable[..., dict[str, dict[str, int]]],
    *others: Callable[..., Any],
    sizes: Mapping[str, Size],
    choices: Mapping[str, Choice],
    presets: Mapping[str, Mapping[str, int]],
    moments: Mapping[str, str],
    parts: Mapping[str, Part],
    facts: Mapping[str, str],
    capacities: Sequence[int],
    capacity: int,
    note: str,
) -> None:
    """Show sliders for the arguments of `formula`, and its result as stacked bars of bytes.

    One self-contained output: `formula` is translated to JavaScript (see `translate`), so the
    browser computes. `formula(**arguments)` returns {moment: {part: bytes}}; the largest sum is
    the peak, and is compared with the memory of a GPU.

    others: functions that `formula` calls, and those named in `facts`.
    sizes, choices: the arguments, by name. presets: name -> sizes that it sets.
    moments, parts: what each key of the result is called. facts: function -> what its number is.
    capacities: memory of GPUs to choose from, in GiB; `capacity` is the first one.
    note: what stands below the numbers.
    """
    functions = (formula, *others)
    start = {name: field.start for name, field in (*sizes.items(), *choices.items())}
    result = _call(formula, start)
    _require_labels(result, moments, parts)
    spec = {
        "formula": formula.__name__,
        "facts": list(facts),
        "parts": list(parts),
        "values": {name: list(size.values) for name, size in sizes.items()},
        "multiples": {name: s.multiple_of for name, s in sizes.items() if s.multiple_of},
        "presets": list(presets.values()),
    }
    by_name = {function.__name__: function for function in functions}
    numbers = {name: _call(by_name[name], start) for name in facts}
    in_presets = {name for preset in presets.values() for name in preset}
    pieces = {
        "presets": _presets(presets, start),
        "model": _controls({n: s for n, s in sizes.items() if n in in_presets}, sizes),
        "training": _controls(
            {n: s for n, s in sizes.items() if n not in in_presets} | choices, sizes
        ),
        "capacities": _capacities(capacities, capacity),
        **_results(result, moments, parts, capacity * GIB),
        "facts": _facts(facts, numbers),
        "note": _both(note),
        "script": textwrap.indent(translate(*functions), "  "),
        "names": ", ".join(by_name),
        "spec": json.dumps(spec, ensure_ascii=False).replace("</", "<\\/"),
    }
    page = resources.files("helpers.page").joinpath("calculator.html").read_text(encoding="utf-8")
    page = re.sub(r"\[\[(\w+)\]\]", lambda match: pieces[match[1]], page)
    for other in {"zh", "en"} - set(languages()):
        page = re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", page, flags=re.DOTALL)
    given = ", ".join(f"{name}={value}" for name, value in start.items())
    text = f"<calculator of bytes: {given}: peak {pieces['peak']}>"
    display({"text/plain": text, "text/html": page}, raw=True)


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call it with those of the arguments that it takes, as the page does."""
    return function(**{name: arguments[name] for name in inspect.signature(function).parameters})


def _require_labels(
    result: Mapping[str, Mapping[str, int]], moments: Mapping[str, str], parts: Mapping[str, Part]
) -> None:
    found = {part for held in result.values() for part in held}
    if list(result) != list(moments) or found != set(parts):
        raise ValueError(
            f"expected a label for each of {list(result)} and {sorted(found)}, "
            f"got {list(moments)} and {sorted(parts)}"
        )


# ---- the page's pieces: what it shows before, or without, its script


def _halves(text: str) -> dict[str, str]:
    """A text "English | 中文" by language, escaped; without a bar it is the same in both."""
    english, _, chinese = html.escape(text).partition(" | ")
    return {"zh": chinese, "en": english} if chinese else {}


def _both(text: str) -> str:
    """A text in both languages, each between comments for the site."""
    halves = [
        f'<!--{language}--><span lang="{language}">{half}{" " if language == "zh" else ""}</span>'
        f"<!--/{language}-->"
        for language, half in _halves(text).items()
    ]
    return f"<span>{''.join(halves) or html.escape(text)}</span>"


def _option(value: str, text: str, chosen: bool) -> str:
    """An option holds text only, so the languages stand in it without a tag."""
    halves = [
        f"<!--{language}-->{half}{' ' if language == 'zh' else ''}<!--/{language}-->"
        for language, half in _halves(text).items()
    ]
    selected = " selected" if chosen else ""
    content = "".join(halves) or html.escape(text)
    return f'<option value="{html.escape(value)}"{selected}>{content}</option>'


def _controls(fields: Mapping[str, Size | Choice], sizes: Mapping[str, Size]) -> str:
    return "".join(
        _slider(name, field, sizes) if isinstance(field, Size) else _select(name, field)
        for name, field in fields.items()
    )


def _slider(name: str, size: Size, sizes: Mapping[str, Size]) -> str:
    """A number's field and slider; one that must be a multiple says so when it was rounded."""
    note = ""
    if size.multiple_of:
        english, _, chinese = sizes[size.multiple_of].label.partition(" | ")
        told = f"rounded to a multiple of: {english} | 已取整为{chinese or english}的倍数"
        note = (
            f'<small class="calculator__rounded" data-rounded role="status" hidden>'
            f"{_both(told)}</small>"
        )
    nearest = min(range(len(size.values)), key=lambda i: abs(size.values[i] - size.start))
    return (
        f'<div class="calculator__size" data-name="{name}"><label>{_both(size.label)}'
        f'<input type="number" autocomplete="off" inputmode="numeric" min="{size.values[0]}" '
        f'max="{size.values[-1]}" value="{size.start}"></label>'
        f'<input type="range" autocomplete="off" min="0" max="{len(size.values) - 1}" step="1" '
        f'value="{nearest}" aria-valuetext="{size.start}">{note}</div>'
    )


def _select(name: str, choice: Choice) -> str:
    options = "".join(_option(v, t, v == choice.start) for v, t in choice.options.items())
    return (
        f'<label class="calculator__choice" data-name="{name}">{_both(choice.label)}'
        f'<select autocomplete="off">{options}</select></label>'
    )


def _presets(presets: Mapping[str, Mapping[str, int]], start: Mapping[str, Any]) -> str:
    return "".join(
        f'<option value="{i}"{" selected" if preset.items() <= start.items() else ""}>'
        f"{html.escape(name)}</option>"
        for i, (name, preset) in enumerate(presets.items())
    )


def _capacities(capacities: Sequence[int], chosen: int) -> str:
    return "".join(
        f'<option value="{size}"{" selected" if size == chosen else ""}>{size} GB</option>'
        for size in capacities
    )


def _results(
    result: Mapping[str, Mapping[str, int]],
    moments: Mapping[str, str],
    parts: Mapping[str, Part],
    capacity: int,
) -> dict[str, str]:
    """The pieces that show the result: bars, the peak's parts, every number, the verdict."""
    totals = {name: sum(held.values()) for name, held in result.items()}
    peak = max(totals, key=totals.__getitem__)
    unit, top = _unit(totals[peak]), max(totals[peak], capacity)
    bars = "".join(
        f'<div class="calculator__moment" {"data-peak" if name == peak else ""}>'
        f"{_both(moments[name])}<b>{_size(totals[name], unit)}</b>"
        f'<div class="calculator__track" aria-hidden="true">{_segments(held, parts, top)}'
        f'<i style="left:{100 * capacity / top:.2f}%"></i></div></div>'
        for name, held in result.items()
    )
    rows = "".join(
        f'<tr><th scope="row"><i style="background:{part.color}"></i>{_both(part.label)}</th>'
        f"<td>{_size(result[peak][name], unit)}</td>"
        f"<td>{result[peak][name] / totals[peak]:.0%}</td></tr>"
        for name, part in parts.items()
    )
    head = "".join(f'<th scope="col">{_both(part.label)}</th>' for part in parts.values())
    every = "".join(
        f'<tr><th scope="row">{_both(moments[name])}</th>'
        + f"<td>{_amount(totals[name], unit)}</td>"
        + "".join(f"<td>{_amount(held[part], unit)}</td>" for part in parts)
        + "</tr>"
        for name, held in result.items()
    )
    return {
        "bars": bars,
        "rows": rows,
        "head": head,
        "every": every,
        "unit": unit,
        "peak": _size(totals[peak], unit),
        "spare": _size(abs(capacity - totals[peak]), _unit(abs(capacity - totals[peak]))),
        "fits": "" if totals[peak] <= capacity else "hidden",
        "fails": "hidden" if totals[peak] <= capacity else "",
    }


def _segments(held: Mapping[str, int], parts: Mapping[str, Part], top: int) -> str:
    return "".join(
        f'<span style="background:{part.color};width:{100 * held[name] / top:.2f}%"></span>'
        for name, part in parts.items()
    )


def _facts(facts: Mapping[str, str], numbers: Mapping[str, int]) -> str:
    return "".join(f"<p><b>{numbers[name]:,}</b> {_both(text)}</p>" for name, text in facts.items())


def _unit(size: int) -> str:
    return "GiB" if size >= GIB else "MiB"


def _size(size: int, unit: str) -> str:
    return f"{_amount(size, unit)} {unit}" if size else "0"


def _amount(size: int, unit: str) -> str:
    return f"{size / {'GiB': GIB, 'MiB': MIB}[unit]:,.2f}" if size else "0"


# ---- from Python to JavaScript

OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Eq: "===",
    ast.NotEq: "!==",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "&&",
    ast.Or: "||",
    ast.Not: "!",
    ast.USub: "-",
}
# Python raises errors where JavaScript has NaN and undefined, and rounds down, not toward zero.
CALLS = {ast.Div: "python.div", ast.FloorDiv: "python.floordiv", ast.Mod: "python.mod"}
RUNTIME = """\
const python = {
  div(a, b) { if (b === 0) throw new RangeError("division by zero"); return a / b; },
  mod(a, b) {
    const rest = b === 0 ? python.div(a, b) : a % b;
    return rest !== 0 && rest < 0 !== b < 0 ? rest + b : rest;
  },
  floordiv(a, b) { return Math.round((a - python.mod(a, b)) / b); },
  at(table, key) {
    if (!Object.hasOwn(table, key)) throw new RangeError("no " + key);
    return table[key];
  },
};
"""
RESERVED = set(
    "arguments await break case catch class const continue debugger default delete do else enum "
    "eval export extends false finally for function if implements import in instanceof interface "
    "let new null package private protected public python return static super switch this throw "
    "true try typeof undefined var void while with yield Math Object RangeError".split()
)
EXACT = 2**53  # from here on, JavaScript's numbers are no longer all integers


def translate(*functions: Callable[..., Any]) -> str:
    """Return JavaScript that computes what these Python functions compute, with the same numbers.

    A function takes keywords only (`*, a, b=1`); in JavaScript, one object: `f({a, b})`. It may
    hold: a docstring; `name = …`; `if`; `return`; `raise ValueError("…")`. Expressions: numbers,
    strings, True and False, names; + - * / // %; comparisons; and, or, not; `a if b else c`;
    `in` a tuple of constants; min and max; dicts with constant keys or `**`; `table[key]`; calls
    of the other functions with keywords. Integers are exact below 2**53.
    Raises ValueError naming the line of anything else.
    """
    known = {function.__name__ for function in functions}
    return RUNTIME + "".join(_Translator(function, known).text for function in functions)


class _Translator(ast.NodeVisitor):
    """Turn one function into JavaScript; a node of a kind without its own method is refused."""

    def __init__(self, function: Callable[..., Any], known: set[str]):
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        self.known = known
        self.where = (inspect.getsourcefile(function), first - 1)
        self.lines = lines
        self.names: set[str] = set()
        if not isinstance(tree.body[0], ast.FunctionDef):
            self.refuse(tree.body[0], "expected a function made by def")
        self.text = self.visit(tree.body[0])

    def generic_visit(self, node: ast.AST) -> str:
        self.refuse(node, f"{type(node).__name__} is outside of what can be translated")

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        file, before = self.where
        line = getattr(node, "lineno", 1)
        source = self.lines[line - 1].strip()
        raise ValueError(f"cannot translate line {before + line} of {file}: {source} ({why})")

    # -- statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> str:
        given = node.args
        if given.args or given.posonlyargs or given.vararg or given.kwarg or node.decorator_list:
            self.refuse(node, "expected arguments by keyword only, and no decorator")
        defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        arguments = [self.argument(argument, default) for argument, default in defaults]
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        local = [n.id for s in body for n in ast.walk(s) if _is_stored(n)]
        for name in local:
            self.declare(name, node)
        own = [name for name in dict.fromkeys(local) if name not in arguments]
        let = f"  let {', '.join(own)};\n" if own else ""
        head = f"function {self.declare(node.name, node)}({{ {', '.join(arguments)} }}) {{\n"
        return head + let + self.block(body) + "}\n"

    def argument(self, argument: ast.arg, default: ast.expr | None) -> str:
        name = self.declare(argument.arg, argument)
        return name if default is None else f"{name} = {self.visit(default)}"

    def declare(self, name: str, node: ast.AST) -> str:
        if name in RESERVED:
            self.refuse(node, f"{name} is a word of JavaScript")
        self.names.add(name)
        return name

    def block(self, statements: Iterable[ast.stmt], indent: str = "  ") -> str:
        return textwrap.indent("".join(self.visit(s) for s in statements), indent)

    def visit_Assign(self, node: ast.Assign) -> str:
        if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            self.refuse(node, "expected one name on the left")
        return f"{node.targets[0].id} = {self.visit(node.value)};\n"

    def visit_If(self, node: ast.If) -> str:
        text = f"if ({self.visit(node.test)}) {{\n{self.block(node.body)}}}"
        if node.orelse:
            text += f" else {{\n{self.block(node.orelse)}}}"
        return text + "\n"

    def visit_Return(self, node: ast.Return) -> str:
        if node.value is None:
            self.refuse(node, "expected a value")
        return f"return {self.visit(node.value)};\n"

    def visit_Raise(self, node: ast.Raise) -> str:
        match node.exc:
            case ast.Call(func=ast.Name(id="ValueError"), args=[message], keywords=[]):
                return f"throw new RangeError({self.visit(message)});\n"
        self.refuse(node, "expected ValueError with a message")

    # -- expressions

    def visit_Constant(self, node: ast.Constant) -> str:
        match node.value:
            case bool() | str():
                return json.dumps(node.value)
            case int() | float() if abs(node.value) < EXACT:
                return repr(node.value)
        self.refuse(node, f"expected a string or a number below 2**53, got {node.value!r}")

    def visit_Name(self, node: ast.Name) -> str:
        if node.id not in self.names:
            self.refuse(node, f"{node.id} is neither an argument nor assigned here")
        return node.id

    def visit_BinOp(self, node: ast.BinOp) -> str:
        left, right = self.visit(node.left), self.visit(node.right)
        if type(node.op) in CALLS:
            return f"{CALLS[type(node.op)]}({left}, {right})"
        return f"({left} {self.operator(node.op, node)} {right})"

    def visit_UnaryOp(self, node: ast.UnaryOp) -> str:
        return f"({self.operator(node.op, node)}{self.visit(node.operand)})"

    def visit_BoolOp(self, node: ast.BoolOp) -> str:
        operator = f" {self.operator(node.op, node)} "
        return f"({operator.join(self.visit(value) for value in node.values)})"

    def visit_Compare(self, node: ast.Compare) -> str:
        values = [node.left, *node.comparators]
        pairs = zip(values[:-1], node.ops, values[1:], strict=True)
        return f"({' && '.join(self.compare(node, *pair) for pair in pairs)})"

    def compare(self, node: ast.AST, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, ast.Tuple):
                self.refuse(node, "expected a tuple after `in`")
            items = ", ".join(self.visit(item) for item in right.elts)
            negation = "!" if isinstance(op, ast.NotIn) else ""
            return f"{negation}[{items}].includes({self.visit(left)})"
        return f"{self.visit(left)} {self.operator(op, node)} {self.visit(right)}"

    def operator(self, op: ast.AST, node: ast.AST) -> str:
        if type(op) not in OPERATORS:
            self.refuse(node, f"{type(op).__name__} is outside of what can be translated")
        return OPERATORS[type(op)]

    def visit_IfExp(self, node: ast.IfExp) -> str:
        test, body, other = map(self.visit, (node.test, node.body, node.orelse))
        return f"({test} ? {body} : {other})"

    def visit_Call(self, node: ast.Call) -> str:
        name = getattr(node.func, "id", "")
        if name in ("min", "max") and len(node.args) > 1 and not node.keywords:
            return f"Math.{name}({', '.join(map(self.visit, node.args))})"
        named = all(keyword.arg for keyword in node.keywords)
        if name in self.known and not node.args and named:
            given = [f"{keyword.arg}: {self.visit(keyword.value)}" for keyword in node.keywords]
            return f"{name}({{ {', '.join(given)} }})"
        self.refuse(node, "expected min, max, or a function given to translate, by keywords")

    def visit_Dict(self, node: ast.Dict) -> str:
        items = [
            f"...{self.visit(value)}" if key is None else f"{self.key(key)}: {self.visit(value)}"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return f"({{ {', '.join(items)} }})"

    def key(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str()):
                return json.dumps(node.value)
        self.refuse(node, "expected strings as keys")

    def visit_Subscript(self, node: ast.Subscript) -> str:
        return f"python.at({self.visit(node.value)}, {self.visit(node.slice)})"

    def visit_JoinedStr(self, node: ast.JoinedStr) -> str:
        return " + ".join(['""', *map(self.visit, node.values)])

    def visit_FormattedValue(self, node: ast.FormattedValue) -> str:
        if node.conversion != -1 or node.format_spec is not None:
            self.refuse(node, "expected {name} alone")
        return f"String({self.visit(node.value)})"


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
