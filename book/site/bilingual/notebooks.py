"""The chapter as a notebook in one language, ready for Colab or an empty folder."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

from . import folds
from .language import LANGUAGES, filter_notebook, of, read_notebook
from .repository import Repository, current
from .structure import START
from .switch import is_twin_build

LABEL = re.compile(r"^\([\w-]+\)=[ \t]*\n", re.M)
ROLE_WITH_TEXT = re.compile(r"\{\w+(?::\w+)?\}`([^`<]+?)\s*<[^`>]+>`")
CITE = re.compile(r"\{cite(?::\w+)?\}`([^`]+)`")
ROLE = re.compile(r"\{\w+(?::\w+)?\}`([^`]+)`")
TOOL_TAGS = {"zh", "en", "nbval-ignore-output"}
FIGURE = re.compile(r"(!\[[^\]]*\])\(\.\./(book/figures/[\w/.-]+\.svg)\)")
ROOT = Path(__file__).resolve().parents[3]
BOOTSTRAP = Path(__file__).parent.parent / "bootstrap.py"
BOOTSTRAP_ALONE = BOOTSTRAP.with_name("bootstrap_start.py")  # for the chapter without `helpers`


def plain_markdown(text: str, titles: dict[str, str]) -> str:
    """MyST that JupyterLab and Colab would show raw, as plain Markdown."""
    text = LABEL.sub("", text)
    text = ROLE_WITH_TEXT.sub(r"\1", text)
    text = CITE.sub(lambda match: f"[{match[1].replace(',', ', ')}]", text)
    return ROLE.sub(lambda match: titles.get(match[1].split("/")[-1], match[1]), text)


def with_figures(text: str) -> str:
    """Put the book's diagrams into the text itself: a notebook alone has no files beside it."""

    def inlined(match: re.Match) -> str:
        data = base64.b64encode((ROOT / match[2]).read_bytes()).decode()
        return f"{match[1]}(data:image/svg+xml;base64,{data})"

    return FIGURE.sub(inlined, text)


def fold_source(cell: dict, title: str) -> None:
    """Fold a cell's code, for JupyterLab and for Colab: there it is a form with a title."""
    cell["metadata"].setdefault("jupyter", {})["source_hidden"] = True
    source = "".join(cell["source"])
    if not source.startswith("%%"):  # a cell magic must stay first
        cell["metadata"]["cellView"] = "form"
        source = f"#@title {title}\n{source}"
    cell["source"] = source.splitlines(keepends=True)


def fold(cell: dict, tag: str) -> None:
    """Fold in a notebook what the page folds: the tags `hide-…` mean something to MyST-NB only."""
    tags = set(cell["metadata"].get("tags", []))
    if tags & {"hide-cell", "hide-input"}:
        fold_source(cell, folds.name(cell, tag))
    if tags & {"hide-cell", "hide-output"}:
        cell["metadata"].setdefault("jupyter", {})["outputs_hidden"] = True


def bootstrap_cell(url: str, chapter: str, tag: str) -> dict:
    """The first cell: it installs what is missing; where the chapter needs it, `helpers` too."""
    path = BOOTSTRAP_ALONE if chapter == START[3:] else BOOTSTRAP
    source = path.read_text(encoding="utf-8").replace("@REPOSITORY@", url)
    source = source.replace("@CHAPTER@", chapter).replace("@LANGUAGE@", tag)
    cell = {
        "cell_type": "code",
        "id": "bootstrap",
        "metadata": {"tags": ["bootstrap"]},
        "execution_count": None,
        "outputs": [],
        "source": source,
    }
    fold_source(cell, LANGUAGES[tag].setup)
    return cell


def single_language(
    notebook: dict, tag: str, repository: Repository | None, titles: dict[str, str], chapter: str
) -> dict:
    """The notebook in one language, without MyST syntax and build metadata."""
    notebook = filter_notebook(notebook, tag)
    for cell in notebook["cells"]:
        metadata = cell["metadata"]
        if cell["cell_type"] == "code":
            fold(cell, tag)
        for key in ("bilingual", "mystnb", "reason"):
            metadata.pop(key, None)
        if "tags" in metadata:
            metadata["tags"] = [word for word in metadata["tags"] if word not in TOOL_TAGS]
        if cell["cell_type"] == "markdown":
            text = with_figures(plain_markdown("".join(cell["source"]), titles))
            cell["source"] = text.splitlines(keepends=True)
    url = repository.url if repository else ""
    notebook["cells"].insert(0, bootstrap_cell(url, chapter, tag))
    return notebook


def names(app) -> dict[str, str]:
    """What a `{doc}` or a bare `{ref}` shows: titles by file name and by label."""
    titles = {label: entry[2] for label, entry in app.env.get_domain("std").labels.items()}
    for docname, title in app.env.titles.items():
        titles[docname.split("/")[-1]] = title.astext()
    return titles


def write_all(app, exception) -> None:
    """Hook: beside each chapter's page, its notebook in the page's language."""
    if exception is not None or app.builder.name != "html":
        return
    repository = current(Path(app.srcdir))
    titles = names(app)
    for docname in sorted(app.env.found_docs):
        source = Path(app.env.doc2path(docname))
        if source.suffix == ".ipynb":
            chapter = source.stem[3:]
            notebook = single_language(
                read_notebook(source), of(app).tag, repository, titles, chapter
            )
            target = Path(app.outdir) / f"{docname}.ipynb"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", "utf-8")


def add_links(app, pagename, templatename, context, doctree) -> None:
    """Hook: addresses for the buttons "download this chapter" and "open in Colab"."""
    context["notebook_href"] = context["colab_href"] = None
    if doctree is None or Path(app.env.doc2path(pagename)).suffix != ".ipynb":
        return
    context["notebook_href"] = pagename.split("/")[-1] + ".ipynb"
    repository = current(Path(app.srcdir))
    if repository and is_twin_build(app):
        context["colab_href"] = repository.colab(f"{of(app).tag}/{pagename}.ipynb")


def setup(app) -> None:
    app.connect("html-page-context", add_links, priority=600)
    app.connect("build-finished", write_all)
