"""Languages of the book, and what of a source belongs to one of them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path

from . import folds
from .figures import lighten, localise


@dataclass(frozen=True)
class Language:
    """One language: `tag` marks cells and names the folder, `sphinx` is the build's code."""

    tag: str
    sphinx: str
    label: str
    hreflang: str
    setup: str  # what the folded first cell of a downloaded notebook is called


LANGUAGES = {
    "zh": Language(
        tag="zh",
        sphinx="zh_CN",
        label="中文",
        hreflang="zh-Hans",
        setup="准备：安装缺少的包",
    ),
    "en": Language(
        tag="en",
        sphinx="en",
        label="English",
        hreflang="en",
        setup="Setup: install what is missing",
    ),
}
CLAIM = "application/vnd.pytorch-book.claim+json"  # for the claims page, not for a reader
BREAK = re.compile(r"^\+\+\+[ \t]*(\{.*\})?[ \t]*$", re.M)
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.M)


def of(app) -> Language:
    """The language this Sphinx run builds."""
    for language in LANGUAGES.values():
        if language.sphinx == app.config.language:
            return language
    known = [language.sphinx for language in LANGUAGES.values()]
    raise ValueError(f"language: expected one of {known}, got {app.config.language!r}")


def pick(text: str | None, tag: str) -> str | None:
    """`"English | 中文"` → the half in this language; a text without a bar is for both."""
    if not text or " | " not in text:
        return text
    english, chinese = text.split(" | ", 1)
    return english if tag == "en" else chinese


def kept(tags: list[str], tag: str) -> bool:
    """A cell without a language tag is for both languages."""
    return tag in tags or not any(t in LANGUAGES for t in tags)


def segments(html: str, tag: str) -> str:
    """Remove the other language's `<!--xx-->…<!--/xx-->`; unwrap this language's."""
    for other in LANGUAGES:
        pattern = rf"<!--{other}-->(.*?)<!--/{other}-->"
        html = re.sub(pattern, r"\1" if other == tag else "", html, flags=re.S)
    return html


def filter_notebook(notebook: dict, tag: str) -> dict:
    """The notebook in one language: its cells, its captions, its half of two-language outputs."""
    notebook = copy.deepcopy(notebook)
    notebook["cells"] = [
        cell for cell in notebook["cells"] if kept(cell["metadata"].get("tags", []), tag)
    ]
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop(CLAIM, None)
            for mime in {"text/html", "text/markdown"} & data.keys():
                data[mime] = segments("".join(data[mime]), tag)
        localise(cell, tag)
        prompt = folds.name(cell, tag) if cell["cell_type"] == "code" else None
        if prompt:
            prompts = {"code_prompt_show": prompt, "code_prompt_hide": prompt}
            cell["metadata"].setdefault("mystnb", {}).update(prompts)
    notebook["metadata"].pop("widgets", None)  # the page shows the static slider, loads no widget
    return notebook


def blocks(text: str) -> list[tuple[list[str], str, int]]:
    """Split a .md source at its `+++` lines: (tags, text, first line), code fences left alone."""
    found, tags, lines, start, fence = [], [], [], 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        match = None if fence else BREAK.match(line)
        if match:
            found.append((tags, "\n".join(lines), start))
            tags, lines, start = json.loads(match[1] or "{}").get("tags", []), [], number + 1
        else:
            lines.append(line)
    return [*found, (tags, "\n".join(lines), start)]


def filter_page(text: str, tag: str) -> str:
    """The page in one language; dropped blocks leave blank lines so that line numbers stay."""
    return "\n\n".join(
        block if kept(tags, tag) else "\n" * block.count("\n") for tags, block, _ in blocks(text)
    )


def read_notebook(path: Path) -> dict:
    """A notebook file, or a ValueError that names it."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: expected a notebook (JSON), got: {error}") from error
    if not isinstance(notebook, dict) or "cells" not in notebook:
        raise ValueError(f"{path.name}: expected a notebook with cells, got {type(notebook)}")
    return notebook


def source_read(app, docname: str, source: list[str]) -> None:
    """Hook: Sphinx hands over a source; leave only this build's language in it."""
    tag = of(app).tag
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        notebook = filter_notebook(read_notebook(path), tag)
        for cell in notebook["cells"]:
            lighten(cell)
        source[0] = json.dumps(notebook, ensure_ascii=False)
    elif path.suffix == ".md":
        source[0] = filter_page(source[0], tag)


def apply_overrides(app, config) -> None:
    """Hook, before all others: title and other strings of this language."""
    for key, value in (config.bilingual_overrides or {}).get(config.language, {}).items():
        old = getattr(config, key, None)
        setattr(config, key, {**old, **value} if isinstance(old, dict) else value)


def translate_toc(app, config) -> None:
    """Hook, after sphinx_external_toc has read _toc.yml: part captions in this language."""
    tag = of(app).tag
    for document in config.external_site_map.values():
        document.title = pick(document.title, tag)
        for subtree in document.subtrees:
            subtree.caption = pick(subtree.caption, tag)


def setup(app) -> None:
    app.add_config_value("bilingual_overrides", {}, "env")
    app.connect("config-inited", apply_overrides, priority=100)
    app.connect("config-inited", translate_toc, priority=950)
    app.connect("source-read", source_read)
