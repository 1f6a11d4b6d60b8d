"""The promises of the layout: same stems, small files, documented names, errors that are tested."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import helpers

ROOT = Path(helpers.__file__).parents[1]
MODULES = sorted(p for p in (ROOT / "helpers").glob("*.py") if p.name != "__init__.py")
KERNELS = sorted((ROOT / "helpers" / "kernels").glob("[!_]*.py"))
PICTURES = sorted((ROOT / "helpers" / "pictures").glob("[!_]*.py"))
PICTURES = [path for path in PICTURES if path.stem != "draw"]  # shared by all chapters
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SHARED = {"timing"}
ALL = [*MODULES, *KERNELS, *PICTURES]
TABLE = re.findall(r"^ {4}(?:(\d\d_\w+))? +(\w+) {2,}\S", helpers.__doc__, re.MULTILINE)


def ids(paths):
    return [p.stem for p in paths]


def test_every_module_is_in_the_chapter_table():
    listed = {module for _, module in TABLE} | SHARED
    assert listed == {p.stem for p in MODULES} | {"kernels"}


def test_a_chapter_and_its_module_share_the_name():
    for chapter, module in TABLE:
        assert not chapter or chapter[3:] == module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_every_notebook_has_its_module(path):
    module = ROOT / "helpers" / path.stem[3:]
    assert module.with_suffix(".py").exists() or (module / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_every_module_names_its_chapter_and_has_tests(path):
    first = path.read_text().splitlines()[0]
    number = next((c[:2] for c, m in TABLE if m == path.stem and c), None)
    assert re.match(r'"""(Chapter \d\d|Every chapter): .+\."""$', first), first
    if number:
        assert f"Chapter {number}" in first
    assert (ROOT / "tests" / f"test_{path.stem}.py").exists()


@pytest.mark.parametrize("path", KERNELS, ids=ids(KERNELS))
def test_every_kernel_names_its_chapter_and_has_tests(path):
    assert path.read_text().startswith('"""Chapter 13: ')
    assert (ROOT / "tests" / "kernels" / f"test_{path.stem}.py").exists()


@pytest.mark.parametrize("path", PICTURES, ids=ids(PICTURES))
def test_every_picture_names_its_chapter_and_has_tests(path):
    chapter = next(c for c, m in TABLE if m == path.stem and c)
    assert path.read_text().startswith(f'"""Chapter {chapter[:2]}, drawn: ')
    assert (ROOT / "tests" / "pictures" / f"test_{path.stem}.py").exists()


def test_benchmarks_and_records_have_a_chapter_module():
    stems = {p.stem for p in (ROOT / "benchmarks").glob("*.py")} - {"measure"}
    assert stems <= {p.stem for p in MODULES} | {"kernels"}
    recorded = {p.name.split(".")[0] for p in (ROOT / "benchmarks" / "records").glob("*.json")}
    assert recorded <= stems


def test_size_budgets():
    lines = {p: len(p.read_text().splitlines()) for p in ALL}
    assert sum(lines[p] for p in MODULES) <= 2800
    assert sum(lines[p] for p in KERNELS) <= 1500
    assert not {p.name: n for p, n in lines.items() if n > 170 and p not in KERNELS}
    for path in lines:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "_kernel" not in node.name:
                assert node.end_lineno - node.lineno < 40, f"{path.name}: {node.name}"


def public(path):
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    module = importlib.import_module(name)
    for name, value in vars(module).items():
        ours = getattr(value, "__module__", None) == module.__name__
        if (
            ours
            and not name.startswith("_")
            and (inspect.isfunction(value) or inspect.isclass(value))
        ):
            yield name, value


@pytest.mark.parametrize("path", ALL, ids=ids(ALL))
def test_public_names_are_documented_and_typed(path):
    for name, value in public(path):
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            hints = value.__annotations__
            missing = set(inspect.signature(value).parameters) - set(hints)
            assert "return" in hints and not missing, f"{name}: {missing}"


def raised(path):
    """The literal parts of each message that the module raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                texts = [p.value for p in parts if isinstance(p, ast.Constant)]
                if texts:
                    yield node.lineno, texts


@pytest.mark.parametrize("path", ALL, ids=ids(ALL))
def test_every_error_is_provoked_by_a_test(path):
    """Some words of each message must stand in a `match=` or in another string of a test."""
    tests = " ".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    plain = re.sub(r"[\\\s\"']+", " ", tests)
    for line, texts in raised(path):
        words = [re.findall(r"\w+", text) for text in texts]
        runs = [r"\W+".join(w[i : i + 3]) for w in words for i in range(len(w) - 2)]
        runs = runs or [r"\W+".join(w) for w in words if len(w) > 1]
        assert any(re.search(run, plain) for run in runs), f"{path.name}:{line}: {texts}"


def test_no_silent_except():
    for path in [
        *MODULES,
        *PICTURES,
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "book").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                assert not bare and not silent, f"{path.name}:{node.lineno}"


def test_requirements_are_pinned_and_satisfy_the_loose_bounds():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), pins
    pinned = {pin.split("==")[0].lower() for pin in pins}
    bounds = re.search(
        r"dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    loose = {re.split(r"[><=]", d)[0].lower() for d in re.findall(r'"(.+?)"', bounds[1])}
    assert loose <= pinned
