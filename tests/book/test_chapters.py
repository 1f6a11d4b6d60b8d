"""Every chapter has the shape the book promises, and each rule of it can fail."""

import copy
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from bilingual import structure
from bilingual.language import read_notebook

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(path):
    notebook = read_notebook(path)
    print(*structure.ignored_outputs(notebook), sep="\n")
    found = structure.problems(notebook, path.stem, path.stat().st_size)
    assert not found, "\n" + "\n".join(found)


def code(number: int, *tags: str, text: str = "x = 1", **metadata) -> dict:
    return {
        "cell_type": "code",
        "id": f"c{number}",
        "metadata": {"tags": list(tags), **metadata},
        "execution_count": number,
        "outputs": [],
        "source": text,
    }


def words(tag: str, text: str) -> dict:
    return {"cell_type": "markdown", "id": tag, "metadata": {"tags": [tag]}, "source": text}


BOTH = {tag: {"caption": "c", "alt": "a"} for tag in ("zh", "en")}


@pytest.fixture
def chapter() -> dict:
    """The smallest chapter that follows every rule."""
    cells = [
        words("zh", "(ch-02-tensors)=\n# 张量\n\n(tensors-a)=\n## 练习\n\n(tensors-b)=\n## 要点"),
        words("en", "(ch-02-tensors)=\n# T\n\n(tensors-a)=\n## E\n\n(tensors-b)=\n## T"),
    ]
    for number in range(1, 7):
        cells += [words("zh", "文字"), words("en", "Text"), code(number)]
    figure = code(7, bilingual=BOTH)
    html = '<figure class="explore"><img alt=""></figure>'
    figure["outputs"] = [{"output_type": "display_data", "data": {"text/html": html}}]
    cells += [words("zh", "文字"), words("en", "Text"), figure]
    for number in (8, 10, 12):
        cells += [words("zh", "文字"), words("en", "Text"), code(number, "exercise")]
        cells += [code(number + 1, "hide-cell", "solution")]
    evidence = 'ledger.result("M01", "holds" if x == 1 else "false")'
    cells += [code(14, "evidence", "hide-input", text=evidence)]
    return {"cells": cells, "metadata": {}}


@pytest.fixture
def start() -> dict:
    """The smallest first chapter: no slider, nothing checked, none of the book's own code."""
    cells = [
        words("zh", "(ch-00-start)=\n# 从零\n\n(start-try)=\n## 试一试\n\n(start-b)=\n## 要点"),
        words("en", "(ch-00-start)=\n# S\n\n(start-try)=\n## Try\n\n(start-b)=\n## T"),
        code(1, text="import torch"),
    ]
    for number in (2, 3, 4):
        cells += [words("zh", "文字"), words("en", "Text"), code(number, "hide-cell", "solution")]
    return {"cells": cells, "metadata": {}}


def test_a_good_chapter_passes(chapter, start):
    assert structure.problems(chapter, "02_tensors", 1000) == []
    assert structure.problems(start, structure.START, 1000) == []


def cell(chapter: dict, name: str) -> dict:
    return next(c for c in chapter["cells"] if c["id"] == name)


def untag(chapter: dict, *names: str) -> None:
    for name in names:
        cell(chapter, name)["metadata"]["tags"] = []


def output(chapter: dict, **data: str) -> None:
    cell(chapter, "c1")["outputs"] = [
        {"output_type": "display_data", "data": {k.replace("_", "/"): v for k, v in data.items()}}
    ]


# What is broken, and the rule that must notice it.
BREAKS = {
    "a claim in a lesson's cell": (
        "evidence_apart",
        lambda c: cell(c, "c1").update(source='ledger.result("M01", verdict)'),
    ),
    "a typed verdict": (
        "computed_verdicts",
        lambda c: cell(c, "c14").update(source='ledger.result(\n    "M01",\n    "holds-if",\n)'),
    ),
    "evidence in the open": (
        "evidence_apart",
        lambda c: cell(c, "c14")["metadata"].update(tags=["evidence"]),
    ),
    "evidence without a claim": (
        "evidence_apart",
        lambda c: cell(c, "c14").update(source="x = 1"),
    ),
    "ignored without reason": (
        "few_ignored",
        lambda c: cell(c, "c1")["metadata"]["tags"].append("nbval-ignore-output"),
    ),
    "too many ignored": (
        "few_ignored",
        lambda c: [
            cell(c, f"c{n}")["metadata"].update(tags=["nbval-ignore-output"], reason="time")
            for n in (1, 2, 3)
        ],
    ),
    "too few exercises": ("exercises", lambda c: untag(c, "c12", "c13")),
    "exercise without solution": ("exercises", lambda c: untag(c, "c13")),
    "no slider": ("a_moving_figure", lambda c: cell(c, "c7").update(outputs=[])),
    "figure without alt": (
        "described_figures",
        lambda c: cell(c, "c7")["metadata"].update(
            bilingual={"zh": BOTH["zh"], "en": {"caption": "c", "alt": " "}}
        ),
    ),
    "image without caption": ("described_figures", lambda c: output(c, image_png="aGk=")),
    "not executed": ("executed_in_order", lambda c: cell(c, "c1").update(execution_count=None)),
    "executed out of order": (
        "executed_in_order",
        lambda c: cell(c, "c1").update(execution_count=9),
    ),
    "widget state": ("no_widget_state", lambda c: c["metadata"].update(widgets={})),
    "stored widget": (
        "no_widget_state",
        lambda c: cell(c, "c1").update(
            outputs=[{"output_type": "display_data", "data": {structure.WIDGET: {}}}]
        ),
    ),
    "machine path": ("no_machine_paths", lambda c: output(c, text_plain="/home/me/x.py")),
    "semicolon": ("no_closing_semicolon", lambda c: cell(c, "c1").update(source="f();")),
    "or for if": (
        "plain_statements",
        lambda c: cell(c, "c1").update(source="def f(x):\n    x or print(x)\n\n\nf(1)"),
    ),
    "a list for its effect": (
        "plain_statements",
        lambda c: cell(c, "c1").update(source="[print(x) for x in y]\nx"),
    ),
    "a walrus": (
        "plain_statements",
        lambda c: cell(c, "c1").update(source="%time f()\nwhile (x := next(y)) > 1:\n    x"),
    ),
    "directive": (
        "plain_prose",
        lambda c: cell(c, "en").update(source=cell(c, "en")["source"] + "\n:::{note}"),
    ),
    "task list": (
        "plain_prose",
        lambda c: cell(c, "en").update(source=cell(c, "en")["source"] + "\n- [ ] do"),
    ),
    "wrong label": (
        "headings_and_sections",
        lambda c: cell(c, "en").update(
            source=cell(c, "en")["source"].replace("tensors-a", "sec-a")
        ),
    ),
    "no chapter label": (
        "headings_and_sections",
        lambda c: cell(c, "zh").update(source="# 张量\n\n## 练习\n\n## 要点"),
    ),
    "second title": (
        "headings_and_sections",
        lambda c: cell(c, "en").update(source=cell(c, "en")["source"] + "\n# Again"),
    ),
    "no takeaways": (
        "headings_and_sections",
        lambda c: cell(c, "zh").update(source=cell(c, "zh")["source"].replace("要点", "结束")),
    ),
}


@pytest.mark.parametrize(("rule", "change"), BREAKS.values(), ids=BREAKS.keys())
def test_each_rule_can_fail(chapter, rule, change):
    """The rule that is meant notices the mistake, and no other one does it in its place."""
    broken = copy.deepcopy(chapter)
    change(broken)
    found = structure.by_rule(broken, "02_tensors", 1000)
    assert [name for name, lines in found.items() if lines] == [rule]


START_BREAKS = {
    "too little to try": ("things_to_try", lambda c: untag(c, "c4")),
    "an answer in the open": (
        "things_to_try",
        lambda c: c["cells"].append(code(5, "solution")),
    ),
    "a checked exercise": ("things_to_try", lambda c: c["cells"].append(code(5, "exercise"))),
    "a helper": (
        "stands_alone",
        lambda c: cell(c, "c1").update(source="import torch\n\nfrom helpers import data"),
    ),
    "a helper by its name": (
        "stands_alone",
        lambda c: cell(c, "c1").update(source="if x:\n    import helpers.mnist"),
    ),
    "nothing to try": (
        "headings_and_sections",
        lambda c: cell(c, "zh").update(source=cell(c, "zh")["source"].replace("试一试", "练习")),
    ),
}


@pytest.mark.parametrize(("rule", "change"), START_BREAKS.values(), ids=START_BREAKS.keys())
def test_each_rule_of_the_first_chapter_can_fail(start, rule, change):
    change(start)
    found = structure.by_rule(start, structure.START, 1000)
    assert [name for name, lines in found.items() if lines] == [rule]


def test_every_rule_of_the_first_chapter_is_broken_once():
    own = {rule.__name__ for rule in structure.rules(structure.START)}
    own -= {rule.__name__ for rule in structure.SHARED_RULES}
    assert own <= {rule for rule, _ in START_BREAKS.values()}


def test_every_rule_is_broken_once(chapter):
    rules = set(structure.by_rule(chapter, "02_tensors", 1000)) - {"file_size"}
    assert {rule for rule, _ in BREAKS.values()} == rules


@pytest.mark.parametrize(
    "text",
    [
        "[x for x in y]",
        "x or y",
        "%%writefile a.txt\nif",
        "!ls\nx = y or z",
        "x = [f(x) for x in y]",
    ],
)
def test_what_is_a_plain_statement(chapter, text):
    cell(chapter, "c1").update(source=text)
    assert structure.plain_statements(chapter) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("print(eval('1 + 1'))", "S307"),
        ("exec('x = 1')", "S102"),
        ("square = lambda x: x * x", "E731"),
        ("x = 1; y = 2", "E702"),
        ("for x in range(3): print(x)", "E701"),
        ("x = 1\ndef f():\n    pass", "E302"),
        (f"x = '{'a' * 84}'", "E501"),
    ],
)
def test_the_linter_refuses_golf_in_a_chapter(tmp_path, text, rule):
    """The rules of notebooks/ruff.toml, tried on a chapter that breaks one of them."""
    path = tmp_path / "99_golf.ipynb"
    notebook = {"cells": [code(1, text=text)], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    rules = ["--no-cache", "--config", str(ROOT / "notebooks" / "ruff.toml")]
    command = [sys.executable, "-m", "ruff", "check", *rules, "--output-format=json"]
    done = subprocess.run([*command, path], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert [found["code"] for found in json.loads(done.stdout)] == [rule]


def test_a_file_may_not_be_large(chapter):
    found = structure.by_rule(chapter, "02_tensors", 2_100_000)
    assert [name for name, lines in found.items() if lines] == ["file_size"]


def test_images_are_not_searched_for_paths(chapter):
    figure = cell(chapter, "c7")
    figure["outputs"][0]["data"]["text/html"] += '<img src="data:image/png;base64,+/tmp/aaaa">'
    assert structure.no_machine_paths(chapter) == []


def test_execute_leaves_no_trace_of_the_machine(tmp_path):
    import author

    path = tmp_path / "00_trace.ipynb"
    texts = ("import torch\ntorch.ones(2) + torch.ones(3)", "import json\njson.loads('{')")
    cells = [code(n, "raises-exception", text=text) for n, text in enumerate(texts, 1)]
    notebook = {"cells": cells, "metadata": {"widgets": {}}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    assert author.main(["execute", str(path)]) == 0
    done = read_notebook(path)
    assert [c["id"] for c in done["cells"]] == ["c1", "c2"]
    assert "widgets" not in done["metadata"]
    assert all("execution" not in c["metadata"] for c in done["cells"])
    assert done["cells"][0]["outputs"][0]["ename"] == "RuntimeError"
    assert str(ROOT) not in json.dumps(done)
    assert "ipykernel_" not in json.dumps(done).replace("ipykernel_N/N.py", "")


def test_a_stream_in_pieces_is_one_output():
    import author

    def piece(name, text):
        return {"output_type": "stream", "name": name, "text": text}

    outputs = [piece("stdout", ["a ", "b\n"]), piece("stdout", "c"), piece("stderr", "d")]
    outputs += [{"output_type": "display_data", "data": {}}, piece("stdout", ["e\n", "f"])]
    cell = {"metadata": {}, "outputs": outputs}
    done = author.clean({"cells": [cell], "metadata": {}})["cells"][0]["outputs"]
    assert [o.get("text") for o in done] == [["a b\n", "c"], ["d"], None, ["e\n", "f"]]


COLORED = "\x1b[36mFile \x1b[39m\x1b[32m{}/torch/nn/modules/module.py:1787\x1b[39m, in \x1b[36mf"


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/home/me/.venv/lib/python3.11/site-packages", "site-packages"),
        ("/tmp/ipykernel_123/456.py", "ipykernel_N/N.py"),
        (f"{ROOT}/helpers", "helpers"),
    ],
)
def test_a_traceback_loses_its_paths_and_keeps_its_colors(path, kept):
    import author

    assert author.portable(COLORED.format(path)) == COLORED.format(kept)
    plain = f'  File "{path}/a.py", line 1'
    assert author.portable(plain) == f'  File "{kept}/a.py", line 1'


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_no_color_code_is_cut(path):
    """Its escape character alone would be a box on the page."""
    text = json.dumps(read_notebook(path)["cells"])
    assert not re.findall(r"\\u001b(?!\[[\d;]*m).{,40}", text)


def test_execute_keeps_the_file_when_a_cell_fails(tmp_path, capsys):
    import author

    path = tmp_path / "00_fail.ipynb"
    notebook = {"cells": [code(1, text="1 / 0")], "metadata": {}}
    before = json.dumps({**notebook, "nbformat": 4, "nbformat_minor": 5})
    path.write_text(before, encoding="utf-8")
    assert author.main(["execute", str(path)]) == 1
    assert path.read_text(encoding="utf-8") == before
    assert "ZeroDivisionError" in capsys.readouterr().err


def run_template(notebook: dict, exercises: Path, monkeypatch) -> None:
    """Run every code cell that is not meant to fail, with the exercises that came with it."""
    module = types.ModuleType("helpers.exercises.autograd")
    exec(exercises.read_text(encoding="utf-8"), vars(module))
    monkeypatch.setitem(sys.modules, "helpers.exercises.autograd", module)
    names: dict = {}
    for one in structure.code_cells(notebook):
        if "raises-exception" not in structure.tags(one):
            exec(structure.source(one), names)


def test_a_new_chapter_has_its_blocks(tmp_path, monkeypatch, capsys):
    import author

    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book" / "site").mkdir(parents=True)
    template = ROOT / "book" / "site" / "chapter.md"
    (tmp_path / "book" / "site" / "chapter.md").write_bytes(template.read_bytes())
    monkeypatch.setattr(author, "ROOT", tmp_path)
    assert author.main(["new", "03_autograd", "Autograd", "自动求导"]) == 0
    notebook = read_notebook(tmp_path / "notebooks" / "03_autograd.ipynb")
    assert structure.headings_and_sections(notebook, "03_autograd") == []
    assert "@" not in json.dumps(notebook)
    run_template(notebook, tmp_path / "helpers" / "exercises" / "autograd.py", monkeypatch)
    assert "✓ correct on 3 cases" in capsys.readouterr().out
    assert author.main(["new", "03_autograd", "Autograd", "自动求导"]) == 1
    assert author.main(["new", "autograd", "Autograd", "自动求导"]) == 1
