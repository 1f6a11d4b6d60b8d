"""How jobs of several ranks fail: each ends by itself, and says what the lesson says it does."""

import time

import pytest
import torch
import torch.distributed as dist

from helpers.distributed import RankError, spawn
from tests import failures_job as failures

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.fixture(scope="module", autouse=True)
def warm():
    spawn(failures.mismatch, "order", timeout=60)


def test_a_dead_rank_is_noticed_at_once():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal 9") as caught:
        spawn(failures.rank_dies, 1, echo=False)
    assert "then rank 0 " in str(caught.value)
    assert time.monotonic() - start < 15  # the timeout of the group is 20 s: nobody waited for it


def test_a_rank_that_hangs_costs_the_timeout():
    start = time.monotonic()
    with pytest.raises(RankError, match="Timed out waiting 1000ms") as caught:
        spawn(failures.rank_hangs, 1, 1.0, echo=False)
    assert caught.value.rank == 0 and time.monotonic() - start >= 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("operation", "Op type: (ALLREDUCE *vs BROADCAST|BROADCAST *vs ALLREDUCE)"),
        ("shape", "Tensor shapes: (4 *vs 6|6 *vs 4)"),
        ("dtype", "Tensor dtypes: (Float *vs Double|Double *vs Float)"),
        ("missing", "Ranks 1 failed to pass monitoredBarrier in 1000 ms"),
    ],
)
def test_with_detail_the_error_names_both_calls(kind, message):
    with pytest.raises(RankError, match=message):
        spawn(failures.mismatch, kind, 1.0, env=DETAIL, echo=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("operation", "Timed out waiting 1000ms"),
        ("shape", r"(?s)killed by signal 6 \(SIGABRT\).*size doesn't match expected"),
        ("dtype", r"(?s)killed by signal 6 \(SIGABRT\).*size doesn't match expected"),
        ("missing", "Timed out waiting 1000ms"),
    ],
)
def test_without_detail_it_does_not(kind, message):
    with pytest.raises(RankError, match=message):
        spawn(failures.mismatch, kind, 1.0, echo=False)


def test_swapped_calls_go_unnoticed_and_sum_different_things():
    for env in ({}, DETAIL):
        assert spawn(failures.mismatch, "order", env=env) == [torch.tensor([101.0])] * 2


def test_an_unknown_mismatch():
    with pytest.raises(ValueError, match="a kind of mismatch, one of operation, shape"):
        failures.mismatch("mood")


def test_a_port_that_is_taken():
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
        failures.port_in_use()


def test_uneven_batches_end_in_a_timeout_or_with_join():
    with pytest.raises(RankError, match="Timed out waiting 3000ms"):
        spawn(failures.uneven_batches, [3, 5], False, 3.0, echo=False)
    results = spawn(failures.uneven_batches, [3, 5], True, 60.0)
    assert [r["steps"] for r in results] == [3, 5]
    assert torch.equal(results[0]["weight"], results[1]["weight"])
    # 3 steps with gradients (1, 1), then 2 with the average of (1, 1) and nothing
    (before,) = spawn(failures.uneven_batches, [0], False, 60.0, ranks=1)
    moved = before["weight"] - results[0]["weight"]
    torch.testing.assert_close(moved, torch.full((1, 2), 0.1 * (3 + 2 / 2)), rtol=0, atol=1e-6)


def test_the_order_of_an_epoch_needs_set_epoch():
    forgotten = failures.epoch_orders(10, 2, 3, set_epoch=False)
    assert forgotten[0] == forgotten[1] == forgotten[2]
    right = failures.epoch_orders(10, 2, 3, set_epoch=True)
    assert right[0] != right[1] != right[2]
    for epoch in right:
        assert sorted(epoch[0] + epoch[1]) == list(range(10))
    # 9 samples on 2 ranks: one is given twice
    (padded,) = failures.epoch_orders(9, 2, 1, set_epoch=True)
    assert sorted(set(padded[0] + padded[1])) == list(range(9)) and len(padded[0]) == 5
