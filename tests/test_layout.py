"""The promises of the layout: rooms, same stems, documented names, errors that are tested."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import helpers

ROOT = Path(helpers.__file__).parents[1]
HELPERS = ROOT / "helpers"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
ALONE = {"00_start"}  # uses public packages only, so it has no module
SHARED = {"timing"}  # lessons of every chapter
TABLE = re.findall(r"^ {4}(?:(\d\d_\w+))? +(\w+) {2,}\S", helpers.__doc__, re.MULTILINE)


def modules(folder: str) -> list[Path]:
    return sorted((HELPERS / folder).glob("[!_]*.py"))


LESSONS = modules(".")
KERNELS = modules("kernels")
PICTURES = [path for path in modules("pictures") if path.stem != "draw"]
EXERCISES = [path for path in modules("exercises") if path.stem != "harness"]
PAGE = modules("page")
ALL = sorted(path for path in HELPERS.rglob("[!_]*.py"))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def ids(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


# ---- rooms: who may import whom (a test, not a line count)

# room -> what it may import of this project; a lesson is what lies in helpers itself
MAY_IMPORT = {
    "lesson": {"lesson", "kernels"},
    "kernels": {"lesson", "kernels"},
    "pictures": {"lesson", "kernels", "pictures", "page"},
    "exercises": {"lesson", "kernels", "exercises"},
    "page": {"page", "pictures.draw"},
    "benchmarks": {"lesson", "kernels", "page"},
    "notebook": {"lesson", "kernels", "pictures", "exercises", "page"},
    "notebook alone": set(),
}


def room(name: str) -> str | None:
    """The room of an imported module, None for what is not ours."""
    first, *rest = name.split(".")
    if first in ("tests", "benchmarks"):
        return first
    if first != "helpers" or not rest:
        return None
    if rest[:2] == ["pictures", "draw"]:
        return "pictures.draw"
    return rest[0] if rest[0] in ("kernels", "pictures", "exercises", "page") else "lesson"


def imported(source: str) -> list[str]:
    """Every module that `source` imports, anywhere in it; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def forbidden(source: str, here: str) -> list[str]:
    """What `source`, lying in the room `here`, imports although it may not."""
    allowed = MAY_IMPORT[here]
    rooms = {name: room(name) for name in imported(source)}
    return [
        name
        for name, there in rooms.items()
        if there and there not in allowed and there.split(".")[0] not in allowed
    ]


def code(path: Path) -> str:
    """The code of a notebook; lines for IPython alone (%%writefile, !ls) are left out."""
    cells = json.loads(text(path))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    kept = [source for source in sources if not source.startswith("%%")]
    return "\n".join(line for s in kept for line in s.split("\n") if not re.match(r"\s*[%!]", line))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.relative_to(HELPERS).as_posix())
def test_a_module_imports_only_what_its_room_may(path):
    parent = path.parent.name
    here = parent if parent != "helpers" else "lesson"
    assert not forbidden(text(path), here)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_a_benchmark_imports_no_test_and_no_picture(path):
    assert not forbidden(text(path), "benchmarks")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_a_notebook_imports_no_test(path):
    assert not forbidden(code(path), "notebook alone" if path.stem in ALONE else "notebook")


@pytest.mark.parametrize(
    ("source", "here"),
    [
        ("from helpers.page import records", "lesson"),
        ("def f():\n    import helpers.page.records", "kernels"),
        ("from helpers.pictures import tensors", "lesson"),
        ("from helpers.exercises import check", "lesson"),
        ("from tests.kernels import numerics", "kernels"),
        ("from helpers import mnist", "page"),
        ("from helpers.pictures.tensors import draw_strip", "page"),
        ("from tests import conftest", "notebook"),
        ("from helpers.pictures import draw", "benchmarks"),
        ("from helpers import data", "notebook alone"),
    ],
)
def test_the_rooms_have_walls(source, here):
    assert forbidden(source, here)


@pytest.mark.parametrize(
    ("source", "here"),
    [
        ("from helpers import timing, memory\nimport torch", "lesson"),
        ("from helpers.pictures.draw import STYLE", "page"),
        ("from helpers.kernels.softmax import softmax", "lesson"),
    ],
)
def test_the_rooms_have_doors(source, here):
    assert not forbidden(source, here)


def test_nothing_is_imported_with_the_package():
    """`import helpers` is quick, and starts nothing: each chapter imports what it needs."""
    program = (
        "import sys; before = set(sys.modules); import helpers; "
        "print(sorted(set(sys.modules) - before - {'helpers'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# ---- the same stem everywhere


def test_every_module_is_in_the_chapter_table():
    listed = {module for _, module in TABLE} | SHARED
    assert listed == {path.stem for path in LESSONS} | {"kernels"}


def test_a_chapter_and_its_module_share_the_name():
    for chapter, module in TABLE:
        assert not chapter or chapter[3:] == module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_every_notebook_has_its_module(path):
    module = HELPERS / path.stem[3:]
    there = module.with_suffix(".py").exists() or (module / "__init__.py").exists()
    assert there == (path.stem not in ALONE)


@pytest.mark.parametrize("path", LESSONS, ids=ids(LESSONS))
def test_every_lesson_names_its_chapter_and_has_tests(path):
    first = text(path).splitlines()[0]
    number = next((c[:2] for c, m in TABLE if m == path.stem and c), None)
    assert re.match(r'"""(Chapter \d\d|Every chapter): .+\."""$', first), first
    if number:
        assert f"Chapter {number}" in first
    assert (ROOT / "tests" / f"test_{path.stem}.py").exists()


@pytest.mark.parametrize("path", KERNELS, ids=ids(KERNELS))
def test_every_kernel_names_its_chapter_and_has_tests(path):
    assert text(path).startswith('"""Chapter 13: ')
    assert (ROOT / "tests" / "kernels" / f"test_{path.stem}.py").exists()


@pytest.mark.parametrize("path", PICTURES, ids=ids(PICTURES))
def test_every_picture_names_its_chapter_and_has_tests(path):
    chapter = next(c for c, m in TABLE if m == path.stem and c)
    assert text(path).startswith(f'"""Chapter {chapter[:2]}, drawn: ')
    assert (ROOT / "tests" / "pictures" / f"test_{path.stem}.py").exists()


@pytest.mark.parametrize("path", EXERCISES, ids=ids(EXERCISES))
def test_every_chapter_s_exercises_have_tests(path):
    assert any(m == path.stem for _, m in TABLE)
    assert (ROOT / "tests" / "exercises" / f"test_{path.stem}.py").exists()


@pytest.mark.parametrize("path", PAGE, ids=ids(PAGE))
def test_every_part_of_a_page_has_tests(path):
    assert (ROOT / "tests" / "page" / f"test_{path.stem}.py").exists()


def test_benchmarks_and_records_have_a_chapter_module():
    stems = {p.stem for p in (ROOT / "benchmarks").glob("*.py")} - {"measure"}
    assert stems <= {p.stem for p in LESSONS} | {"kernels"}
    recorded = {p.name.split(".")[0] for p in (ROOT / "benchmarks" / "records").glob("*.json")}
    assert recorded <= stems


# ---- names that explain themselves


def public(path):
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    module = importlib.import_module(name)
    for name, value in vars(module).items():
        ours = getattr(value, "__module__", None) == module.__name__
        described = inspect.isfunction(value) or inspect.isclass(value)
        if ours and described and not name.startswith("_"):
            yield name, value


@pytest.mark.parametrize("path", ALL, ids=ids(ALL))
def test_public_names_are_documented_and_typed(path):
    for name, value in public(path):
        if path in EXERCISES:  # an exercise's reference is named and described in the notebook
            continue
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            hints = value.__annotations__
            missing = set(inspect.signature(value).parameters) - set(hints)
            assert "return" in hints and not missing, f"{name}: {missing}"


# ---- every error is provoked


def raised(source: str):
    """The literal parts of each message that `source` raises, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                texts = [p.value for p in parts if isinstance(p, ast.Constant)]
                if texts:
                    yield node.lineno, texts


def expected(source: str) -> list[str]:
    """The messages that the tests in `source` look for: what `match=` can come to.

    Strings in the arguments of `pytest.raises(match=…)`; where that is a name, such as a parameter
    of the test, the strings of the file that may stand for it: those of `parametrize` and of
    assignments.
    """
    tree, found, named = ast.parse(source), [], False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("raises", "warns"):
            for keyword in node.keywords:
                if keyword.arg == "match":
                    found += strings(keyword.value)
                    named = named or any(isinstance(n, ast.Name) for n in ast.walk(keyword.value))
    if named:
        for node in ast.walk(tree):
            parametrized = (
                isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize"
            )
            if parametrized or isinstance(node, ast.Assign):
                found += strings(node)
    return found


def strings(node: ast.AST) -> list[str]:
    values = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def unprovoked(source: str, messages: list[str]) -> list[tuple[int, list[str]]]:
    """The errors of `source` of which no three words in a row stand in one of `messages`."""
    plain = [re.sub(r"[\\\s\"']+", " ", message) for message in messages]
    found = []
    for line, texts in raised(source):
        words = [re.findall(r"\w+", part) for part in texts]
        runs = [r"\W+".join(w[i : i + 3]) for w in words for i in range(len(w) - 2)]
        runs = runs or [r"\W+".join(w) for w in words if len(w) > 1]
        if not any(re.search(run, message) for run in runs for message in plain):
            found.append((line, texts))
    return found


@pytest.fixture(scope="session")
def messages() -> list[str]:
    return [m for path in (ROOT / "tests").rglob("test_*.py") for m in expected(text(path))]


@pytest.mark.parametrize("path", ALL, ids=ids(ALL))
def test_every_error_is_provoked_by_a_test(path, messages):
    """Some words of each message stand in a `match=`."""
    assert not unprovoked(text(path), messages)


def test_a_comment_provokes_nothing():
    source = 'raise ValueError(f"steps must be at least 1, got {n}")'
    comment = "# steps must be at least 1\nassert 'steps must be at least'"
    wrong = 'with pytest.raises(ValueError, match="got 0"):\n    f()'
    right = 'with pytest.raises(ValueError, match="steps must be at"):\n    f()'
    given = '@pytest.mark.parametrize("m", ["must be at least 1"])\ndef test(m):\n'
    given += "    with pytest.raises(ValueError, match=m):\n        f()"
    assert unprovoked(source, expected(comment))
    assert unprovoked(source, expected(wrong))
    assert not unprovoked(source, expected(right))
    assert not unprovoked(source, expected(given))


# ---- and nothing is hidden


def test_no_silent_except():
    for path in [*ALL, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "book").rglob("*.py")]:
        for node in ast.walk(ast.parse(text(path))):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                assert not bare and not silent, f"{path.name}:{node.lineno}"


def test_files_are_read_and_written_with_an_encoding():
    """Without one, a Chinese page cannot be read where the locale says GBK, or nothing (C)."""
    sources = [*ALL, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    found = []
    for path in [*sources, *(ROOT / "book").rglob("*.py")]:
        for node in ast.walk(ast.parse(text(path))):
            if isinstance(node, ast.Call) and without_encoding(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def without_encoding(call: ast.Call) -> bool:
    """Is this read_text(), write_text(…) or open(…) of text without `encoding`?"""
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    method = getattr(call.func, "attr", None)
    if method == "read_text":
        return not call.args
    if method == "write_text":
        return len(call.args) < 2
    binary = any(re.fullmatch(r"[rwax+]*b[rwax+]*", word) for word in strings(call))
    return getattr(call.func, "id", None) == "open" and not binary


@pytest.mark.parametrize("source", ["p.read_text()", "p.write_text('x')", "open('f')"])
def test_a_missing_encoding_is_noticed(source):
    assert without_encoding(ast.parse(source, mode="eval").body)


@pytest.mark.parametrize(
    "source", ["p.read_text(encoding='utf-8')", "open('f', 'rb')", "p.write_text(x, 'utf-8')"]
)
def test_an_encoding_is_enough(source):
    assert not without_encoding(ast.parse(source, mode="eval").body)


def test_requirements_are_pinned_and_satisfy_the_loose_bounds():
    lines = text(ROOT / "requirements.txt").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), pins
    pinned = {pin.split("==")[0].lower() for pin in pins}
    bounds = re.search(r"dependencies = \[(.*?)\]", text(ROOT / "pyproject.toml"), re.DOTALL)
    loose = {re.split(r"[><=]", d)[0].lower() for d in re.findall(r'"(.+?)"', bounds[1])}
    assert loose <= pinned
