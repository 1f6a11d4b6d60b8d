import pytest
import torch

from helpers.exercises.distributed import COLLECTIVE, CULPRIT, EXERCISES, parallel
from helpers.exercises.harness import UNANSWERED, WrongAnswer, check

RIGHT = {
    "collective": [dict(COLLECTIVE)],
    "exchange": [[200.0, 100.0]],
    "parallel": [
        [parallel(0), parallel(1)],
        [  # rounded
            [*[w * (1 + 4e-15) for w in parallel(rank)[:4]], 32, parallel(rank)[5] * (1 - 4e-15)]
            for rank in range(2)
        ],
    ],
    "culprit": [dict(CULPRIT), {run: list(found) for run, found in CULPRIT.items()}],
}
UNTRAINED = [0.332378, 0.146951, -0.028721, 0.297514]
WRONG = [
    ("collective", {**COLLECTIVE, "C": "reduce"}, "value"),  # the other ranks need it, too
    ("collective", {**COLLECTIVE, "D": "all_reduce"}, "value"),
    ("exchange", [100.0, 200.0], "value"),  # nothing was exchanged
    ("exchange", [200.0, 100.0, 100.0], "each of 2 ranks, got 3"),
    # both did all the work
    ("parallel", [[*parallel(0)[:4], 64, parallel(0)[5]]] * 2, "rank 0: the number of samples"),
    ("parallel", [parallel(0), [*parallel(1)[:4], 64, parallel(1)[5]]], "rank 1: the number of s"),
    ("parallel", [[*UNTRAINED, 32, parallel(0)[5]]] * 2, "rank 0: the weights are not right"),
    # another batch size
    ("parallel", [[*[w + 1e-3 for w in parallel(0)[:4]], 32, 0.5]] * 2, "the weights are not"),
    # each its own loss; the sum of the losses
    ("parallel", [[*parallel(0)[:5], 0.5], [*parallel(1)[:5], 0.6]], "the loss is not right: 0.5"),
    ("parallel", [[*parallel(0)[:5], 2 * parallel(0)[5]]] * 2, "rank 0: the loss is not right"),
    ("parallel", [parallel(0)[:5], parallel(1)[:5]], "rank 0: expected 6 results"),
    ("parallel", [0.5, 0.5], "rank 0: expected 6 results"),
    ("parallel", [[*parallel(0)[:5], torch.tensor(0.5)]] * 2, "rank 0: expected numbers"),
    ("parallel", [parallel(0)] * 3, "each of 2 ranks, got 3"),
    # the one below Root Cause
    ("culprit", {**CULPRIT, "A": (0, "memory")}, "value is not right: '0'"),
    ("culprit", {**CULPRIT, "B": (0, "batches")}, "value is not right: '0'"),
    ("culprit", {**CULPRIT, "C": (0, "batches")}, "value is not right: 'batches'"),
    ("culprit", {**CULPRIT, "D": (0, "order")}, "value is not right: '0'"),  # nobody knows
    ("culprit", {**CULPRIT, "B": 1}, "two things, the rank and the cause"),
    ("culprit", {**CULPRIT, "B": (1,)}, "two things, the rank and the cause"),
    ("culprit", {**CULPRIT, "A": (3, "disk")}, "one of batches, branch, memory, order, got 'disk'"),
]


@pytest.mark.parametrize(("name", "ranks"), [("exchange", 2), ("parallel", 2)])
def test_a_result_too_many_or_too_few_is_said_so(name, ranks):
    for wrong in (ranks - 1, ranks + 1):
        answer = EXERCISES[name].through([200.0] * wrong)
        with pytest.raises(
            WrongAnswer, match=f"one result from each of {ranks} ranks, got {wrong}"
        ):
            answer(0)


@pytest.mark.parametrize("found", [(..., ...), (3, ...), (..., "memory")])
def test_half_an_answer_about_a_run_is_none(found, capsys):
    check("distributed.culprit", {**CULPRIT, "A": found})
    assert capsys.readouterr().out == f"✗ {UNANSWERED}\n"


def test_tensors_in_place_of_numbers_are_said_so():
    results = [*parallel(0)[:5], torch.tensor(0.5)]
    with pytest.raises(WrongAnswer, match="expected numbers, such as those from"):
        EXERCISES["parallel"].through([results] * 2)(0)


def test_an_unknown_cause_is_said_so():
    answer = EXERCISES["culprit"].through({**CULPRIT, "A": (3, "disk")})
    with pytest.raises(WrongAnswer, match="expected a cause, one of"):
        answer("A")
