"""Pages made from data: `{claims}`, `{records}`, `{terms}` and `{explained}`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

from . import terms as places
from .language import CLAIM, filter_notebook, of, pick, read_notebook

VERDICTS = ("holds", "holds-if", "false", "not-recorded", "no-result")


@dataclass(frozen=True)
class Part:
    """A section of a data page: its address, its heading, its body in Markdown."""

    anchor: str
    title: str
    body: list[str]


def results(notebook: dict) -> list[dict]:
    """Every claim result stored in a notebook's outputs: {id, verdict, values}."""
    return [
        output["data"][CLAIM]
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if CLAIM in output.get("data", {})
    ]


def title(notebook: dict, tag: str) -> str:
    """The chapter's H1 in one language."""
    for cell in filter_notebook(notebook, tag)["cells"]:
        for line in "".join(cell["source"]).split("\n"):
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line[2:].strip()
    raise ValueError(f"notebook: expected a heading `# …` in language {tag!r}, got none")


def table(columns: list[str], rows: list[list[str]], kind: str) -> list[str]:
    """Markdown for a table; a cell is one line of Markdown."""
    lines = ["", ":::{list-table}", f":class: {kind}", ":header-rows: 1", ""]
    for row in [columns, *rows]:
        for number, cell in enumerate(row):
            lines.append(f"{'* -' if number == 0 else '  -'} {' '.join(str(cell).split())}")
    return [*lines, ":::", ""]


def verdict_words() -> dict[str, str]:
    """A verdict in the page's language."""
    words = (
        _("holds"),
        _("holds under conditions"),
        _("does not hold"),
        _("not recorded yet"),
        _("no result yet"),
    )
    return dict(zip(VERDICTS, words, strict=True))


def claim_row(name: str, entry: dict, found: list[dict], tag: str) -> list[str]:
    """One claim: what is claimed, what was measured, the verdict."""
    verdict = found[0]["verdict"] if found else "no-result"
    measured = "–"
    if verdict not in ("no-result", "not-recorded"):
        none, values = _("not recorded yet"), found[0]["values"]
        values = {name: none if value is None else value for name, value in values.items()}
        measured = entry["result"][tag].format(**values)
    badge = f"[{verdict_words()[verdict]}]{{.verdict .verdict--{verdict}}}"
    return [f"[{name}]{{#claim-{name.lower()}}}", entry["claim"][tag], measured, badge]


def claims_parts(claims: dict, chapters: dict[str, dict], tag: str) -> list[Part]:
    """The claims of the whole book, by chapter; `chapters` maps a stem to its notebook."""
    parts = []
    columns = [_("No."), _("Commonly claimed"), _("Measured"), _("Verdict")]
    for stem in sorted({entry["chapter"] for entry in claims.values()}):
        notebook = chapters.get(stem)
        found = results(notebook) if notebook else []
        rows = [
            claim_row(name, entry, [one for one in found if one["id"] == name], tag)
            for name, entry in claims.items()
            if entry["chapter"] == stem
        ]
        link = [f"{{doc}}`{_('To the chapter')} <../notebooks/{stem}>`"] if notebook else []
        heading = title(notebook, tag) if notebook else stem
        body = link + table(columns, rows, "claims")
        parts.append(Part(f"claims-{stem.replace('_', '-')}", heading, body))
    return parts


def value(cell) -> str:
    """A record's cell: `[p20, p50, p80]` as the median and its spread."""
    if isinstance(cell, list):
        low, middle, high = cell
        return f"{middle:g} ({low:g}–{high:g})"
    return "–" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)


def provenance_labels() -> dict[str, str]:
    """The known keys of a record's provenance in the page's language."""
    return {
        "device": _("Device"),
        "driver": _("Driver"),
        "commit": _("Commit"),
        "dirty": _("Uncommitted changes"),
        "command": _("Command"),
        "date": _("Date"),
        "repeats": _("Repeats"),
        "clock": _("Clock"),
    }


def provenance_value(cell) -> str:
    """A provenance value as text."""
    if isinstance(cell, bool):
        return _("yes") if cell else _("no")
    return f"`{cell}`"


NO_UNITS = ("", "name", "count", "number")


def records_parts(records: dict[str, dict], chapters: list[str]) -> list[Part]:
    """Every record as a table, then where it comes from; `records` maps a file stem to its data.

    chapters: the stems of the notebooks; a record links to the one of its name.
    """
    parts, labels = [], provenance_labels()
    by_topic = {chapter[3:]: chapter for chapter in chapters}
    for stem, record in sorted(records.items()):
        missing = {"provenance", "units", "rows"} - record.keys()
        if missing:
            raise ValueError(f"record {stem}: expected provenance, units, rows; no {missing}")
        units = record["units"]
        columns = [name if unit in NO_UNITS else f"{name} ({unit})" for name, unit in units.items()]
        rows = [[value(row.get(name)) for name in units] for row in record["rows"]]
        chapter = by_topic.get(stem.split(".")[0])
        body = [f"{{doc}}`{_('To the chapter')} <../notebooks/{chapter}>`"] if chapter else []
        body += table(columns, rows, "record")
        for key, cell in record["provenance"].items():
            body.append(f"* {labels.get(key, key)}: {provenance_value(cell)}")
        anchor = stem.replace(".", "-").replace("_", "-").lower()
        parts.append(Part(f"record-{anchor}", stem.replace(".", " · "), body))
    return parts


def terms_parts(terms: list[dict], tag: str) -> list[Part]:
    """The glossary, one table for each group."""
    parts, groups = [], list(dict.fromkeys(term["group"] for term in terms))
    columns = ["English", "中文", _("Not used")]
    for group in groups:
        rows = [
            [
                term["en"],
                f"{term['zh']} ({_('stays English')})" if term.get("keep") else term["zh"],
                "、".join(term.get("never", [])) or "–",
            ]
            for term in terms
            if term["group"] == group
        ]
        anchor = pick(group, "en").lower().replace(" ", "-")
        parts.append(Part(f"terms-{anchor}", pick(group, tag), table(columns, rows, "terms")))
    return parts


def explained_table(terms: list[dict], texts: dict, tag: str) -> list[str]:
    """Each term that a chapter explains, in the alphabet of the page's language, and where."""
    rows = []
    for row, place in places.introductions(terms, texts).items():
        words = {"en": terms[row]["en"], "zh": terms[row]["zh"].split("；")[0]}
        first, second = words.pop(tag), words.popitem()[1]
        rows.append([first, second, f"{int(place.chapter[:2])} · {{ref}}`{place.label}`"])
    # in GB 18030 the common characters stand in the order of their pronunciation
    rows.sort(key=lambda row: row[0].lower().encode("gb18030"))
    columns = ["English", "中文"] if tag == "en" else ["中文", "English"]
    return table([*columns, _("Explained in")], rows, "explained") if rows else []


class DataPage(SphinxDirective):
    """Turn data files into Markdown and let the page's own parser read it."""

    def parts(self) -> list[Part]:
        raise NotImplementedError

    @property
    def root(self) -> Path:
        return Path(self.env.srcdir)

    @property
    def tag(self) -> str:
        return of(self.env.app).tag

    def load(self, path: Path):
        """A YAML or JSON file that this page depends on."""
        self.env.note_dependency(str(path))
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)

    def run(self) -> list[nodes.Node]:
        """Sections are made here: a nested parse of headings would put them elsewhere."""
        sections = [self.section(part) for part in self.parts()]
        return sections or [nodes.paragraph("", _("Nothing has been recorded yet."))]

    def section(self, part: Part) -> nodes.section:
        section = nodes.section("", nodes.title("", part.title), ids=[part.anchor])
        lines = StringList(part.body, source=self.get_source_info()[0])
        self.state.nested_parse(lines, self.content_offset, section)
        return section


class Claims(DataPage):
    """`{claims}`: book/claims.yml against the results in the notebooks."""

    def parts(self) -> list[Part]:
        path = self.root / "book" / "claims.yml"
        self.env.note_dependency(str(path))
        claims = self.load(path) if path.exists() else {}
        chapters = {}
        for docname in sorted(self.env.found_docs):
            source = Path(self.env.doc2path(docname))
            if source.suffix == ".ipynb":
                self.env.note_dependency(str(source))
                chapters[source.stem] = read_notebook(source)
        return claims_parts(claims or {}, chapters, self.tag)


class Records(DataPage):
    """`{records}`: benchmarks/records/*.json."""

    def parts(self) -> list[Part]:
        folder = self.root / "benchmarks" / "records"
        self.env.note_dependency(str(folder))  # a folder counts as changed: a record may be new
        files = sorted(folder.glob("*.json"))
        records = {path.stem: self.load(path) for path in files}
        return records_parts(records, places.reading_order(self.root))


class Terms(DataPage):
    """`{terms}`: book/glossary.yml."""

    def parts(self) -> list[Part]:
        return terms_parts(self.load(self.root / "book" / "glossary.yml"), self.tag)


class Explained(DataPage):
    """`{explained}`: the terms of book/glossary.yml and the sections that explain them."""

    def run(self) -> list[nodes.Node]:
        """One table, without sections."""
        for stem in places.reading_order(self.root):
            self.env.note_dependency(str(self.root / "notebooks" / f"{stem}.ipynb"))
        self.env.note_dependency(str(self.root / "_toc.yml"))
        terms = self.load(self.root / "book" / "glossary.yml")
        lines = explained_table(terms, places.book(self.root), self.tag)
        node = nodes.Element()
        lines = StringList(lines or [_("Nothing has been recorded yet.")], self.env.docname)
        self.state.nested_parse(lines, self.content_offset, node)
        return node.children


def number_chapters(app, config) -> None:
    """Hook, after sphinx_external_toc has read _toc.yml: chapters are numbered in the sidebar."""
    for document in config.external_site_map.values():
        number = re.match(r"notebooks/(\d\d)_", document.docname)
        if number:
            notebook = read_notebook(Path(app.srcdir) / f"{document.docname}.ipynb")
            document.title = f"{int(number[1])} · {title(notebook, of(app).tag)}"


def setup(app) -> None:
    app.connect("config-inited", number_chapters, priority=950)
    app.add_directive("claims", Claims)
    app.add_directive("records", Records)
    app.add_directive("terms", Terms)
    app.add_directive("explained", Explained)
