"""The drift gate: both languages say the same, and were reviewed together.

`problems(root)` returns every finding as one line that names the place; `author.py check` prints
them and the tests fail on them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import prose
from .language import LANGUAGES, blocks, read_notebook

LOCK = Path("book/translations.lock.json")
REVIEW = "python book/author.py review"
PHRASES = ("您", "大家", "让我们来", "值得注意的是", "众所周知")
SPAN = re.compile(r"(?:\{[\w:-]+\})?`[^`\n]+`|\[[^\]\n]+\]\([^)\n]+\)")


@dataclass(frozen=True)
class Pair:
    """One prose in both languages; `key` is its place in the lock file."""

    file: str
    key: str
    zh: str
    en: str

    @property
    def place(self) -> str:
        return f"{self.file}, {self.key}"


def cell_pairs(file: str, cells: list[tuple[str, str | None, str]]) -> tuple[list[Pair], list[str]]:
    """Join twins; `cells` holds (key, language or None, text) in order."""
    pairs, found = [], []
    for number, (key, language, text) in enumerate(cells):
        after = cells[number + 1][1] if number + 1 < len(cells) else None
        before = cells[number - 1][1] if number else None
        if language == "zh" and after == "en":
            pairs.append(Pair(file, key, text, cells[number + 1][2]))
        elif language == "zh":
            found.append(f"{file}, {key}: zh without its en directly after it")
        elif language == "en" and before != "zh":
            found.append(f"{file}, {key}: en without its zh directly before it")
        elif language is None and re.search(f"[{prose.CJK}]", text):
            found.append(f"{file}, {key}: Chinese in prose for both languages; tag it and pair it")
    return pairs, found


def language_tag(tags: list[str]) -> str | None:
    return next((tag for tag in tags if tag in LANGUAGES), None)


def notebook_pairs(file: str, notebook: dict) -> tuple[list[Pair], list[str]]:
    """Pairs of prose cells, and of captions and alt texts."""
    cells, captions = [], []
    for number, cell in enumerate(notebook["cells"]):
        key = f"cell {cell.get('id', number)}"
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cells.append((key, language_tag(cell["metadata"].get("tags", [])), text))
        else:
            cells.append((key, "code", ""))
            words = cell["metadata"].get("bilingual")
            for kind in ("caption", "alt") if words else ():
                zh, en = (words.get(tag, {}).get(kind, "") for tag in ("zh", "en"))
                captions.append(Pair(file, f"{key} {kind}", zh, en))
    pairs, found = cell_pairs(file, cells)
    return pairs + captions, found


def page_pairs(file: str, text: str) -> tuple[list[Pair], list[str]]:
    """Pairs of the blocks of a .md page, keyed by their order."""
    cells, ordinal = [], 0
    for tags, block, line in blocks(text):
        if block.strip():
            ordinal += language_tag(tags) == "zh"
            key = f"block {ordinal}" if language_tag(tags) else f"line {line}"
            cells.append((key, language_tag(tags), block))
    return cell_pairs(file, cells)


def same(what: str, take: Callable) -> Callable:
    """A rule: `take` gives the same for both texts."""

    def rule(pair: Pair) -> list[str]:
        zh, en = take(pair.zh), take(pair.en)
        return [] if zh == en else [f"{what} differ: {difference(zh, en)}"]

    return rule


def difference(zh, en) -> str:
    """What only one side has, or both sides where order matters."""
    if not hasattr(zh, "elements"):
        return f"zh {zh}, en {en}"
    only_zh, only_en = sorted((zh - en).elements()), sorted((en - zh).elements())
    return f"only zh {only_zh}, only en {only_en}"


def same_numbers(pair: Pair) -> list[str]:
    """The same digits, or a digit on one side and the word for it on the other."""
    zh, en = prose.numbers(pair.zh), prose.numbers(pair.en)
    only_zh = (zh - en) - prose.spelled_numbers(pair.en)
    only_en = (en - zh) - prose.spelled_numbers(pair.zh)
    if not only_zh and not only_en:
        return []
    return [f"numbers differ: {difference(only_zh, only_en)}"]


def labelled_headings(pair: Pair) -> list[str]:
    return [
        f"heading without a label above it: {line}"
        for text in (pair.zh, pair.en)
        for line in prose.unlabelled(text)
    ]


def both_there(pair: Pair) -> list[str]:
    return [f"{tag} is empty" for tag in ("zh", "en") if not getattr(pair, tag).strip()]


def no_lost_backslash(pair: Pair) -> list[str]:
    r"""A control character is what a careless string makes of `\top` or `\beta`."""
    lost = {repr(c) for c in pair.zh + pair.en if ord(c) < 32 and c != "\n"}
    return [f"control characters {', '.join(sorted(lost))}: a lost backslash?"] if lost else []


PAIR_RULES: dict[str, Callable[[Pair], list[str]]] = {
    "empty": both_there,
    "escapes": no_lost_backslash,
    "headings": same("heading levels", prose.headings),
    "labels": same("labels", prose.labels),
    "labelled": labelled_headings,
    "code": same("inline code", prose.code),
    "fences": same("code blocks", prose.fences),
    "formulas": same("formulas", prose.formulas),
    "links": same("link targets", prose.links),
    "roles": same("roles", prose.roles),
    "numbers": same_numbers,
    "items": same("list items (bullets, numbered)", prose.items),
    "directives": same("directives", prose.directives),
    "pitfalls": same("pitfalls", prose.pitfalls),
}


def forbidden_terms(text: str, terms: list[dict]) -> list[str]:
    """Forms that the glossary rules out."""
    words = prose.words_only(text)
    return [
        f"the glossary says {term['zh']}, not {form}"
        for term in terms
        for form in term.get("never", [])
        if form in words
    ]


def forbidden_phrases(text: str) -> list[str]:
    """Words that this book does not use."""
    words = prose.words_only(text)
    return [f"not used in this book: {phrase}" for phrase in PHRASES if phrase in words]


def spacing(text: str) -> list[str]:
    """A space between a Chinese character and inline code, a role or a link."""
    text = prose.without_fences(text)
    found = []
    for span in SPAN.finditer(text):
        around = text[max(span.start() - 1, 0) : span.start()] + text[span.end() : span.end() + 1]
        if re.search(f"[{prose.CJK}]", around):
            found.append(f"a space is missing around {span[0]}")
    return found


def typography(text: str) -> list[str]:
    """Chinese typography by autocorrect."""
    import autocorrect_py

    result = autocorrect_py.lint_for(prose.LABEL.sub("", text), "markdown")
    return [f"typography: {line.old!r} should be {line.new!r}" for line in result.lines]


def chinese_rules(text: str, terms: list[dict]) -> list[str]:
    """Every rule for Chinese alone."""
    return [
        *forbidden_terms(text, terms),
        *forbidden_phrases(text),
        *spacing(text),
        *typography(text),
    ]


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def lock_entries(pairs: list[Pair]) -> dict[str, dict[str, list[str]]]:
    """What the lock file holds for these pairs: file → key → [zh, en]."""
    entries: dict[str, dict[str, list[str]]] = {}
    for pair in pairs:
        entries.setdefault(pair.file, {})[pair.key] = [digest(pair.zh), digest(pair.en)]
    return entries


def lock_problems(pairs: list[Pair], lock: dict) -> list[str]:
    """Pairs that changed since a person last read both sides together."""
    found, entries = [], lock_entries(pairs)
    for file, keys in entries.items():
        for key, now in keys.items():
            state = moved(lock.get(file, {}).get(key), now)
            if state:
                found.append(f"{file}, {key}: {state}; read both, then run: {REVIEW} {file}")
    for file, keys in lock.items():
        gone = sorted(keys.keys() - entries.get(file, {}).keys())
        if gone:
            found.append(f"{file}: the lock file still has {', '.join(gone)}; run: {REVIEW}")
    return found


def moved(before: list[str] | None, now: list[str]) -> str | None:
    """Which side changed since the review, in words."""
    if before is None:
        return "not reviewed yet"
    zh, en = (old != new for old, new in zip(before, now, strict=True))
    return {
        (True, True): "both sides changed since the review",
        (True, False): "only the Chinese changed since the review",
        (False, True): "only the English changed since the review",
    }.get((zh, en))


def duplicate_labels(pairs: list[Pair]) -> list[str]:
    """Labels are addresses in the whole book: each stands once."""
    seen: dict[str, str] = {}
    found = []
    for pair in pairs:
        for label in prose.labels(pair.en):
            if label in seen:
                found.append(f"{pair.place}: label {label} stands already at {seen[label]}")
            seen.setdefault(label, pair.place)
    return found


def sources(root: Path) -> Iterator[Path]:
    """Every bilingual source of the book."""
    yield from sorted((root / "notebooks").glob("*.ipynb"))
    yield from sorted((root / "book").glob("*.md"))


def collect(root: Path) -> tuple[list[Pair], list[str]]:
    """All pairs of the book, and the prose that has no twin."""
    pairs, found = [], []
    for path in sources(root):
        file = path.relative_to(root).as_posix()
        if path.suffix == ".ipynb":
            new, wrong = notebook_pairs(file, read_notebook(path))
        else:
            new, wrong = page_pairs(file, path.read_text(encoding="utf-8"))
        pairs += new
        found += wrong
    return pairs, found


def read_lock(root: Path) -> dict:
    path = root / LOCK
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_terms(root: Path) -> list[dict]:
    return yaml.safe_load((root / "book" / "glossary.yml").read_text(encoding="utf-8"))


def problems(root: Path) -> list[str]:
    """Everything that is wrong with the book's two languages."""
    pairs, found = collect(root)
    terms = read_terms(root)
    for pair in pairs:
        wrong = [line for rule in PAIR_RULES.values() for line in rule(pair)]
        wrong += chinese_rules(pair.zh, terms)
        found += [f"{pair.place}: {line}" for line in wrong]
    return [*found, *duplicate_labels(pairs), *lock_problems(pairs, read_lock(root))]
