"""Chapter 14, exercises: which collective, an exchange, a mean, who was to blame."""

from collections.abc import Callable
from typing import Any

from helpers.exercises.harness import Exercise, of_each_rank

# ---- 1 and 4: a letter for each question; 2 and 3: what each rank has returned


def _at(answer: Any) -> Callable[[Any], Any]:
    return answer if callable(answer) else answer.__getitem__


def _mean() -> float:
    return (10 * 1.0 + 20 * 2.0 + 30 * 3.0) / (10 + 20 + 30)  # of 10, 20, 30 samples


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
    "exchange": Exercise(
        reference=[200.0, 100.0], through=of_each_rank(2), cases=lambda: [(0,), (1,)]
    ),
    "mean_loss": Exercise(
        reference=[_mean()] * 3, through=of_each_rank(3, _mean), cases=lambda: [(0,), (1,), (2,)]
    ),
    "culprit": Exercise(reference=CULPRIT, through=_at, cases=lambda: [(key,) for key in CULPRIT]),
}
