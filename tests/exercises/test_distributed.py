import pytest

from helpers.exercises.distributed import COLLECTIVE, CULPRIT, EXERCISES
from helpers.exercises.harness import WrongAnswer

RIGHT = {
    "collective": [dict(COLLECTIVE)],
    "exchange": [[200.0, 100.0]],
    "mean_loss": [
        [(1 * 10 + 2 * 20 + 3 * 30) / (10 + 20 + 30)] * 3,
        [2.3333337] * 3,  # float32, rounded a few times
    ],
    "culprit": [dict(CULPRIT)],
}
WRONG = [
    ("collective", {**COLLECTIVE, "C": "reduce"}, "value"),  # the other ranks need it, too
    ("collective", {**COLLECTIVE, "D": "all_reduce"}, "value"),
    ("exchange", [100.0, 200.0], "value"),  # nothing was exchanged
    ("exchange", [200.0, 100.0, 100.0], "each of 2 ranks, got 3"),
    ("mean_loss", [2.33333] * 3, "value is not right"),  # typed, not computed
    ("mean_loss", [2.333329, 2.333329, 2.333329], "value is not right"),
    ("mean_loss", [7 / 3] * 4, "each of 3 ranks, got 4"),
    ("mean_loss", [2.0] * 3, "value is not right"),  # the mean of the means
    ("mean_loss", [7 / 3, 2.0, 3.0], "value is not right"),  # only one rank has it
    ("culprit", {"A": 0, "B": 1, "C": 0}, "value"),  # the one that reported it
    ("culprit", {"A": 3, "B": 0, "C": 0}, "value"),
]


@pytest.mark.parametrize(("name", "ranks"), [("exchange", 2), ("mean_loss", 3)])
def test_a_result_too_many_or_too_few_is_said_so(name, ranks):
    for wrong in (ranks - 1, ranks + 1):
        answer = EXERCISES[name].through([200.0] * wrong)
        with pytest.raises(
            WrongAnswer, match=f"one result from each of {ranks} ranks, got {wrong}"
        ):
            answer(0)
