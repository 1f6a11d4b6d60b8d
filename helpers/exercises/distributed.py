"""Chapter 14, exercises: which device, which collective, an exchange, a mean, who was to blame."""

from collections.abc import Callable
from typing import Any

from helpers.exercises.harness import Exercise

# ---- 1: where a rank runs


def place(rank: int, per_node: int) -> tuple[int, int]:
    """Return (number of the node, local rank)."""
    return divmod(rank, per_node)


# ---- 2 and 5: a letter for each question; 3 and 4: what each rank has returned


def _at(answer: Any) -> Callable[[Any], Any]:
    return answer if callable(answer) else answer.__getitem__


COLLECTIVE = {
    "A": "broadcast",
    "B": "gather",
    "C": "all-reduce",
    "D": "reduce-scatter",
    "E": "barrier",
}
CULPRIT = {"A": 3, "B": 1, "C": 0}

EXERCISES = {
    "place": Exercise(
        reference=place, cases=lambda: [(0, 4), (3, 4), (4, 4), (5, 4), (17, 8), (2, 1)]
    ),
    "collective": Exercise(
        reference=COLLECTIVE, through=_at, cases=lambda: [(key,) for key in COLLECTIVE]
    ),
    "exchange": Exercise(reference=[200.0, 100.0], through=_at, cases=lambda: [(0,), (1,)]),
    # means 1, 2, 3 over 10, 20, 30 samples
    "mean_loss": Exercise(reference=[140 / 60] * 3, through=_at, cases=lambda: [(0,), (1,), (2,)]),
    "culprit": Exercise(reference=CULPRIT, through=_at, cases=lambda: [(key,) for key in CULPRIT]),
}
