"""The site: its parts one by one, then the built pages of both languages."""

import base64
import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urlparse

import nbformat
import numpy as np
import pytest
from bilingual import (
    assets,
    figures,
    folds,
    icons,
    images,
    language,
    links,
    notebooks,
    pages,
    repository,
    search,
    strings,
    structure,
    tracebacks,
    typography,
)
from bilingual.repository import Repository
from docutils import nodes
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("zh", "en")
GITHUB = Repository("https://github.com/reader/book", "main")


# -- language and figures -----------------------------------------------------------------------


def test_a_notebook_keeps_one_language_and_all_code(sample):
    for tag, other in (("zh", "en"), ("en", "zh")):
        cells = language.filter_notebook(sample, tag)["cells"]
        assert not [c for c in cells if other in c["metadata"].get("tags", [])]
        assert sum(c["cell_type"] == "code" for c in cells) == 7
        text = json.dumps([c.get("outputs") for c in cells], ensure_ascii=False)
        assert f"<!--{other}-->" not in text
        assert f'lang=\\"{other}\\"' not in text
        assert language.CLAIM not in text


def test_filtering_does_not_change_its_input(sample):
    before = copy.deepcopy(sample)
    language.filter_notebook(sample, "zh")
    assert sample == before


def test_segments_span_lines_and_leave_the_rest():
    html = "a<!--zh-->中\n文<!--/zh-->b<!--en-->E<!--/en-->c"
    assert language.segments(html, "zh") == "a中\n文bc"
    assert language.segments(html, "en") == "abEc"


def test_a_page_keeps_its_line_numbers():
    page = '共用\n\n+++ {"tags": ["zh"]}\n\n中文\n\n+++ {"tags": ["en"]}\n\nText\n\n+++\n\nlast\n'
    for tag in LANGUAGES:
        assert language.filter_page(page, tag).split("\n").index("last") + 1 >= 13
    assert "中文" not in language.filter_page(page, "en")
    assert "Text" not in language.filter_page(page, "zh")


def test_a_break_inside_a_code_fence_is_code():
    page = '```\n+++ {"tags": ["zh"]}\n```\n'
    assert len(language.blocks(page)) == 1


def test_captions_follow_the_language():
    assert language.pick("Part | 部分", "zh") == "部分"
    assert language.pick("Part | 部分", "en") == "Part"
    assert language.pick("PyTorch", "zh") == "PyTorch"


def test_a_slider_figure_gets_alt_text_and_caption(sample):
    cell = next(c for c in language.filter_notebook(sample, "zh")["cells"] if "outputs" in c)
    html = "".join(cell["outputs"][0]["data"]["text/html"])
    assert 'alt="幂函数的曲线，指数由滑块控制"' in html
    assert "<figcaption>拖动滑块：<code>n</code>" in html
    assert html.count("<figcaption>") == 1
    assert "figure" not in cell["metadata"].get("mystnb", {})


def test_a_caption_belongs_to_the_image_alone():
    words = {"en": {"caption": "Bars of `x`", "alt": "Two bars"}}
    claim, image = {"text/html": "<p>claim</p>"}, {"image/png": "AAAA\n", "text/plain": "<Figure>"}

    def localised(*bundles):
        outputs = [{"output_type": "display_data", "data": dict(data)} for data in bundles]
        cell = {"metadata": {"bilingual": words}, "outputs": outputs}
        figures.localise(cell, "en")
        return cell["metadata"].get("mystnb"), [output["data"] for output in outputs]

    assert localised(image)[0]["figure"]["caption"] == "Bars of `x`"
    assert localised(claim, claim) == (None, [claim, claim])
    metadata, (figure, unchanged) = localised(image, claim)
    assert metadata is None and unchanged == claim
    assert figure["text/html"] == (
        '<figure class="align-center"><img alt="Two bars" src="data:image/png;base64,AAAA">'
        "<figcaption>Bars of <code>x</code></figcaption></figure>"
    )


def test_a_plot_keeps_every_pixel():
    noise = np.random.default_rng(0).integers(0, 256, (40, 30, 4), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(noise).save(png, "PNG")
    packed = Image.open(io.BytesIO(images.webp(png.getvalue())))
    assert packed.format == "WEBP"
    assert (np.asarray(packed) == noise).all()

    address = base64.b64encode(png.getvalue()).decode()
    html = images.inline(f'<img src="data:image/png;base64,{address}">')
    kind, written = re.fullmatch('<img src="data:(.*);base64,(.*)">', html).groups()
    assert kind == "image/webp"
    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(written)))) == noise).all()


def test_a_picture_is_in_a_box_of_its_own():
    image = '<img alt="a &gt; b" src="x.svg" />'
    boxed = f'<span class="picture">{image}</span>'
    for before in ("<p>", '<figure class="explore">', '<figure class="align-default">\n'):
        assert images.framed(f"{before}{image}<i>") == f"{before}{boxed}<i>"
    assert images.framed(f"<p>In a line: {image}") == f"<p>In a line: {image}"


def test_frames_are_written_as_text():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text fill="#a00">50 % \\ </script></text></svg>'
    data = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    html = f'<figure class="explore"><img src="{data}"><script>F = ["{data}"]</script></figure>'
    cell = {"outputs": [{"data": {"text/html": html}}]}
    figures.lighten(cell)
    written = cell["outputs"][0]["data"]["text/html"]
    address = re.search('src="([^"]*)"', written)[1]
    assert written == html.replace(data, address)
    kind, text = address.split(",", 1)
    assert (kind, unquote(text)) == ("data:image/svg+xml", svg)
    assert not set(text) & set("<>#'\"\\&\n")


def test_closing_punctuation_stays_with_its_formula():
    words = nodes.paragraph()
    words += [nodes.Text("设 "), nodes.math(text="x"), nodes.Text("，再设 "), nodes.math(text="y")]
    words += [nodes.Text(" 很大"), nodes.math(text="z")]
    document = nodes.section()
    document += words
    typography.tie_punctuation(None, document)
    tied = [one.astext() for one in document.findall(nodes.inline)]
    assert tied == ["x，"]
    assert words.astext() == "设 x，再设 y 很大z"


def test_alt_text_is_escaped():
    assert figures.with_alt('<img src="a">', 'a "b" <c>') == (
        '<img alt="a &quot;b&quot; &lt;c&gt;" src="a">'
    )


def test_an_unreadable_notebook_is_named(tmp_path):
    path = tmp_path / "03_broken.ipynb"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="03_broken.ipynb: expected a notebook"):
        language.read_notebook(path)


# -- what is folded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "source", "data", "zh", "en"),
    [
        (["hide-cell", "solution"], "def f(): ...", None, "参考答案", "Solution"),
        (["hide-input", "evidence"], "x", {"text/html": "<p>"}, "怎么测的", "How it was measured"),
        (["hide-input"], "x", {"image/png": "A"}, "画这张图的代码", "The code of this figure"),
        (
            ["hide-input"],
            "x",
            {"text/html": '<figure class="explore">'},
            "画这张图的代码",
            "The code of this figure",
        ),
        (
            ["hide-input"],
            "def f(): ...",
            {"text/plain": "1"},
            "得出下面输出的代码",
            "The code of the output below",
        ),
        (["hide-cell"], "x", {"text/plain": "1"}, "代码和输出", "Code and output"),
        (["hide-output"], "x", {"text/plain": "1"}, "输出", "Output"),
        (
            ["hide-input"],
            "!ls\n@jit\ndef f():\n    def g(): ...\nclass C: ...",
            None,
            "代码：定义 f、C",
            "Code: defines f, C",
        ),
        (
            ["hide-cell"],
            "\n".join(f"def {name}(): ..." for name in "fghk"),
            None,
            "代码：定义 f、g、h、…",
            "Code: defines f, g, h, …",
        ),
        (["hide-input"], "%%writefile a.py\ndef f(): ...", None, "代码", "Code"),
        (["exercise"], "def f(): ...", None, None, None),
    ],
)
def test_a_folded_cell_says_what_is_inside(sample, tags, source, data, zh, en):
    cell = next(cell for cell in sample["cells"] if cell["cell_type"] == "code")
    outputs = [{"output_type": "display_data", "data": data}] if data else []
    cell.update(metadata={"tags": tags}, source=[source], outputs=outputs)
    for tag, name in (("zh", zh), ("en", en)):
        assert folds.name(cell, tag) == name
        shown = language.filter_notebook({**sample, "cells": [cell]}, tag)["cells"][0]
        assert shown["metadata"].get("mystnb", {}).get("code_prompt_show") == name


def traceback(*lines: str) -> str:
    """As Pygments writes it, every line an element of its own."""
    text = "\n".join(f'<span class="n">{escape(line)}</span>' if line else "" for line in lines)
    return (
        '<div class="output traceback highlight-ipythontb notranslate"><div class="highlight">'
        f"<pre><span></span>{text}\n</pre></div>\n</div>"
    )


def cut(*lines: str) -> list[tuple[str, list[str]]]:
    """The pieces of a folded traceback: its kind and its lines."""
    body = tracebacks.fold(traceback(*lines), "en")
    found = re.findall(r"(<summary>[^<]*</summary><[^>]*>)?<pre(.*?)>(.*?)</pre>", body, re.S)
    kinds = ["rest" if fold else attributes.strip() for fold, attributes, _ in found]
    texts = [unescape(re.sub("<[^>]*>", "", text)) for _, _, text in found]
    return [(kind, text.splitlines()) for kind, text in zip(kinds, texts, strict=True)]


HEAD = ["-" * 75, "ValueError        Traceback (most recent call last)"]
OWN = ["Cell In[3], line 2", "      1 x = 1", "----> 2 f(x)", ""]
LIBRARY = ["File torch/a.py:7, in f(x)", *(f"      {n} y < {n}" for n in range(5)), ""]
MESSAGE = ["ValueError: not this", "", "ValueError: and more"]


def test_of_a_long_traceback_the_cell_and_the_message_are_in_sight():
    head = ("", [*HEAD, *OWN[:-1]])
    message = ('class="message"', MESSAGE)
    assert cut(*HEAD, *OWN, *LIBRARY, *OWN, *LIBRARY, *MESSAGE) == [
        head,
        ("rest", [*LIBRARY, *OWN, *LIBRARY[:-1]]),
        message,
    ]
    assert "The other 17 lines" in tracebacks.fold(
        traceback(*HEAD, *OWN, *LIBRARY, *OWN, *LIBRARY, *MESSAGE), "en"
    )
    assert "其余 6 行" in tracebacks.fold(traceback(*HEAD, *OWN, *LIBRARY, *MESSAGE), "zh")
    assert cut(*HEAD, *OWN, *MESSAGE) == [head, message]  # nothing to fold
    # a function of the notebook that calls itself
    many = cut(*HEAD, *(OWN * 9), *MESSAGE)
    assert [kind for kind, _ in many] == ["", "rest", message[0]]
    assert len(many[0][1]) <= tracebacks.IN_SIGHT
    # another error on the way
    way = "During handling of the above exception, another exception occurred:"
    chain = [*HEAD, *LIBRARY, "KeyError: 1", "", way, "", *HEAD, *LIBRARY, *MESSAGE]
    assert [kind for kind, _ in cut(*chain)] == ["", "rest", message[0]]
    assert cut(*chain)[0][1] == HEAD and cut(*chain)[2] == message


def test_what_is_no_traceback_stays_as_it_is():
    for lines in (["  Cell In[1], line 1", "SyntaxError: invalid syntax"], [*HEAD, *OWN]):
        body = traceback(*lines)
        assert tracebacks.fold(body, "zh") == body


# -- search -------------------------------------------------------------------------------------

PAGE = """<nav><p>not this</p></nav><article class="bd-article"><section id="ch-x">
<h1>Tensors<a class="headerlink" href="#ch-x">#</a></h1><p>A <strong>tensor</strong>:<br>data.</p>
<section id="x-views"><h2>Views of <code>x</code></h2><p>No copy.</p>
<div class="cell"><div class="cell_input"><pre><span class="n">copy</span> <span>=</span>
<span>torch</span><span>.</span><span>full</span>(2); <span class="n">copy</span>.view(copy)
<span class="c1"># a comment</span></pre></div>
<div class="cell_output"><div><pre>12345</pre></div></div></div>
<script>let hidden;</script></section><p>After.</p></section></article><footer>nor this</footer>"""


def test_the_search_knows_sections():
    assert search.Article(PAGE).sections == [
        ["ch-x", "Tensors", "A tensor: data. After."],
        ["x-views", "Views of x", "No copy. torch.full copy.view"],
    ]
    path, title, sections = search.page("a.html", PAGE, {"x-views": ["视图", "view"]})
    assert (path, title) == ("a.html", "Tensors")
    assert [section[3] for section in sections] == [[], ["视图", "view"]]
    assert search.page("b.html", "<article></article>", {}) is None


def test_the_search_knows_what_a_section_explains(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "notebooks").mkdir()
    toc = "parts: [{chapters: [{file: notebooks/02_tensors}]}]"
    (tmp_path / "_toc.yml").write_text(toc, encoding="utf-8")
    glossary = "[{en: view (of a tensor), zh: 视图}]"
    (tmp_path / "book" / "glossary.yml").write_text(glossary, encoding="utf-8")
    texts = {
        "zh": "(tensors-a)=\n## 视图\n\n**视图**",
        "en": "(tensors-a)=\n## Views\n\nA **view**",
    }
    cells = [
        {"cell_type": "markdown", "metadata": {"tags": [tag]}, "source": text}
        for tag, text in texts.items()
    ]
    path = tmp_path / "notebooks" / "02_tensors.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert search.explained(tmp_path) == {"tensors-a": ["视图", "view"]}


def linked(html: str, kind: str = "html") -> str:
    """What `links.resolve` makes of an output on the page notebooks/b."""
    labels = {"a-views": ("notebooks/a", "a-views")}
    domain = SimpleNamespace(anonlabels=labels)
    app = SimpleNamespace(
        env=SimpleNamespace(get_domain=lambda name: domain),
        builder=SimpleNamespace(
            get_relative_uri=lambda here, there: f"{here[-1]}→{there[-1]}.html"
        ),
    )
    document = nodes.section("", nodes.raw(html, html, format=kind))
    links.resolve(app, document, "notebooks/b")
    return document.astext()


def test_an_output_links_to_a_section():
    html = '<p><a data-label="a-views">Views</a> · <a href="x">x</a></p>'
    expected = html.replace(
        'data-label="a-views"', 'class="reference internal" href="b→a.html#a-views"'
    )
    assert linked(html) == expected
    assert linked(html, "latex") == html


def test_a_link_to_a_section_that_is_not_there_is_a_warning(monkeypatch):
    said = []
    monkeypatch.setattr(
        links.LOGGER, "warning", lambda text, *words, **_: said.append(text % words)
    )
    html = '<a data-label="a-vews">Views</a>'
    assert linked(html) == html
    assert said == ["an output links to an unknown label: a-vews"]


def test_every_section_can_be_found(site):
    """What the browser gets is data, as large as text is, and there is no other index."""
    for tag in LANGUAGES:
        script = (site / tag / "search-sections.js").read_text(encoding="utf-8")
        assert script.startswith(f"const bookLanguage = '{tag}', bookPages = [[")
        known = {f"{one[0]}#{section[0]}" for one in found_pages(script) for section in one[2]}
        built = {
            f"{path.relative_to(site / tag).as_posix()}#{anchor}"
            for folder in ("book", "notebooks")
            for path in (site / tag / folder).glob("*.html")
            for anchor in re.findall(r'<section [^>]*\bid="([^"]+)"', path.read_text("utf-8"))
        }
        assert known == built
        assert not (site / tag / "searchindex.js").exists()


def found_pages(script: str) -> list:
    return json.loads(script.split("bookPages = ", 1)[1].rstrip(";\n"))


# -- words of the interface ---------------------------------------------------------------------


def test_catalogs_are_compiled_outside_the_sources(tmp_path):
    assert strings.compile_catalogs(tmp_path) == ["booktheme", "sphinx"]
    assert (tmp_path / "zh_CN" / "LC_MESSAGES" / "sphinx.mo").stat().st_size > 500
    assert not list((ROOT / "book").rglob("*.mo"))


def test_every_word_of_our_templates_is_translated():
    po = (ROOT / "book/site/bilingual/locale/zh_CN/LC_MESSAGES/sphinx.po").read_text("utf-8")
    known = set(re.findall(r'^msgid "(.+)"', po, re.M))
    used = set()
    for path in (ROOT / "book" / "site" / "templates").glob("*.html"):
        used |= set(re.findall(r"""_\(["'](.+?)["']\)""", path.read_text("utf-8")))
    source = (ROOT / "book" / "site" / "bilingual" / "pages.py").read_text("utf-8")
    used |= set(re.findall(r"""\b_\(["'](.+?)["']\)""", source))
    assert used - known == set()


# -- repository ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://github.com/reader/book.git", "https://github.com/reader/book"),
        ("https://user:secret@github.com/reader/book", "https://github.com/reader/book"),
        ("git@github.com:reader/book.git", "https://github.com/reader/book"),
        ("ssh://git@example.org:2222/reader/book.git", "https://example.org/reader/book"),
        ("/srv/git/book.git", None),
        ("file:///srv/git/book.git", None),
        ("", None),
    ],
)
def test_remotes_become_web_addresses(remote, url):
    assert repository.web_address(remote) == url


def test_ci_knows_the_repository(tmp_path):
    env = {
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "fork/book",
        "GITHUB_REF_NAME": "work",
    }
    found = repository.find(tmp_path, env)
    assert found == Repository("https://github.com/fork/book", "work")
    assert found.colab("zh/notebooks/02_tensors.ipynb") == (
        "https://colab.research.google.com/github/fork/book/blob/gh-pages/"
        "zh/notebooks/02_tensors.ipynb"
    )
    assert found.edit("book/index.md") == "https://github.com/fork/book/edit/work/book/index.md"


def test_git_knows_the_repository(tmp_path):
    subprocess.run(["git", "init", "-q", "-b", "main", tmp_path], check=True)
    assert repository.find(tmp_path, {}) is None
    remote = ["git", "-C", tmp_path, "remote", "add", "origin", "git@github.com:reader/book.git"]
    subprocess.run(remote, check=True)
    assert repository.find(tmp_path, {}) == GITHUB


def test_other_hosts_get_no_github_links():
    other = Repository("https://example.org/reader/book", "main")
    assert (other.github, other.colab("x"), other.edit("x"), other.issue("x")) == (None,) * 4


# -- notebooks of one language ------------------------------------------------------------------


def test_myst_syntax_becomes_plain_markdown():
    text = (
        "(sec-view)=\n## 视图\n\n见 {ref}`下一节 <sec-next>`、{ref}`sec-x`、"
        "{doc}`../notebooks/02_tensors` 与 {cite:p}`he2015delving,lecun1998gradient`。"
    )
    plain = notebooks.plain_markdown(text, {"02_tensors": "张量", "sec-x": "另一节"})
    assert plain == ("## 视图\n\n见 下一节、另一节、张量 与 [he2015delving, lecun1998gradient]。")


@pytest.mark.parametrize("tag", ["zh", "en"])
def test_a_notebook_brings_its_diagrams_along(tag):
    chapter = language.read_notebook(ROOT / "notebooks" / "01_environment.ipynb")
    notebook = notebooks.single_language(chapter, tag, None, {}, "environment")
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    (data,) = re.findall(r"!\[[^]]+\]\(data:image/svg\+xml;base64,([^)]+)\)", text)
    assert (
        base64.b64decode(data)
        == (ROOT / "book/figures" / tag / "environment-chain.svg").read_bytes()
    )
    assert "book/figures" not in text


def test_a_single_language_notebook_is_clean(sample):
    notebook = notebooks.single_language(sample, "en", GITHUB, {}, "sample")
    text = json.dumps(notebook, ensure_ascii=False)
    assert notebook["cells"][0]["id"] == "bootstrap"
    assert GITHUB.url in text
    assert "{ref}" not in text and ")=\\n" not in text
    assert "bilingual" not in text and '"mystnb"' not in text
    assert "转置" not in "".join("".join(o["data"].get("text/html", "")) for o in outputs(notebook))


def exported(sample: dict, tags: list[str], source: str, tag: str) -> dict:
    """A code cell with these tags as it is in the notebook of one language."""
    cell = next(cell for cell in sample["cells"] if cell["cell_type"] == "code")
    cell["metadata"], cell["source"], cell["id"] = {"tags": tags}, [source], "looked-at"
    notebook = notebooks.single_language(sample, tag, None, {}, "sample")
    return next(cell for cell in notebook["cells"] if cell["id"] == "looked-at")


@pytest.mark.parametrize(
    ("tags", "hidden", "title"),
    [
        (["hide-cell", "solution"], {"source_hidden": True, "outputs_hidden": True}, "参考答案"),
        (["hide-input", "evidence"], {"source_hidden": True}, "怎么测的"),
        (["hide-input"], {"source_hidden": True}, "画这张图的代码"),
    ],
)
def test_what_the_page_folds_the_notebook_folds(sample, tags, hidden, title):
    cell = exported(sample, tags, "x = 1\ny = 2", "zh")
    assert cell["metadata"]["jupyter"] == hidden
    assert cell["metadata"]["cellView"] == "form"
    assert cell["source"] == [f"#@title {title}\n", "x = 1\n", "y = 2"]


def test_what_the_page_shows_the_notebook_shows(sample):
    assert exported(sample, ["exercise"], "x = 1", "en")["metadata"] == {"tags": ["exercise"]}


def test_a_cell_magic_stays_first(sample):
    cell = exported(sample, ["hide-cell", "solution"], "%%writefile job.py\nx = 1", "en")
    assert cell["source"][0] == "%%writefile job.py\n"
    assert cell["metadata"]["jupyter"]["source_hidden"]


@pytest.mark.parametrize(
    ("tag", "word", "other"), [("zh", "还没有人", "nobody"), ("en", "nobody", "还没有人")]
)
def test_one_language_stays_one_language_when_run(sample, tmp_path, monkeypatch, tag, word, other):
    """A kernel runs the exported notebook: its claim is shown in the notebook's language alone."""
    claim = "from helpers.page import ledger\nledger.result('M02', 'not-recorded')"
    sample["cells"] = [cell for cell in sample["cells"] if cell["cell_type"] == "code"][:1]
    exported(sample, [], claim, tag)
    notebook = notebooks.single_language(sample, tag, None, {}, "sample")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    node = nbformat.reads(json.dumps(notebook), as_version=4)
    NotebookClient(node, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (shown,) = outputs(node)
    assert f'lang="{tag}"' in shown["data"]["text/html"]
    for text in (shown["data"]["text/html"], shown["data"]["text/plain"]):
        assert other not in text
    assert word in shown["data"]["text/html"]


def outputs(notebook: dict) -> list[dict]:
    found = [o for c in notebook["cells"] for o in c.get("outputs", [])]
    return [o for o in found if "data" in o]


def run_bootstrap(folder: Path, **env: str) -> subprocess.CompletedProcess:
    """The first cell of a downloaded notebook, then an import, where `helpers` is not installed."""
    cell = "".join(notebooks.bootstrap_cell("", "sample", "en")["source"])
    # -S and -I keep the editable install out; torch and the rest come from site-packages
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    hide = (
        f"import sys; sys.path.append({packages!r})\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
    )
    script = hide + cell + "\nimport helpers; print(helpers.__file__)\n"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTORCH_BOOK_REPO")}
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        cwd=folder,
        env={**clean, **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def remote(tmp_path_factory) -> str:
    """The working tree as a git repository that can be cloned by a file:// address."""
    folder = tmp_path_factory.mktemp("remote") / "book"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "helpers", folder / "helpers", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "book"], check=True)
    return folder.as_uri()


def test_the_bootstrap_clones_into_an_empty_folder(tmp_path, remote):
    for _ in range(2):  # the second run finds the clone
        done = run_bootstrap(tmp_path, PYTORCH_BOOK_REPO=remote)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().startswith(str(tmp_path / "pytorch-book"))


def test_the_bootstrap_says_what_to_set(tmp_path):
    done = run_bootstrap(tmp_path)
    assert done.returncode != 0
    assert "PYTORCH_BOOK_REPO" in done.stderr


def test_the_bootstrap_does_nothing_where_helpers_are(tmp_path):
    (tmp_path / "helpers.py").write_text("", encoding="utf-8")
    cell = "".join(notebooks.bootstrap_cell("", "sample", "en")["source"])
    done = subprocess.run([sys.executable, "-c", cell], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["helpers.py"]


def wheel(folder: Path) -> None:
    """The smallest package that pip installs."""
    info = "missing_one-1.0.dist-info"
    with zipfile.ZipFile(folder / "missing_one-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("missing_one.py", "")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: missing-one\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_the_bootstrap_installs_only_what_is_missing(tmp_path):
    wheel(tmp_path)
    clone = tmp_path / "pytorch-book"
    (clone / "helpers").mkdir(parents=True)
    (clone / "helpers" / "__init__.py").touch()
    project = """[project]
dependencies = ["torch>=2.11"]
optional-dependencies = {sample = ["missing-one>=1"], another = ["missing-two>=1"]}
"""
    (clone / "pyproject.toml").write_text(project, encoding="utf-8")
    target = tmp_path / "installed"
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": str(target)}
    done = run_bootstrap(tmp_path, PYTORCH_BOOK_REPO="unused", **pip)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in target.glob("*.py")) == ["missing_one.py"]
    assert not (target / "torch").exists()


def test_the_first_chapter_clones_nothing(tmp_path):
    """Its first cell knows no repository; it installs the packages that are missing, no others."""
    cell = "".join(notebooks.bootstrap_cell("https://example.org/x", "start", "en")["source"])
    assert "git" not in cell and "example.org" not in cell and "@" not in cell.split("\n", 1)[1]
    wheel(tmp_path)
    target = tmp_path / "installed"
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": str(target)}
    for name, written in (("torch", []), ("missing_one", ["missing_one.py"])):
        script = cell.replace('"mlxtend"', f'"{name}"')
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **pip}, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert sorted(p.name for p in target.glob("*.py")) == written


def test_the_first_chapter_installs_what_it_imports():
    installed = notebooks.BOOTSTRAP_ALONE.read_text(encoding="utf-8")
    ours = set(re.findall(r'"(\w+)"', re.search(r"^packages = .*$", installed, re.M)[0]))
    for path in (ROOT / "notebooks").glob(f"{structure.START}.ipynb"):
        cells = structure.code_cells(language.read_notebook(path))
        text = "\n".join(structure.source(cell) for cell in cells)
        used = set(re.findall(r"^[ \t]*(?:from|import)[ \t]+(\w+)", text, re.M))
        assert used - set(sys.stdlib_module_names) <= ours | {"numpy"}  # comes with matplotlib


# -- the table of hooks -------------------------------------------------------------------------


def test_the_table_of_hooks_is_complete():
    """README.md lists every `app.connect` of the extension, with its priority."""
    site = ROOT / "book" / "site"
    table = (site / "README.md").read_text(encoding="utf-8")
    connect = re.compile(r'app\.connect\("([\w-]+)", (\w+)(?:, priority=(\d+))?\)')
    hooks = [
        f"| {event} | {priority or 500} | `{path.stem}.{function}` |"
        for path in sorted((site / "bilingual").glob("*.py"))
        for event, function, priority in connect.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(hooks) >= 13
    assert [hook for hook in hooks if hook not in table] == []
    assert len(re.findall(r"^\| [a-z]+-[a-z-]+ \|", table, re.M)) == len(hooks)


# -- pages from data ----------------------------------------------------------------------------

CLAIM = {
    "chapter": "00_sample",
    "claim": {"en": "x copies", "zh": "x 复制"},
    "result": {"en": "{shared} of {total} share", "zh": "{total} 个中 {shared} 个"},
}


def test_claims_are_grouped_by_chapter_with_verdicts(sample):
    claims = {"M02": CLAIM, "M99": CLAIM, "M50": {**CLAIM, "chapter": "50_other"}}
    sections = pages.claims_parts(claims, {"00_sample": sample}, "en")
    first, second = ("\n".join(section.body) for section in sections)
    assert sections[0].title == "Sample: views and broadcasting"
    assert "<../notebooks/00_sample>" in first
    assert "3 of 5 share" in first and "verdict--holds" in first
    assert "no result yet" in first  # M99 has a chapter, but no result
    assert "no result yet" in second and sections[1].title == "50_other"
    with_start = {"00_sample": sample, "00_start": sample}  # a chapter that records no claim
    assert pages.claims_parts(claims, with_start, "en") == sections
    assert "5 个中 3 个" in "\n".join(
        pages.claims_parts(claims, {"00_sample": sample}, "zh")[0].body
    )


RECORD = {
    "provenance": {"device": "CPU", "torch": "2.15.0", "dirty": False},
    "units": {"size": "count", "time": "ms"},
    "rows": [{"size": 256, "time": [1, 2.5, 4]}, {"size": 512, "time": None}],
}


def test_records_show_units_spread_and_provenance():
    (section,) = pages.records_parts({"matmul.cpu": RECORD}, ["02_matmul"])
    text = "\n".join(section.body)
    assert section.anchor == "record-matmul-cpu"
    assert "* - size\n" in text and "time (ms)" in text and "2.5 (1–4)" in text and "–" in text
    assert "<../notebooks/02_matmul>" in text
    (alone,) = pages.records_parts({"matmul.cpu": RECORD}, ["02_other"])
    assert "notebooks" not in "\n".join(alone.body)
    assert "* Device: `CPU`" in text and "* Uncommitted changes: no" in text


def test_a_record_without_provenance_is_refused():
    with pytest.raises(ValueError, match="record bad: expected provenance"):
        pages.records_parts({"bad": {"units": {}, "rows": []}}, [])


def test_the_glossary_is_grouped():
    terms = [
        {"en": "stride", "zh": "步长", "never": ["步幅"], "group": "Tensors | 张量"},
        {"en": "warp", "zh": "warp", "keep": True, "group": "Speed | 性能"},
    ]
    first, second = pages.terms_parts(terms, "zh")
    assert (first.title, first.anchor) == ("张量", "terms-tensors")
    assert "  - 步幅" in first.body
    assert "stays English" in "\n".join(second.body)


def test_a_chinese_word_on_an_english_page_says_so():
    row = "<tr><td><p>tensor</p></td><td><p>张量</p></td><td><p><a>张</a></p></td></tr>"
    assert strings.name_chinese(row) == row.replace("<td><p>张量", '<td lang="zh-Hans"><p>张量')


def test_an_empty_cell_is_no_heading():
    empty, full = '<th class="head"><p></p></th>', '<th class="head"><p>x</p></th>'
    table = (
        "<table><thead>\n<tr>{}</tr>\n</thead>\n<tbody><tr><td><p></p></td></tr></tbody></table>"
    )
    mend = strings.without_empty_headings
    assert mend(table.format(full + full)) == table.format(full + full)
    assert mend(table.format(empty + full)) == table.format("<td></td>" + full)
    assert mend(table.format(empty + empty)).startswith("<table><tbody>")


def test_chapters_are_numbered_in_the_sidebar(site):
    for tag in LANGUAGES:
        text = (site / tag / "book" / "index.html").read_text(encoding="utf-8")
        for path in (ROOT / "notebooks").glob("*.ipynb"):
            link = rf'href="\.\./notebooks/{path.stem}\.html">\s*{int(path.stem[:2])} · \S'
            assert re.search(link, text), path


def test_pages_load_only_what_they_need():
    assert not assets.is_needed("sphinx-thebe.css", "")
    assert not assets.is_needed("togglebutton.js", '<div class="toggle">')
    assert assets.is_needed("copybutton.js", '<div class="highlight">')
    assert not assets.is_needed("copybutton.js", "<p>")
    assert assets.is_needed("scripts/sphinx-book-theme.js", "<p>")
    for name in ("mathjax/startup.js", SimpleNamespace(attributes={"body": "window.MathJax = {}"})):
        assert not assets.is_needed(name, "<p>")
        assert assets.is_needed(name, '<p><span class="math notranslate">')


def test_the_icon_font_leaves_the_style_sheet_and_nothing_else_does():
    kept = '.fa-lg{font-size:1.2em}.btn:before{content:"x"}@font-face{src:url(text.woff2)}'
    font = "@font-face{font-family:FA;src:url(../vendor/fontawesome/webfonts/fa.woff2)}"
    rules = '.fa-0:before{content:"\\30"}.fa-cog:before,.fa-gear:before{content:"\\f013"}'
    assert assets.without_icons(rules + kept[:24] + font + kept[24:]) == kept


# -- icons --------------------------------------------------------------------------------------


def test_icons_are_drawn_in_their_places():
    theme = (
        '<b><i class="theme-switch fa-solid fa-sun        fa-lg" data-mode="light" '
        'title="浅色"></i></b><span class="fa-solid fa-bars" aria-hidden="true"></span>'
    )
    html = icons.inline(theme)
    assert html.startswith('<b><svg class="icon theme-switch" data-mode="light"')
    assert "<title>浅色</title>" in html and html.count("</svg>") == 2
    assert "fa-" not in html


def test_an_unknown_icon_is_named():
    with pytest.raises(ValueError, match="icon 'rocket': expected one of .*; draw it in icons.py"):
        icons.inline('<i class="fa-solid fa-rocket"></i>')


# -- the built site -----------------------------------------------------------------------------


class Page(HTMLParser):
    """Ids, links and loaded files of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.ids, self.links, self.loads, self.alternates = path, set(), [], [], {}
        self.lang = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        if tag == "html":
            self.lang = attrs.get("lang")
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag == "link" and attrs.get("rel") == "alternate":
            self.alternates[attrs["hreflang"]] = attrs["href"]
            self.links.append(attrs["href"])
        elif tag == "link" and attrs.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(attrs["href"])
        if tag in ("script", "img", "iframe", "source") and attrs.get("src"):
            self.loads.append(attrs["src"])


@pytest.fixture(scope="module")
def built(site) -> dict[Path, Page]:
    return {
        path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts
    }


def resolve(page: Page, address: str) -> tuple[Path, str] | None:
    """The file and fragment that an internal address means; None for other hosts."""
    if urlparse(address).scheme or address.startswith("//"):
        return None
    path, fragment = urldefrag(address)
    path = unquote(path.split("?")[0])
    target = (page.path.parent / path).resolve() if path else page.path.resolve()
    return target / "index.html" if target.is_dir() else target, unquote(fragment)


def dead_links(built: dict[Path, Page]) -> list[str]:
    found, known = [], {path.resolve(): page for path, page in built.items()}
    for page in built.values():
        for address in page.links + page.loads:
            target = resolve(page, address)
            if target is None or page.path.name == "404.html":
                continue
            path, fragment = target
            if not path.exists():
                found.append(f"{page.path}: {address}: no such file")
            elif fragment and path in known and fragment not in known[path].ids:
                found.append(f"{page.path}: {address}: no such place in the page")
    return found


def test_every_internal_link_leads_somewhere(built):
    assert len(built) > 15
    found = dead_links(built)
    assert not found, "\n".join(found)


def test_the_link_checker_can_fail(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(
        '<a href="b.html">x</a><a href="#nowhere">y</a><p id="here"><a href="#here">',
        encoding="utf-8",
    )
    assert len(dead_links({path: Page(path)})) == 2


def test_no_page_loads_from_another_host(built, site):
    found = [
        f"{page.path}: {address}"
        for page in built.values()
        for address in page.loads
        if urlparse(address).scheme not in ("", "data") or address.startswith("//")
    ]
    for css in site.glob("*/_static/**/*.css"):
        text = css.read_text(encoding="utf-8", errors="replace")
        found += [
            f"{css}: {url}"
            for url in re.findall(r"(?:url\(|@import)\s*[\"']?(https?:[^)\"']+)", text)
        ]
    assert not found, "\n".join(found)


def test_each_page_says_its_language_and_names_its_twin(built, site):
    for tag, lang in (("zh", "zh-CN"), ("en", "en")):
        for path, page in built.items():
            if path.is_relative_to(site / tag) and page.ids and path.name != "index.html":
                assert page.lang == lang, path
                assert page.alternates.keys() == {"zh-Hans", "en"}, path
                for hreflang, other in (("zh-Hans", "zh"), ("en", "en")):
                    target, _ = resolve(page, page.alternates[hreflang])
                    assert target == (site / other / path.relative_to(site / tag)).resolve()


def test_sections_have_the_same_addresses_in_both_languages(built, site):
    pattern = re.compile(r'<section (?:class="[^"]*" )?id="([^"]+)"')
    for path in built:
        if path.is_relative_to(site / "zh") and path.name not in ("search.html", "genindex.html"):
            twin = site / "en" / path.relative_to(site / "zh")
            zh, en = (pattern.findall(p.read_text(encoding="utf-8")) for p in (path, twin))
            assert zh == en, path


def test_formulas_alone_bring_mathjax(built):
    """The browser's tests weigh what each page loads."""
    with_formulas = 0
    for path, page in built.items():
        formulas = 'class="math' in path.read_text(encoding="utf-8")
        assert any("mathjax" in name for name in page.loads) == formulas, path
        with_formulas += formulas
    assert 0 < with_formulas < len(built)


def test_no_page_needs_font_awesome(built, site):
    for path in built:
        assert not re.search(r"\bfa-(solid|regular|brands)\b", path.read_text("utf-8")), path
    assert not list(site.rglob("*fontawesome*"))
    for css in site.glob("*/_static/styles/*.css"):
        assert "@font-face" not in css.read_text(encoding="utf-8"), css


def test_nothing_superfluous_is_published(site):
    assert not (site / "jupyter_execute").exists()
    assert not list(site.glob("*/_sources"))
    assert not list(site.rglob("*.mo"))
    assert not list(site.rglob("*.map"))
    assert not list(site.glob("*/_images/*.png"))
    assert len(list(site.glob("*/_images/*.webp"))) >= 20
    text = (site / "zh" / "notebooks" / "02_tensors.html").read_text("utf-8")
    assert "unpkg" not in text and "THEBE_JS_URL" not in text


def test_chinese_pages_have_no_english_interface(site):
    text = (site / "zh" / "notebooks" / "02_tensors.html").read_text("utf-8")
    for english in (
        "Toggle ",
        'aria-label="Main"',
        'aria-label="Page"',
        "Link to this",
        "Color mode",
        "Search this book",
    ):
        assert english not in text, english


def test_references_are_items_of_their_list(site):
    for tag in LANGUAGES:
        text = (site / tag / "book" / "references.html").read_text(encoding="utf-8")
        assert 'role="listitem"' in text and "doc-biblioentry" not in text


def test_no_machine_path_is_published(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.ipynb"), *site.rglob("search-sections.js")]:
        assert str(ROOT) not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("tag", LANGUAGES)
def test_each_chapter_is_there_as_a_notebook_in_one_language(site, tag):
    chapters = sorted((ROOT / "notebooks").glob("*.ipynb"))
    written = sorted((site / tag / "notebooks").glob("*.ipynb"))
    assert [p.name for p in written] == [p.name for p in chapters]
    for path in written:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        prose = "".join(
            "".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"
        )
        chinese = len(re.findall("[\u3400-\u9fff]", prose))
        assert chinese > 5 if tag == "zh" else chinese < 0.01 * len(prose)
        assert not re.search(r"\{(ref|doc|cite)|^\([\w-]+\)=$", prose, re.M)
        html = (path.parent / f"{path.stem}.html").read_text(encoding="utf-8")
        assert f'href="{path.name}"' in html


def test_the_front_page_offers_both_languages(site):
    for name in ("index.html", "404.html"):
        text = (site / name).read_text(encoding="utf-8")
        assert 'href="zh/book/index.html"' in text and 'href="en/book/index.html"' in text
