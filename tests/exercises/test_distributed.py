import pytest

from helpers.exercises.distributed import COLLECTIVE, CULPRIT, EXERCISES, parallel
from helpers.exercises.harness import WrongAnswer

RIGHT = {
    "collective": [dict(COLLECTIVE)],
    "exchange": [[200.0, 100.0]],
    "parallel": [
        [parallel(0), parallel(1)],
        [[w * (1 + 4e-15) for w in parallel(rank)[:4]] + [32] for rank in range(2)],  # rounded
    ],
    "culprit": [dict(CULPRIT)],
}
WRONG = [
    ("collective", {**COLLECTIVE, "C": "reduce"}, "value"),  # the other ranks need it, too
    ("collective", {**COLLECTIVE, "D": "all_reduce"}, "value"),
    ("exchange", [100.0, 200.0], "value"),  # nothing was exchanged
    ("exchange", [200.0, 100.0, 100.0], "each of 2 ranks, got 3"),
    ("parallel", [[*parallel(0)[:4], 64]] * 2, "value"),  # both did all of the work
    ("parallel", [[*parallel(0)[:4], 32], [*parallel(1)[:4], 64]], "value"),
    ("parallel", [[0.332378, 0.146951, -0.028721, 0.297514, 32]] * 2, "value"),  # not trained
    ("parallel", [[w + 1e-3 for w in parallel(0)[:4]] + [32]] * 2, "value"),  # another batch size
    ("parallel", [parallel(0)[:4], parallel(1)[:4]], "expected"),  # the samples are missing
    ("parallel", [parallel(0)] * 3, "each of 2 ranks, got 3"),
    ("culprit", {"A": 0, "B": 1, "C": 0}, "value"),  # the one that reported it
    ("culprit", {"A": 3, "B": 0, "C": 0}, "value"),
]


@pytest.mark.parametrize(("name", "ranks"), [("exchange", 2), ("parallel", 2)])
def test_a_result_too_many_or_too_few_is_said_so(name, ranks):
    for wrong in (ranks - 1, ranks + 1):
        answer = EXERCISES[name].through([200.0] * wrong)
        with pytest.raises(
            WrongAnswer, match=f"one result from each of {ranks} ranks, got {wrong}"
        ):
            answer(0)
