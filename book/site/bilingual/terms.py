"""Where each term is explained, and whether it is used before.

A glossary term in bold, exactly in the glossary's form, marks the place: **broadcasting** in
English, **广播** in Chinese, in the same section. The first such place in reading order counts. A
section "Going deeper" may be skipped, so what it explains is not known to the sections after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import prose
from .language import LANGUAGES, kept, read_notebook
from .pairing import read_terms

BOLD = re.compile(r"\*\*(?!\s)([^*\n]+?)(?<!\s)\*\*")
LABELLED_HEADING = re.compile(r"^\(([\w-]+)\)=[ \t]*\n(?=(#{1,6})[ \t])", re.M)
ASIDE = ("-deeper", "-reading")  # sections that the main line never needs


@dataclass(frozen=True)
class Passage:
    """Prose of one section in one language.

    number: counts sections through the whole book. opening: the first cell, which says what the
    chapter will teach. aside: a reader may skip the section and read on.
    """

    chapter: str
    label: str
    number: int
    opening: bool
    aside: bool
    text: str


@dataclass(frozen=True)
class Place:
    """A section that explains a term."""

    number: int
    chapter: str
    label: str
    aside: bool


# ---- the glossary's forms


def base(form: str) -> str:
    """The word itself: `rank（进程编号）` → `rank`."""
    return re.split(r" ?\(|（|；", form)[0].strip()


def word(term: dict, tag: str) -> str:
    return base(term[tag]).lower()


def english_forms(term: dict) -> list[str]:
    """The singular and the plural."""
    one = word(term, "en")
    regular = one[:-1] + "ies" if one.endswith("y") else one + "s"
    also = [one + "es"] if one.endswith(("s", "x", "z", "ch", "sh")) else []
    return [one, term.get("plural", regular).lower(), *also]


def forms(term: dict, tag: str) -> list[str]:
    return english_forms(term) if tag == "en" else [word(term, "zh")]


def tested(term: dict, tag: str) -> bool:
    """Can the word be told from everyday language, and from the inside of other words?"""
    return tag not in term.get("everyday", []) and len(word(term, tag)) > 1


def pattern(words: list[str]) -> re.Pattern:
    """Any of these words, the longest first; Latin ones only as whole words."""
    parts = []
    for one in sorted(set(words), key=lambda w: (-len(w), w)):
        part = r"\s+".join(map(re.escape, one.split()))
        before = r"(?<![A-Za-z0-9_-])" if one[0].isascii() else ""
        after = r"(?![A-Za-z0-9_-])" if one[-1].isascii() else ""
        parts.append(before + part + after)
    return re.compile("|".join(parts), re.I)


# ---- the book's prose, in reading order


def reading_order(root: Path) -> list[str]:
    """Stems of the chapters as _toc.yml names them."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [file.split("/")[-1] for file in files if file.startswith("notebooks/")]


@dataclass(frozen=True)
class Heading:
    """A section's label, how deep its heading is, and whether it may be skipped."""

    label: str
    level: int = 1
    aside: bool = False

    def next(self, label: str, level: int) -> Heading:
        """The heading after this one: what stands below a section on the side is on the side."""
        inside = self.aside and level > self.level
        if inside:
            return Heading(label, self.level, aside=True)
        return Heading(label, level, label.endswith(ASIDE))


def passages(notebook: dict, stem: str, tag: str, start: int = 0) -> list[Passage]:
    """The prose of a chapter in one language, captions included, section by section."""
    found: list[Passage] = []
    heading, number = Heading(stem), start
    for text in prose_of(notebook, tag):
        opening = not found
        before, *parts = LABELLED_HEADING.split(prose.without_fences(text))
        pieces = [(None, "", before), *zip(parts[::3], parts[1::3], parts[2::3], strict=True)]
        for label, mark, piece in pieces:
            if label:
                heading, number = heading.next(label, len(mark)), number + 1
            if piece.strip():
                words = prose.words_only(piece)
                found.append(Passage(stem, heading.label, number, opening, heading.aside, words))
    return found


def prose_of(notebook: dict, tag: str) -> Iterator[str]:
    """What stands in the cells of one language, and under the figures."""
    for cell in notebook["cells"]:
        metadata = cell["metadata"]
        if cell["cell_type"] == "code":
            yield metadata.get("bilingual", {}).get(tag, {}).get("caption", "")
        elif kept(metadata.get("tags", []), tag):
            yield "".join(cell["source"])


def book(root: Path) -> dict[str, list[Passage]]:
    """The prose of all chapters in each language, in reading order."""
    found: dict[str, list[Passage]] = {tag: [] for tag in LANGUAGES}
    for order, stem in enumerate(reading_order(root)):
        notebook = read_notebook(root / "notebooks" / f"{stem}.ipynb")
        for tag in LANGUAGES:
            found[tag] += passages(notebook, stem, tag, start=order * 1000)
    return found


# ---- where a term is explained


def marks(texts: list[Passage], terms: list[dict], tag: str) -> Iterator[tuple[str, Passage]]:
    """Every term in bold, in the glossary's form: its word, and where."""
    known = {form: word(term, tag) for term in terms for form in forms(term, tag)}
    for passage in texts:
        for bold in BOLD.findall(passage.text):
            form = re.sub(r"\s+", " ", bold).lower()
            if form in known:
                yield known[form], passage


def marked(texts: list[Passage], terms: list[dict], tag: str) -> dict[str, dict[str, Passage]]:
    """For each word the sections that mark it, in reading order."""
    found: dict[str, dict[str, Passage]] = {}
    for one, passage in marks(texts, terms, tag):
        found.setdefault(one, {}).setdefault(passage.label, passage)
    return found


def introductions(terms: list[dict], texts: dict[str, list[Passage]]) -> dict[int, Place]:
    """Term (by its row) → the first section that marks it in both languages."""
    zh, en = (marked(texts[tag], terms, tag) for tag in ("zh", "en"))
    found = {}
    for row, term in enumerate(terms):
        chinese = zh.get(word(term, "zh"), {})
        both = [p for label, p in en.get(word(term, "en"), {}).items() if label in chinese]
        if both:
            first = min(both, key=lambda p: (p.aside, p.number))
            found[row] = Place(first.number, first.chapter, first.label, first.aside)
    return found


def one_sided(terms: list[dict], texts: dict[str, list[Passage]]) -> list[str]:
    """Sections that mark a term in one language and not in the other."""
    found = []
    both = {tag: marked(texts[tag], terms, tag) for tag in LANGUAGES}
    for tag, other in (("zh", "en"), ("en", "zh")):
        for one, places in both[tag].items():
            twins = {word(term, other) for term in terms if word(term, tag) == one}
            for label, passage in places.items():
                if not any(label in both[other].get(twin, {}) for twin in twins):
                    names = " or ".join(sorted(twins))
                    found.append(
                        f"notebooks/{passage.chapter}.ipynb, {label}: "
                        f"{tag} marks **{one}**, {other} does not mark {names}"
                    )
    return found


# ---- and where it is used too early


def too_early(passage: Passage, place: Place) -> bool:
    """Does this passage come before the term's section, for a reader who reads from the start?"""
    if passage.aside or passage.label == place.label:
        return False
    if passage.opening and passage.chapter == place.chapter:
        return False  # it says what the chapter will teach
    return place.aside or passage.number < place.number


def early_uses(terms: list[dict], texts: dict[str, list[Passage]]) -> list[str]:
    """For each term and language the first section of each chapter that uses it too early."""
    found = []
    explained = introductions(terms, texts)
    for tag in LANGUAGES:
        words = pattern([f for term in terms for f in forms(term, tag) if len(f) > 1])
        wanted = watched(terms, explained, tag)
        seen = set()
        for passage in texts[tag]:
            for use in words.finditer(passage.text):
                form = re.sub(r"\s+", " ", use[0]).lower()
                one, place = wanted.get(form, (None, None))
                if one and too_early(passage, place) and (one, passage.chapter) not in seen:
                    seen.add((one, passage.chapter))
                    found.append(early(passage, tag, one, place))
    return found


def watched(terms: list[dict], explained: dict[int, Place], tag: str) -> dict:
    """Form → (word, its first place); a word of two terms is known from the first of them on."""
    found: dict = {}
    skipped = {word(term, tag) for term in terms if not tested(term, tag)}
    for row, place in sorted(explained.items(), key=lambda item: (item[1].aside, item[1].number)):
        one = word(terms[row], tag)
        for form in forms(terms[row], tag):
            if one not in skipped:
                found.setdefault(form, (one, place))
    return found


def early(passage: Passage, tag: str, one: str, place: Place) -> str:
    where = f"notebooks/{passage.chapter}.ipynb, {passage.label}"
    if place.aside:
        return f"{where}: {tag} uses “{one}”, explained only on the side, in {place.label}"
    return f"{where}: {tag} uses “{one}” before {place.label} ({place.chapter}) explains it"


def problems(root: Path) -> list[str]:
    """Everything that is wrong with the places where terms are explained."""
    terms, texts = read_terms(root), book(root)
    return [*one_sided(terms, texts), *early_uses(terms, texts)]


def report(root: Path) -> list[str]:
    """A line for each term: where it is explained, or that no section is marked."""
    terms = read_terms(root)
    explained = introductions(terms, book(root))
    lines = []
    for row, term in enumerate(terms):
        place = explained.get(row)
        where = f"{place.chapter}, {place.label}" if place else "not marked"
        lines.append(f"{base(term['en'])} · {base(term['zh'])}: {where}")
    return lines
