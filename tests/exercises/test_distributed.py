import pytest
import torch

from helpers.exercises.distributed import COLLECTIVE, CULPRIT, EXERCISES, parallel, repaired
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
    "repaired": [
        [repaired(0), repaired(1)],
        [[loss * (1 - 4e-15) for loss in repaired(rank)] for rank in range(2)],  # rounded
    ],
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
    # what two processes return as long as one mistake is left: the same order in both epochs
    ("repaired", [[repaired(0)[0], 0.65196]] * 2, "loss after epoch 1 is not right: 0.6520"),
    # all 16 samples on each; no averaging; the mean of two means
    ("repaired", [[2.25860, 1.60875]] * 2, "rank 0: the test loss after epoch 0 is not right: 2.2"),
    ("repaired", [[1.73651, 0.71878]] * 2, "loss after epoch 0 is not right: 1.7365"),
    ("repaired", [[1.50996, 0.64999]] * 2, "loss after epoch 0 is not right: 1.5100"),
    ("repaired", [repaired(0), [repaired(1)[0], 0.5]], "rank 1: the test loss after epoch 1"),
    ("repaired", [repaired(0)[:1]] * 2, "rank 0: expected 2 test losses, one after each epoch"),
    ("repaired", [None, None], "rank 0: expected 2 test losses"),
    ("repaired", [[*repaired(0)[:1], torch.tensor(0.5)]] * 2, "rank 0: expected numbers"),
    ("repaired", [repaired(0)] * 3, "each of 2 ranks, got 3"),
    ("culprit", {**CULPRIT, "A": (3, "disk")}, "one of batches, branch, memory, order, got 'disk'"),
]


@pytest.mark.parametrize(("name", "ranks"), [("exchange", 2), ("parallel", 2), ("repaired", 2)])
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


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        ([0.5], "expected 2 test losses, one after each epoch"),
        ([0.5, torch.tensor(0.5)], "expected numbers, such as those from"),
        ([0.5, 0.5], "rank 0: the test loss after epoch 0 is not right: 0.5000"),
    ],
)
def test_wrong_test_losses_are_said_so(losses, problem):
    with pytest.raises(WrongAnswer, match=problem):
        EXERCISES["repaired"].through([losses] * 2)(0)


def test_an_unknown_cause_is_said_so():
    answer = EXERCISES["culprit"].through({**CULPRIT, "A": (3, "disk")})
    with pytest.raises(WrongAnswer, match="expected a cause, one of"):
        answer("A")
