"""Chapter 14, exercises: which collective, an exchange, a mean, who was to blame."""

from collections.abc import Callable
from typing import Any

from helpers.exercises.harness import Exercise

# ---- 1 and 4: a letter for each question; 2 and 3: what each rank has returned


def _at(answer: Any) -> Callable[[Any], Any]:
    return answer if callable(answer) else answer.__getitem__


def _single(answer: Any) -> Callable[[Any], Any]:
    """Return the numbers as float32 gives them: the digits of float64 are not asked for."""

    def at(rank: int) -> Any:
        number = _at(answer)(rank)
        return round(number, 5) if isinstance(number, float) else number

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
    "exchange": Exercise(reference=[200.0, 100.0], through=_at, cases=lambda: [(0,), (1,)]),
    # means 1, 2, 3 over 10, 20, 30 samples
    "mean_loss": Exercise(
        reference=[140 / 60] * 3, through=_single, cases=lambda: [(0,), (1,), (2,)]
    ),
    "culprit": Exercise(reference=CULPRIT, through=_at, cases=lambda: [(key,) for key in CULPRIT]),
}
