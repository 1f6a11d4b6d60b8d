"""Each exercise refuses the wrong answers listed for it, accepts the right ones, and knows a stub.

The answers stand in the chapter's own file, in the tables RIGHT and WRONG: {exercise: answers}, the
answers in a list, or in a dict that names them; or a list of (exercise, answer) and, in WRONG,
(exercise, answer, words of the verdict). STUBS: what is written in the place of an answer where a
function that returns the dots will not do.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.exercises import check, harness

# Two chapters have tests of their own: their answers are pairs of functions, and kernels.
OWN = {"environment", "kernels"}
FOLDER = Path(harness.__file__).parent
CHAPTERS = sorted({path.stem for path in FOLDER.glob("[!_]*.py")} - OWN - {"harness"})
TABLES = {
    chapter: importlib.import_module(f"tests.exercises.test_{chapter}") for chapter in CHAPTERS
}
EXERCISES = {
    f"{chapter}.{name}": getattr(TABLES[chapter], "STUBS", {}).get(name, lambda *arguments: ...)
    for chapter in CHAPTERS
    for name in importlib.import_module(f"helpers.exercises.{chapter}").EXERCISES
}


def entries(chapter: str, kind: str) -> Iterator[tuple]:
    """Yield (exercise, what the answer is called, answer, words) for a table of a chapter."""
    table = getattr(TABLES[chapter], kind)
    if isinstance(table, list):
        for number, (name, answer, *words) in enumerate(table):
            yield f"{chapter}.{name}", number, answer, words[0] if words else ""
        return
    for name, answers in table.items():
        called = answers.items() if isinstance(answers, dict) else enumerate(answers)
        for how, answer in called:
            yield f"{chapter}.{name}", how, answer, ""


def each(kind: str) -> list:
    return [
        pytest.param(name, answer, words, id=f"{name}-{how}")
        for chapter in CHAPTERS
        for name, how, answer, words in entries(chapter, kind)
    ]


@pytest.mark.parametrize("kind", ["RIGHT", "WRONG"])
def test_every_exercise_is_tried(kind):
    assert {name for chapter in CHAPTERS for name, *_ in entries(chapter, kind)} == set(EXERCISES)


@pytest.mark.parametrize(("name", "answer", "words"), each("RIGHT"))
def test_right_answers_pass(name, answer, words, capsys):
    check(name, answer)
    assert capsys.readouterr().out.startswith("✓ correct on ")


@pytest.mark.filterwarnings("ignore")  # some overflow, or use .T of a batch
@pytest.mark.parametrize(("name", "answer", "words"), each("WRONG"))
def test_wrong_answers_are_refused_with_their_arguments(name, answer, words, capsys):
    check(name, answer)
    out = capsys.readouterr().out
    assert out.startswith("✗ case ") and ", f(" in out and words in out
    assert out.count("\n") == 1  # one line, whatever went wrong


@pytest.mark.parametrize("name", EXERCISES)
def test_no_answer_is_said_so(name, capsys):
    check(name, EXERCISES[name])
    assert capsys.readouterr().out == "✗ not answered yet: replace the dots\n"
