"""Chapter 09: a decision tree that asks one question at a time, on a page without a kernel."""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from IPython.display import display

from helpers.page.ledger import languages


@dataclass(frozen=True)
class Words:
    """The same in both languages; `x` in backticks becomes code."""

    zh: str
    en: str


@dataclass(frozen=True)
class Section:
    """A section of the book: what it is called, and its label where it is written already."""

    name: Words
    label: str | None = None


@dataclass(frozen=True)
class Advice:
    """The end of a path: the diagnosis, what confirms it, what to do and what that costs."""

    name: Words
    confirm: Words
    recipe: str
    price: Words
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True)
class Question:
    """A question, how to find its answer out, and where each answer leads.

    Several answers, also of different questions, may lead to the same object.
    """

    ask: Words
    answers: tuple[tuple[Words, "Question | Advice"], ...]
    how: Words | None = None


WORDS = {
    "confirm": Words("怎样确认", "To confirm"),
    "recipe": Words("怎么改", "What to do"),
    "price": Words("代价", "The price"),
    "sections": Words("详见", "Read on"),
    "same": Words("接下来与另一处相同：", "Continue as elsewhere in this tree: "),
    "change": Words("改选", "change"),
}


def read_tree(path: Path) -> Question:
    """Return the question `start` of a YAML file, with all that follows it.

    The file holds `questions` and `advice`, each by name; the `to` of an answer is such a name.
    Raises ValueError for a name that is not there, and for one to which no path leads.
    """
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    made: dict[str, Question | Advice] = {}

    def make(name: str) -> Question | Advice:
        if name not in made:
            if name in written["advice"]:
                made[name] = _read_advice(written["advice"][name])
            elif name in written["questions"]:
                made[name] = question(written["questions"][name])
            else:
                raise ValueError(f"{path.name}: no question or advice is called {name!r}")
        return made[name]

    def question(entry: dict[str, Any]) -> Question:
        answers = [(_words(answer), make(answer["to"])) for answer in entry["answers"]]
        how = _words(entry["how"]) if "how" in entry else None
        return Question(_words(entry["ask"]), tuple(answers), how)

    start = make("start")
    lost = sorted({*written["questions"], *written["advice"]} - {*made})
    if lost:
        raise ValueError(f"{path.name}: no answer leads to {lost}")
    return start


def _read_advice(entry: dict[str, Any]) -> Advice:
    sections = [Section(_words(one), one.get("label")) for one in entry["sections"]]
    words = {name: _words(entry[name]) for name in ("name", "confirm", "price")}
    return Advice(recipe=entry["recipe"], sections=tuple(sections), **words)


def _words(entry: dict[str, str]) -> Words:
    return Words(entry["zh"], entry["en"])


def decision_tree(tree: Question) -> None:
    """Show the questions of `tree` one at a time; each answer leads on, and can be taken back.

    One self-contained output. Without a script, and on paper, the whole tree is a nested list.
    Links to sections exist on the built page; elsewhere the section's name stands there.
    """
    template = resources.files("helpers.page").joinpath("decisions.html").read_text("utf-8")
    parts = []
    for language in languages():
        body = _node(tree, language, {})
        change = getattr(WORDS["change"], language)
        parts.append(
            f'<!--{language}--><div class="decisions" lang="{language}" data-change="{change}">'
            f"{body}</div><!--/{language}-->"
        )
    text = f"<decision tree: {tree.ask.en} {sum(1 for _ in advice(tree))} endings>"
    display(
        {"text/plain": text, "text/html": template.replace("[[trees]]", "".join(parts))}, raw=True
    )


def advice(tree: Question | Advice) -> Iterator[Advice]:
    """Yield every end of the tree once, in the order in which a reader meets them."""
    seen: list[Question | Advice] = []

    def visit(node: Question | Advice) -> Iterator[Advice]:
        if any(node is one for one in seen):
            return
        seen.append(node)
        if isinstance(node, Advice):
            yield node
        else:
            for _, following in node.answers:
                yield from visit(following)

    yield from visit(tree)


def _node(node: Question | Advice, language: str, numbers: dict[int, int]) -> str:
    """A question with all that follows, or an advice; what stands elsewhere is only named.

    numbers: the identity of each node that has been written, and its number in this tree.
    """

    def say(words: Words) -> str:
        return _inline(getattr(words, language))

    number = len(numbers)
    if id(node) in numbers:
        name = say(node.ask if isinstance(node, Question) else node.name)
        return (
            f'<p class="decisions__same" data-same="{numbers[id(node)]}">'
            f"{say(WORDS['same'])}<i>{name}</i></p>"
        )
    numbers[id(node)] = number
    if isinstance(node, Advice):
        return f'<div class="decisions__advice" data-node="{number}">{_advice(node, say)}</div>'
    how = f'<p class="decisions__how">{say(node.how)}</p>' if node.how else ""
    answers = "".join(
        f'<li><p class="decisions__answer">{say(words)}</p>'
        f"{_node(following, language, numbers)}</li>"
        for words, following in node.answers
    )
    return (
        f'<div class="decisions__question" data-node="{number}">'
        f'<p class="decisions__ask">{say(node.ask)}</p>{how}<ul>{answers}</ul></div>'
    )


def _advice(node: Advice, say: Callable[[Words], str]) -> str:
    lines = [
        f'<p class="decisions__name">{say(node.name)}</p>',
        f"<p><b>{say(WORDS['confirm'])}</b> {say(node.confirm)}</p>",
        f"<p><b>{say(WORDS['recipe'])}</b></p>",
        f'<pre tabindex="0">{html.escape(node.recipe.strip())}</pre>',
        f"<p><b>{say(WORDS['price'])}</b> {say(node.price)}</p>",
    ]
    if node.sections:
        links = " · ".join(
            f'<a data-label="{one.label}">{say(one.name)}</a>' if one.label else say(one.name)
            for one in node.sections
        )
        lines.append(f"<p><b>{say(WORDS['sections'])}</b> {links}</p>")
    return "".join(lines)


def _inline(text: str) -> str:
    return re.sub("`(.+?)`", r"<code>\1</code>", html.escape(text))
