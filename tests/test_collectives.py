"""All-reduce of our own: the schedule, the same on tensors, its bytes on the wire, its cost."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import collectives, distributed
from tests import distributed_job as job

MANY = range(1, 18)


# ---- the schedule


@pytest.mark.parametrize("ranks", MANY)
def test_everybody_ends_with_everything(ranks):
    everybody = set(range(ranks))
    for schedule, chunks in (
        (collectives.ring_schedule(ranks), ranks),
        (collectives.tree_schedule(ranks), 1),
    ):
        last = collectives.holdings(schedule, ranks, chunks)[-1]
        assert all(chunk == everybody for rank in last for chunk in rank)


@pytest.mark.parametrize("ranks", MANY)
def test_a_ring_step_uses_every_link_once_in_one_direction(ranks):
    schedule = collectives.ring_schedule(ranks)
    steps = [list(g) for _, g in itertools.groupby(schedule, key=lambda t: t.round)]
    assert len(steps) == 2 * (ranks - 1)
    for step in steps:
        assert sorted(t.sender for t in step) == list(range(ranks))
        assert all(t.receiver == (t.sender + 1) % ranks for t in step)


@pytest.mark.parametrize("ranks", MANY)
def test_after_reduce_scatter_each_rank_has_the_sum_of_one_chunk(ranks):
    held = collectives.holdings(collectives.ring_schedule(ranks), ranks, ranks)[ranks - 1]
    complete = [[c for c, chunk in enumerate(rank) if chunk == set(range(ranks))] for rank in held]
    assert complete == [[(rank + 1) % ranks] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", MANY)
def test_a_tree_takes_logarithmically_many_steps(ranks):
    schedule = collectives.tree_schedule(ranks)
    assert len({t.round for t in schedule}) == 2 * math.ceil(math.log2(ranks))
    assert len(schedule) == 2 * (ranks - 1)
    for _, step in itertools.groupby(schedule, key=lambda t: t.round):
        busy = [rank for t in step for rank in (t.sender, t.receiver)]
        assert len(busy) == len(set(busy))  # one message at a time for each rank


def test_a_schedule_that_counts_twice_is_refused():
    twice = [collectives.Transfer(step, 0, 1, 0, True) for step in range(2)]
    with pytest.raises(ValueError, match=r"ranks \{0\} would be counted twice"):
        collectives.holdings(twice, 2, 1)


# ---- on tensors


@pytest.mark.parametrize(("ranks", "piece"), [(2, 2**22), (3, 2**22), (4, 2**22), (3, 64)])
def test_the_same_sums_as_pytorch_s(ranks, piece, monkeypatch):
    monkeypatch.setattr(collectives, "PIECE", piece)  # of 64 bytes: many slices
    sizes = [0, 1, ranks - 1, ranks, ranks + 1, 1000]
    results = distributed.spawn(job.reduce_everything, sizes, piece, ranks=ranks)
    for rank, (wrong, sent) in enumerate(results):
        assert not wrong
        for (name, dtype, size), sent_bytes in sent.items():
            if name == "ring_all_reduce":
                assert sent_bytes == collectives.ring_bytes(ranks, size, dtype.itemsize)[rank]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rounding_is_bounded_and_all_ranks_have_the_same_bits(ranks):
    results = distributed.spawn(job.reduce_noise, 1003, 5, ranks=ranks)
    own = torch.stack([r["own"] for r in results]).double()
    # n - 1 additions, each rounded to half a unit in the last place of a sum of at most this size
    bound = (ranks - 1) * torch.finfo(torch.float32).eps / 2 * own.abs().sum(0) * (1 + 1e-6)
    for name in ("gloo", "ring", "tree", "acknowledged tree"):
        assert all(torch.equal(r[name], results[0][name]) for r in results)
        assert ((results[0][name].double() - own.sum(0)).abs() <= bound).all()
        if ranks == 2:  # a + b is b + a
            assert torch.equal(results[0][name], results[0]["gloo"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_real_ring_follows_the_schedule(ranks):
    seen = distributed.spawn(job.record_ring, 4 * ranks + 1, ranks=ranks)
    schedule = collectives.ring_schedule(ranks)
    assert all(len(steps) == 2 * (ranks - 1) for steps in seen)
    for t in schedule:
        assert seen[t.sender][t.round]["send"] == (t.receiver, t.chunk)
        arrives_in = "buffer" if t.adds else t.chunk
        assert seen[t.receiver][t.round]["receive"] == (t.sender, arrives_in)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts in Linux only")
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_on_the_wire_by_formula_and_by_the_kernel_s_count(ranks):
    elements = 300_000 * ranks
    header = 3 * 48  # of a message: gloo announces, answers and sends
    messages = 2 * (ranks - 1)
    for counted in distributed.spawn(job.count_written, elements, ranks=ranks):
        size = elements * 4
        assert counted["says"] == Fraction(2 * (ranks - 1), ranks) * size
        assert counted["ring"] == counted["says"] + messages * header
        # gloo's own is a ring, too: the same bytes in more messages
        assert 0 < counted["gloo"] - counted["says"] < 0.02 * size


def test_ring_bytes_shares_what_does_not_divide():
    assert collectives.ring_bytes(1, 10, 4) == [0]
    assert collectives.ring_bytes(3, 0, 4) == [0, 0, 0]
    sent = collectives.ring_bytes(3, 10, 4)
    assert sum(sent) == 2 * 2 * 10 * 4 and max(sent) - min(sent) <= 2 * 4


# ---- cost


def test_one_rank_pays_nothing():
    assert collectives.ring_seconds(1, 1e9, 1e-5, 1e10) == 0
    assert collectives.tree_seconds(1, 1e9, 1e-5, 1e10) == 0
    assert collectives.tree_seconds(1, 1e9, 1e-5, 1e10, pipelined=True) == 0


def replay_seconds(schedule, length, latency, bandwidth):
    """The cost of a schedule by definition: each step lasts as long as its longest message."""
    steps = {t.round for t in schedule}
    return len(steps) * (latency + length / bandwidth)


@given(st.integers(1, 64), st.floats(0, 1e9), st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_cost_is_that_of_the_schedule(ranks, size, latency, bandwidth):
    network = latency, bandwidth
    ring, tree = collectives.ring_schedule(ranks), collectives.tree_schedule(ranks)
    assert collectives.ring_seconds(ranks, size, *network) == pytest.approx(
        replay_seconds(ring, size / ranks, *network), rel=1e-12
    )
    assert collectives.tree_seconds(ranks, size, *network) == pytest.approx(
        replay_seconds(tree, size, *network), rel=1e-12
    )
    assert collectives.tree_seconds(ranks, size, *network, pipelined=True) <= (
        collectives.tree_seconds(ranks, size, *network) * (1 + 1e-12)
    )


def test_trees_win_when_small_and_rings_when_large():
    network = {"latency": 1e-5, "bandwidth": 1e10}
    small, large = ((256, s) for s in (1e3, 1e9))
    assert collectives.tree_seconds(*small, **network) < collectives.ring_seconds(*small, **network)
    assert collectives.tree_seconds(*large, **network) > collectives.ring_seconds(*large, **network)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0, 1), "at least 1 rank, got 0"),
        ((2, -1, 0, 1), "size and latency of at least 0"),
        ((2, 1, -1, 1), "size and latency of at least 0"),
        ((2, 1, 0, 0), "a bandwidth above 0"),
        ((2, 1, 0, math.nan), "a bandwidth above 0"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    for seconds in (collectives.ring_seconds, collectives.tree_seconds):
        with pytest.raises(ValueError, match=message):
            seconds(*arguments)


def test_a_step_by_hand():
    def reduce(size):
        return size / 10  # 10 bytes/s

    step = collectives.step_seconds
    assert step(1, 4, [10, 10, 20], reduce, overlap=False) == 1 + 4 + 4
    # complete after 2, 3, 5 s; reduced in 2-3, 3-4, 5-7
    assert step(1, 4, [10, 10, 20], reduce) == 7
    # one bucket hides nothing; a fast network leaves the last bucket
    assert step(1, 4, [40], reduce) == step(1, 4, [40], reduce, overlap=False) == 9
    assert step(1, 4, [20, 20], lambda size: 0.1) == pytest.approx(5.1)
    # a slow network is busy from the first bucket to the end
    assert step(1, 4, [10, 10, 20], lambda size: size) == 2 + 40


@pytest.mark.parametrize("buckets", [[], [3, 0]])
def test_a_step_needs_buckets(buckets):
    with pytest.raises(ValueError, match="buckets of at least 1 byte"):
        collectives.step_seconds(1, 1, buckets, float)


@given(st.integers(2, 4096), st.floats(1e-7, 1e-3), st.floats(1e7, 1e12))
def test_a_network_is_found_again_from_its_times(ranks, latency, bandwidth):
    half = latency * bandwidth * ranks  # where both parts are equal
    sizes = [half / 30, half / 3, half, half * 8]
    seconds = [collectives.ring_seconds(ranks, s, latency, bandwidth) for s in sizes]
    assert collectives.fit_network(ranks, sizes, seconds) == pytest.approx(
        (latency, bandwidth), rel=1e-6
    )


def test_a_latency_below_zero_becomes_zero():
    latency, bandwidth = collectives.fit_network(2, [1e6, 2e6], [1.0, 2.1])
    assert latency == 0 and 0.9e6 < bandwidth < 1.1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, [1, 2], [1, 2]), "at least 2 ranks, one alone"),
        ((2, [1, 1], [1, 2]), "two or more different sizes"),
        ((2, [1, 2], [1]), "two or more different sizes"),
        ((2, [1, 2], [1, 0]), "a time above 0 for each"),
        ((2, [1, 2], [2, 1]), "the times do not grow"),
    ],
)
def test_points_that_no_network_fits(arguments, message):
    with pytest.raises(ValueError, match=message):
        collectives.fit_network(*arguments)
