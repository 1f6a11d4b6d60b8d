"""Tools for authors and translators.

python book/author.py new 03_autograd "Autograd" "自动求导"     a chapter with every block
python book/author.py execute notebooks/03_autograd.ipynb   run it in a fresh kernel, in place
python book/author.py check                                 languages agree, chapters in shape?
python book/author.py review [FILE…]                        both sides read together: lock them
python book/author.py terms                                 which section explains which term
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "site"))

from bilingual import language, pairing, structure, terms  # noqa: E402  (the site's package is not installed)

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
VOLATILE = ("execution", "ExecuteTime", "collapsed", "scrolled", "outputId", "colab")
CELL = re.compile(r"^\+\+\+ (\{[^\n]*\})\n(.*?)(?=^\+\+\+ |\Z)", re.M | re.S)
ADDRESS = re.compile(r"ipykernel_\d+/\d+\.py")


def clean(notebook: dict) -> dict:
    """Remove what changes from run to run without anyone changing the chapter."""
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        for key in VOLATILE:
            cell["metadata"].pop(key, None)
        if "outputs" in cell:
            cell["outputs"] = merged(cell["outputs"])
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
            if "text" in output:
                text = ADDRESS.sub("ipykernel_N/N.py", "".join(output["text"]))
                output["text"] = text.splitlines(keepends=True)
            output.get("data", {}).pop(structure.WIDGET, None)  # its kernel is gone
            if "traceback" in output:
                output["traceback"] = [portable(line) for line in output["traceback"]]
    return notebook


def merged(outputs: list[dict]) -> list[dict]:
    """One output where a stream arrived in pieces: how it is cut depends on the clock."""
    kept: list[dict] = []
    for output in outputs:
        last = kept[-1] if kept else {}
        if "name" in output and output["name"] == last.get("name"):
            last["text"] = "".join([*last["text"], *output["text"]])
        else:
            kept.append(output)
    return kept


def portable(text: str) -> str:
    """A traceback without the paths of the machine it was made on."""
    text = text.replace(f"{ROOT}/", "")
    color = r"((?:\x1b\[[\d;]*m)?)"  # it stands right before the path, and stays
    text = re.sub(color + r"[^\s\x1b\"']*/site-packages/", r"\1site-packages/", text)
    return re.sub(color + r"[^\s\x1b\"']*/(ipykernel_)\d+/\d+\.py", r"\1\2N/N.py", text)


def write(path: Path, notebook: dict) -> None:
    """Replace the file at once, so that a reader never sees half a notebook."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def execute(paths: list[Path]) -> int:
    """Run notebooks from top to bottom in fresh kernels; a failure leaves the file as it was."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    failed = 0
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        where = {"metadata": {"path": str(path.resolve().parent)}}
        start = time.monotonic()
        client = NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=where, store_widget_state=False
        )
        try:
            client.execute()
        except CellExecutionError as error:
            print(f"{path}: failed, the file is unchanged\n{error}", file=sys.stderr)
            failed += 1
            continue
        write(path, clean(json.loads(nbformat.writes(notebook, split_lines=True))))
        print(f"{path}: {time.monotonic() - start:.1f} s")
    return int(bool(failed))


def review(paths: list[Path]) -> int:
    """Write both hashes of every pair (of these files) into the lock file."""
    pairs, lonely = pairing.collect(ROOT)
    if lonely:
        print(*lonely, sep="\n")
        return 1
    entries = pairing.lock_entries(pairs)
    lock = pairing.read_lock(ROOT) if paths else {}
    names = [path.resolve().relative_to(ROOT).as_posix() for path in paths] or list(entries)
    for name in names:
        if name not in entries:
            raise ValueError(f"expected a bilingual source of the book, got {name}")
        lock[name] = entries[name]
    text = json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False)
    text = re.sub(r"\[\s+(\S+)\s+(\S+)\s+\]", r"[\1 \2]", text)  # a pair a line: easy to merge
    (ROOT / pairing.LOCK).write_text(text + "\n", encoding="utf-8")
    print(f"{pairing.LOCK}: {sum(len(entries[name]) for name in names)} pairs locked")
    return 0


def check() -> int:
    """Print what the drift gate and the rules of shape find."""
    found = pairing.problems(ROOT) + terms.problems(ROOT)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shape = structure.problems(language.read_notebook(path), path.stem, path.stat().st_size)
        found += [f"notebooks/{path.name}: {line}" for line in shape]
    print(*found, sep="\n")
    print(f"{len(found)} problems")
    return int(bool(found))


def explained() -> int:
    """Print for each term of the glossary the section that explains it, or that none is marked."""
    print(*terms.report(ROOT), sep="\n")
    return 0


def new(stem: str, english: str, chinese: str) -> int:
    """Write a chapter with every block that a chapter has, to be filled in."""
    if not re.fullmatch(r"\d\d_[a-z_]+", stem):
        raise ValueError(f"stem: expected NN_topic, got {stem!r}")
    path = ROOT / "notebooks" / f"{stem}.ipynb"
    if path.exists():
        raise ValueError(f"{path.relative_to(ROOT)} exists already")
    template = (ROOT / "book" / "site" / "chapter.md").read_text(encoding="utf-8")
    topic = stem[3:]
    for name, value in {"STEM": stem, "TOPIC": topic, "EN": english, "ZH": chinese}.items():
        template = template.replace(f"@{name}@", value)
    write(path, chapter(template.replace("@LABEL@", stem.replace("_", "-")), topic))
    print(f"{path.relative_to(ROOT)}: written; add it to _toc.yml")

    exercises = ROOT / "helpers" / "exercises" / f"{topic}.py"
    if not exercises.exists():
        exercises.parent.mkdir(parents=True, exist_ok=True)
        exercises.write_text(EXERCISES.format(number=stem[:2]), encoding="utf-8")
        print(f"{exercises.relative_to(ROOT)}: written; references and cases go there")
    return 0


EXERCISES = '''"""Chapter {number}, exercises: …"""

from helpers.exercises.harness import Exercise


def double(x: float) -> float:
    """Return twice x."""
    return 2 * x


EXERCISES = {{
    "double": Exercise(reference=double, cases=lambda: [(1.0,), (-0.5,), (0.0,)]),
}}
'''


def chapter(template: str, topic: str) -> dict:
    """A notebook from the template: `+++` lines with metadata part the cells."""
    cells = []
    for meta, text in CELL.findall(template):
        metadata = json.loads(meta)
        kind = "code" if metadata.pop("code", False) else "markdown"
        cell = {
            "cell_type": kind,
            "id": f"{topic}-{len(cells):02}",
            "metadata": metadata,
            "source": text.strip().splitlines(keepends=True),
        }
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    return clean({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("execute").add_argument("notebooks", nargs="+", type=Path)
    commands.add_parser("review").add_argument("files", nargs="*", type=Path)
    commands.add_parser("check")
    commands.add_parser("terms")
    create = commands.add_parser("new")
    for name in ("stem", "english", "chinese"):
        create.add_argument(name)
    options = parser.parse_args(arguments)
    try:
        return {
            "execute": lambda: execute(options.notebooks),
            "review": lambda: review(options.files),
            "check": check,
            "terms": explained,
            "new": lambda: new(options.stem, options.english, options.chinese),
        }[options.command]()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
