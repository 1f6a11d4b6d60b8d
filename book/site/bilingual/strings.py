"""Words of the interface: our .po files compiled into the build folder and given to Sphinx."""

from __future__ import annotations

import re
from pathlib import Path

from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po

from .language import of
from .prose import CJK

LOCALE = Path(__file__).parent / "locale"


def compile_catalogs(target: Path) -> list[str]:
    """Write every `locale/xx/LC_MESSAGES/name.po` as `.mo` below `target`; return the names."""
    names = set()
    for source in sorted(LOCALE.glob("*/LC_MESSAGES/*.po")):
        compiled = target / source.relative_to(LOCALE).with_suffix(".mo")
        compiled.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as text, compiled.open("wb") as binary:
            write_mo(binary, read_po(text, locale=source.parts[-3]))
        names.add(source.stem)
    return sorted(names)


# Written by other packages into the page's body, and what it should say instead.
MENDED = {
    # myst-nb names every folded cell in English only; its visible text names it better
    ' aria-label="Toggle hidden content"': "",
    # docutils' role for a reference is deprecated, and the list around it has none of its items
    ' role="doc-biblioentry"': ' role="listitem"',
}


HEAD = re.compile(r"<thead>.*?</thead>\n?", re.S)
EMPTY_HEADING = re.compile(r"<th\b[^>]*>(?:<p></p>)?</th>")


def without_empty_headings(body: str) -> str:
    """Markdown's tables always have a row of headings: an empty one is no heading."""

    def mended(match: re.Match) -> str:
        head = EMPTY_HEADING.sub("<td></td>", match[0])
        return head if "<th " in head or "<th>" in head else ""

    return HEAD.sub(mended, body)


CHINESE_CELL = re.compile(f"<t([dh])([^>]*)>(?=<p>[^<]*[{CJK}])")


def name_chinese(body: str) -> str:
    """In the tables of an English page: cells that a screen reader should read as Chinese."""
    return CHINESE_CELL.sub(r'<t\1\2 lang="zh-Hans">', body)


def mend_body(app, pagename, templatename, context, doctree) -> None:
    """Hook: names and roles for screen readers."""
    body = context.get("body")
    if body is None:
        return
    for found, wanted in MENDED.items():
        body = body.replace(found, wanted)
    body = without_empty_headings(body)
    context["body"] = name_chinese(body) if of(app).tag == "en" else body


def setup(app) -> None:
    app.connect("html-page-context", mend_body)
    target = Path(app.doctreedir) / "locale"
    for name in compile_catalogs(target):
        app.add_message_catalog(name, str(target))
