"""What a folded cell is called: what is inside, in the page's language."""

from __future__ import annotations

import ast
import re

from .figures import is_explore

WORDS = {
    "zh": {
        "solution": "参考答案",
        "evidence": "怎么测的",
        "figure": "画这张图的代码",
        "output": "得出下面输出的代码",
        "both": "代码和输出",
        "hidden output": "输出",
        "code": "代码",
        "definitions": "代码：定义 {}",
        "comma": "、",
    },
    "en": {
        "solution": "Solution",
        "evidence": "How it was measured",
        "figure": "The code of this figure",
        "output": "The code of the output below",
        "both": "Code and output",
        "hidden output": "Output",
        "code": "Code",
        "definitions": "Code: defines {}",
        "comma": ", ",
    },
}
NAMED = 3  # definitions; after these come three dots


def definitions(cell: dict) -> list[str]:
    """The functions and classes that a cell defines."""
    source = "".join(cell["source"])
    if source.startswith("%%"):
        return []
    lines = re.sub(r"^[ \t]*[%!].*$", "", source, flags=re.M)  # what only IPython understands
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [one.name for one in ast.parse(lines).body if isinstance(one, kinds)]


def shows_figure(cell: dict) -> bool:
    bundles = [output["data"] for output in cell.get("outputs", []) if "data" in output]
    return any(is_explore(data) or "image/png" in data for data in bundles)


def kind(cell: dict) -> str:
    """Which of the words above fits."""
    tags = cell["metadata"].get("tags", [])
    for tag in ("solution", "evidence"):
        if tag in tags:
            return tag
    if "hide-output" in tags:
        return "hidden output"
    if not cell.get("outputs"):
        return "definitions" if definitions(cell) else "code"
    if "hide-cell" in tags:
        return "both"
    return "figure" if shows_figure(cell) else "output"


def name(cell: dict, tag: str) -> str | None:
    """What a folded cell is called in this language, None for a cell that is not folded."""
    if not {"hide-cell", "hide-input", "hide-output"} & set(cell["metadata"].get("tags", [])):
        return None
    words = WORDS[tag]
    which = kind(cell)
    if which != "definitions":
        return words[which]
    defined = definitions(cell)
    listed = [*defined[:NAMED], "…"] if len(defined) > NAMED else defined
    return words[which].format(words["comma"].join(listed))
