"""Chapter 14, exercises: which collective, an exchange, a mean, who was to blame."""

from collections.abc import Callable
from typing import Any

from helpers.exercises.harness import Exercise, WrongAnswer

# ---- 1 and 4: a letter for each question; 2 and 3: what each rank has returned


def _at(answer: Any) -> Callable[[Any], Any]:
    return answer if callable(answer) else answer.__getitem__


def _each(ranks: int) -> Callable[[Any], Callable[[int], Any]]:
    """Return the `through` of an answer with one result for each of `ranks`, and no more."""

    def through(answer: Any) -> Callable[[int], Any]:
        def at(rank: int) -> Any:
            if not callable(answer) and len(answer) != ranks:
                raise WrongAnswer(
                    f"expected one result from each of {ranks} ranks, got {len(answer)}"
                )
            return _at(answer)(rank)

        return at

    return through


MEAN = 140 / 60  # means 1, 2, 3 over 10, 20, 30 samples


def _close(answer: Any) -> Callable[[int], Any]:
    """Return the mean itself for a float that differs by less than the exercise allows."""

    def at(rank: int) -> Any:
        number = _each(3)(answer)(rank)
        return MEAN if isinstance(number, float) and abs(number - MEAN) < 1e-6 else number

    return at


COLLECTIVE = {
    "A": "broadcast",
    "B": "gather",
    "C": "all_reduce",
    "D": "reduce_scatter",
    "E": "barrier",
}
CULPRIT = {"A": 3, "B": 1, "C": 0}

EXERCISES = {
    "collective": Exercise(
        reference=COLLECTIVE, through=_at, cases=lambda: [(key,) for key in COLLECTIVE]
    ),
    "exchange": Exercise(reference=[200.0, 100.0], through=_each(2), cases=lambda: [(0,), (1,)]),
    "mean_loss": Exercise(reference=[MEAN] * 3, through=_close, cases=lambda: [(0,), (1,), (2,)]),
    "culprit": Exercise(reference=CULPRIT, through=_at, cases=lambda: [(key,) for key in CULPRIT]),
}
