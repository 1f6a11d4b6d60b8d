"""Search: the sections of the built pages as data, which `static/search.js` ranks in the browser.

Sphinx's own search finds pages; a chapter is thirty screens long. Its index is not made.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from . import terms
from .language import of

VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
HEADINGS = frozenset("h1 h2 h3 h4 h5 h6".split())
BLOCKS = HEADINGS | frozenset(
    "blockquote br dd details div dt figcaption li p pre section summary td th".split()
)
SILENT_TAGS = frozenset(("script", "style", "svg", "button", "label"))
# solutions would be given away, and nobody looks for a folded check
FOLDED = ("tag_evidence", "tag_solution")
SILENT_CLASSES = frozenset(("headerlink", "cell_output", "prev-next-footer", *FOLDED))
COMMENTS = frozenset(("c1", "ch"))  # as Pygments calls them
NAME = re.compile(r"[A-Za-z_]\w{2,}(?:\.\w+)*", re.ASCII)  # torch.cuda.synchronize; not x or to


class Article(HTMLParser):
    """The sections of a page: address, title, text; without outputs, drawings and folded cells.

    Of code, each name is there once: all of it would be a third of what a reader has to load.
    """

    def __init__(self, html: str):
        super().__init__()
        self.sections: list[list[str]] = []  # [anchor, title, text]
        self.open: list[tuple[str, bool, int]] = []  # tag, silent, section before
        self.inside = self.silent = False
        self.heading = False
        self.current = -1
        self.code: str | None = None  # of a cell that is open
        self.depth = 0  # of `open`, outside that cell
        self.feed(html)
        self.sections = [[" ".join(part.split()) for part in one] for one in self.sections]

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        classes = set((attrs.get("class") or "").split())
        if tag == "article" and "bd-article" in classes:
            self.inside = True
        if tag in BLOCKS:
            self.say(" ")
        if not self.inside or tag in VOID:
            return
        if "cell_input" in classes and self.code is None:
            self.code, self.depth = "", len(self.open)
        self.open.append((tag, self.silent, self.current))
        self.silent = self.silent or tag in SILENT_TAGS or bool(classes & SILENT_CLASSES)
        self.silent = self.silent or (self.code is not None and bool(classes & COMMENTS))
        if tag == "section" and attrs.get("id"):
            self.current = len(self.sections)
            self.sections.append([attrs["id"], "", ""])
        self.heading = self.heading or tag in HEADINGS

    def handle_endtag(self, tag):
        if not self.inside or tag in VOID:
            return
        while self.open:
            closed, self.silent, self.current = self.open.pop()
            if closed in HEADINGS:
                self.heading = False
            if closed == tag:
                break
        if self.code is not None and len(self.open) == self.depth:
            code, self.code = self.code, None
            self.say_names(code)
        if tag in BLOCKS:
            self.say(" ")
        self.inside = bool(self.open)

    def handle_data(self, data):
        if self.inside and not self.silent:
            self.say(data)

    def say_names(self, code: str) -> None:
        """Each name that the section does not have yet."""
        if self.current < 0:
            return
        known = set(NAME.findall(self.sections[self.current][2]))
        new = [name for name in dict.fromkeys(NAME.findall(code)) if name not in known]
        self.say(" " + " ".join(new) + " ")

    def say(self, words: str) -> None:
        if self.code is not None:
            self.code += words
        elif self.current >= 0:
            self.sections[self.current][1 if self.heading else 2] += words


def explained(root: Path) -> dict[str, list[str]]:
    """Label → the terms that this section explains, in both languages."""
    rows = terms.read_terms(root)
    found: dict[str, list[str]] = {}
    for row, place in terms.introductions(rows, terms.book(root)).items():
        words = [terms.word(rows[row], tag) for tag in ("zh", "en")]
        found.setdefault(place.label, []).extend(words)
    return found


def page(path: str, html: str, words: dict[str, list[str]]) -> list | None:
    """What the search knows of a page: [path, title, [[anchor, title, text, terms], …]]."""
    sections = Article(html).sections
    if not sections:
        return None
    known = [[*section, words.get(section[0], [])] for section in sections]
    return [path, sections[0][1], known]


def write(app, exception) -> None:
    """Hook: after the pages, what the search knows of them."""
    if exception is not None or app.builder.name != "html":
        return
    words = explained(Path(app.srcdir))
    pages = []
    for docname in sorted(app.env.found_docs):
        target = app.builder.get_target_uri(docname)
        html = (Path(app.outdir) / target).read_text(encoding="utf-8")
        pages.append(page(target, html, words))
    data = json.dumps([one for one in pages if one], ensure_ascii=False, separators=(",", ":"))
    data = re.sub("[\u2028\u2029]", " ", data)
    script = f"const bookLanguage = {of(app).tag!r}, bookPages = {data};\n"
    (Path(app.outdir) / "search-sections.js").write_text(script, encoding="utf-8")
    (Path(app.outdir) / "searchindex.js").unlink(missing_ok=True)  # of an older build


def own_page(app, config) -> None:
    """Hook: a search page without Sphinx's search."""
    config.html_additional_pages = {**config.html_additional_pages, "search": "search.html"}


def no_index(app) -> None:
    """Hook: Sphinx makes no index."""
    app.builder.search = False


def setup(app) -> None:
    app.connect("config-inited", own_page)
    app.connect("builder-inited", no_index)
    app.connect("build-finished", write)
