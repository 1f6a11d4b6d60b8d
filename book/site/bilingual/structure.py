"""A chapter's shape: rules for one notebook, each a list of findings that name the cell."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

from . import prose
from .figures import is_explore

START = "00_start"  # what a newcomer reads first; it needs nothing of the book's own code
IGNORED = 0.15
EXERCISES = 3
BYTES = 2_000_000
WIDGET = "application/vnd.jupyter.widget-view+json"
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])/(?:home|root|Users|tmp|work|mnt|opt|usr|var|srv|private|content)/[\w.-]+"
    r"|\b[A-Z]:\\\\?\w"
)


def tags(cell: dict) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def source(cell: dict) -> str:
    return "".join(cell["source"])


def name(cell: dict) -> str:
    return f"cell {cell.get('id', '?')}"


def code_cells(notebook: dict) -> list[dict]:
    return [c for c in notebook["cells"] if c["cell_type"] == "code" and source(c).strip()]


def bundles(cell: dict) -> list[dict]:
    return [output["data"] for output in cell.get("outputs", []) if "data" in output]


def is_figure(data: dict) -> bool:
    return is_explore(data) or any(mime.startswith("image/") for mime in data)


def evidence_apart(notebook: dict) -> list[str]:
    """What the book keeps for its claims page stands in folded cells of its own."""
    found = []
    for cell in code_cells(notebook):
        keeps_books = re.search(r"\bledger\.result\(", source(cell)) is not None
        if keeps_books and not {"evidence", "hide-input"} <= tags(cell):
            found.append(f"{name(cell)}: a claim's result outside of a folded evidence cell")
        if "evidence" in tags(cell) and not keeps_books:
            found.append(f"{name(cell)}: tagged evidence, but it records no claim")
    return found


TYPED_VERDICT = re.compile(r'\bledger\.result\(\s*"\w+",\s*"(?:holds|holds-if|false)"\s*[,)]')


def computed_verdicts(notebook: dict) -> list[str]:
    """A verdict follows from what was measured: a typed one would stand whatever comes out."""
    return [
        f"{name(cell)}: a verdict that is typed, not computed"
        for cell in code_cells(notebook)
        if TYPED_VERDICT.search(source(cell))
    ]


def ignored_outputs(notebook: dict) -> list[str]:
    """The cells whose output is not compared, with their reasons."""
    return [
        f"{name(cell)}: {cell['metadata'].get('reason', 'NO REASON GIVEN')}"
        for cell in code_cells(notebook)
        if "nbval-ignore-output" in tags(cell)
    ]


def few_ignored(notebook: dict) -> list[str]:
    ignored = ignored_outputs(notebook)
    found = [line for line in ignored if line.endswith("NO REASON GIVEN")]
    count = len(code_cells(notebook))
    if len(ignored) > IGNORED * count:
        found.append(f"{len(ignored)} of {count} outputs ignored, at most {IGNORED:.0%}")
    return found


def exercises(notebook: dict) -> list[str]:
    """Enough of them, and a folded solution after each."""
    wanted = [cell for cell in notebook["cells"] if "exercise" in tags(cell)]
    solved = [cell for cell in notebook["cells"] if {"solution", "hide-cell"} <= tags(cell)]
    found = []
    if len(wanted) < EXERCISES:
        found.append(f"{len(wanted)} exercises, expected at least {EXERCISES}")
    if len(solved) != len(wanted):
        found.append(f"{len(wanted)} exercises, but {len(solved)} folded solutions")
    return found


def things_to_try(notebook: dict) -> list[str]:
    """In place of exercises: enough of them, a folded solution for each, and none is checked."""
    found = []
    folded = 0
    for cell in code_cells(notebook):
        if "exercise" in tags(cell):
            found.append(f"{name(cell)}: a checked exercise; {START} only suggests what to try")
        if "solution" in tags(cell):
            folded += "hide-cell" in tags(cell)
            if "hide-cell" not in tags(cell):
                found.append(f"{name(cell)}: a solution that is not folded")
    if folded < EXERCISES:
        found.append(f"{folded} folded solutions, expected at least {EXERCISES}")
    return found


OWN_CODE = re.compile(r"^[ \t]*(?:from|import)[ \t]+(?:helpers|tests|benchmarks)\b", re.M)


def stands_alone(notebook: dict) -> list[str]:
    """Everything that runs stands on the page or in a public package."""
    return [
        f"{name(cell)}: imports the book's own code: {found[0].strip()}"
        for cell in code_cells(notebook)
        for found in OWN_CODE.finditer(source(cell))
    ]


def a_moving_figure(notebook: dict) -> list[str]:
    moving = any(is_explore(data) for cell in code_cells(notebook) for data in bundles(cell))
    return [] if moving else ["no figure with a slider"]


def described_figures(notebook: dict) -> list[str]:
    """Every figure has a caption and an alt text in both languages."""
    found = []
    for cell in code_cells(notebook):
        if any(is_figure(data) for data in bundles(cell)):
            words = cell["metadata"].get("bilingual", {})
            missing = [
                f"{tag} {kind}"
                for tag in ("zh", "en")
                for kind in ("caption", "alt")
                if not words.get(tag, {}).get(kind, "").strip()
            ]
            found += [f"{name(cell)}: figure without {', '.join(missing)}"] if missing else []
    return found


def executed_in_order(notebook: dict) -> list[str]:
    counts = [cell.get("execution_count") for cell in code_cells(notebook)]
    if counts == list(range(1, len(counts) + 1)):
        return []
    return [f"not run from top to bottom (execution counts {counts}); use author.py execute"]


def no_widget_state(notebook: dict) -> list[str]:
    found = ["widget state in the metadata"] if "widgets" in notebook["metadata"] else []
    for cell in code_cells(notebook):
        if any(WIDGET in data for data in bundles(cell)):
            found.append(f"{name(cell)}: a widget of a kernel that is gone; use author.py execute")
    return found


def no_machine_paths(notebook: dict) -> list[str]:
    return [
        f"{name(cell)}: a path of one machine in the output: {match[0]}"
        for cell in code_cells(notebook)
        for match in MACHINE_PATH.finditer(json.dumps(without_images(cell), ensure_ascii=False))
    ]


def without_images(cell: dict) -> list[dict]:
    """Outputs without base64, which may hold anything."""
    outputs = json.loads(json.dumps(cell.get("outputs", [])))
    for output in outputs:
        data = output.get("data", {})
        for mime in [mime for mime in data if mime.startswith("image/")]:
            del data[mime]
        if "text/html" in data:
            data["text/html"] = re.sub(r"base64,[^\"']*", "", "".join(data["text/html"]))
    return outputs


def no_closing_semicolon(notebook: dict) -> list[str]:
    """Jupyter hides a value before `;`, nbval does not: the comparison would fail."""
    return [
        f"{name(cell)}: ends with a semicolon; assign to _ to hide a value"
        for cell in code_cells(notebook)
        if source(cell).rstrip().endswith(";")
    ]


def statements(cell: dict) -> ast.Module:
    """The Python of a cell; lines for IPython alone (%%writefile, !ls) are left out."""
    text = source(cell)
    if text.startswith("%%"):
        text = ""
    return ast.parse(re.sub(r"^[ \t]*[%!].*$", "", text, flags=re.M))


FOR_EFFECT = (ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def plain_statements(notebook: dict) -> list[str]:
    """`if` and `for` are written as such: no `a or b()`, no `[f(x) for …]` for what it does, no :=.

    What `ruff` knows (eval, exec, a lambda with a name, two statements in a line) it checks.
    """
    found = []
    for cell in code_cells(notebook):
        body = statements(cell).body
        shown = body[-1] if body else None
        for node in (node for statement in body for node in ast.walk(statement)):
            for_effect = isinstance(node, ast.Expr) and isinstance(node.value, FOR_EFFECT)
            if isinstance(node, ast.NamedExpr) or (for_effect and node is not shown):
                found.append(f"{name(cell)}: not a plain statement: {ast.unparse(node)}")
    return found


def plain_prose(notebook: dict) -> list[str]:
    """Prose that also reads well where there is no MyST."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = source(cell)
            found += [f"{name(cell)}: directive {one}" for one in prose.directives(text)]
            if re.search(r"^\s*[-*] \[[ x]\] ", text, re.M):
                found.append(f"{name(cell)}: a task list")
    return found


def headings_and_sections(notebook: dict, stem: str) -> list[str]:
    """One H1, first, with the chapter's label; sections' labels carry the topic."""
    topic = stem[3:].replace("_", "-")
    chapter = f"ch-{stem.replace('_', '-')}"
    texts = [source(c) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    found = []
    if not texts or not texts[0].startswith(f"({chapter})=\n# "):
        found.append(f"the first cell does not start with ({chapter})= and a heading `# …`")
    english = [source(c) for c in notebook["cells"] if "en" in tags(c)]
    if sum(prose.headings(text).count(1) for text in english) != 1:
        found.append("expected exactly one heading of level 1 in each language")
    for label in {label for text in english for label in prose.labels(text)} - {chapter}:
        if not label.startswith(f"{topic}-"):
            found.append(f"label {label} does not start with {topic}-")
    chinese = "\n".join(source(c) for c in notebook["cells"] if "zh" in tags(c))
    for section in ("试一试" if stem == START else "练习", "要点"):
        if not re.search(rf"^## .*{section}", chinese, re.M):
            found.append(f"no section {section}")
    return found


SHARED_RULES = (
    evidence_apart,
    computed_verdicts,
    few_ignored,
    described_figures,
    executed_in_order,
    no_widget_state,
    no_machine_paths,
    no_closing_semicolon,
    plain_statements,
    plain_prose,
)


def rules(stem: str) -> tuple[Callable[[dict], list[str]], ...]:
    """The rules for the chapter of this name."""
    if stem == START:
        return (*SHARED_RULES, things_to_try, stands_alone)
    return (*SHARED_RULES, exercises, a_moving_figure)


def by_rule(notebook: dict, stem: str, size: int) -> dict[str, list[str]]:
    """Return what each rule finds wrong in the shape of a chapter; `size`: the file's, in bytes."""
    found = {rule.__name__: rule(notebook) for rule in rules(stem)}
    found["headings_and_sections"] = headings_and_sections(notebook, stem)
    too_large = f"the file has {size / 1e6:.1f} MB, at most {BYTES / 1e6:.1f}"
    found["file_size"] = [too_large] if size > BYTES else []
    return found


def problems(notebook: dict, stem: str, size: int) -> list[str]:
    """Everything that is wrong with the shape of a chapter."""
    return [line for lines in by_rule(notebook, stem, size).values() for line in lines]
