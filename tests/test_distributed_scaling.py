"""All-reduces through one rank and over nodes; where the buckets are in time."""

import pytest
import torch
import torch.distributed as dist

from helpers.collectives import ring_seconds, step_seconds
from helpers.distributed import RankError, process_group, spawn
from helpers.distributed_scaling import (
    bucket_spans,
    equal_buckets,
    rank0_all_reduce,
    rank0_seconds,
    two_level_all_reduce,
    two_level_groups,
)


def through_rank0(elements):
    with process_group("gloo") as place:
        ours = torch.arange(elements) * 10**place.rank
        theirs = ours.clone()
        sent = rank0_all_reduce(ours)
        dist.all_reduce(theirs)
        return torch.equal(ours, theirs), sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_through_rank0_is_an_all_reduce_and_rank0_sends_to_all(ranks):
    results = spawn(through_rank0, 7, ranks=ranks)
    assert all(equal for equal, _ in results)
    assert [sent for _, sent in results] == [56 * (ranks - 1)] + [56] * (ranks - 1)


def test_each_message_is_waited_for():
    assert rank0_seconds(1, 100, 1.0, 10.0) == 0
    assert rank0_seconds(4, 100, 1.0, 10.0) == 6 * (1.0 + 10.0)


def in_two_levels(per_node, elements):
    with process_group("gloo") as place:
        inside, between = two_level_groups(per_node)
        ours = torch.arange(elements) * 10**place.rank
        theirs = ours.clone()
        two_level_all_reduce(ours, inside, between)
        dist.all_reduce(theirs)
        members = [dist.get_process_group_ranks(group) for group in (inside, between)]
        return torch.equal(ours, theirs), members


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_two_levels_are_an_all_reduce(per_node):
    results = spawn(in_two_levels, per_node, 8, ranks=4)
    assert all(equal for equal, _ in results)
    for rank, (_, (inside, between)) in enumerate(results):
        first = rank // per_node * per_node
        assert inside == list(range(first, first + per_node))
        assert between == list(range(rank % per_node, 4, per_node))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 8), "4 ranks cannot be divided into nodes of 3"),
        ((2, 7), "7 elements cannot be shared equally by 2"),
    ],
)
def test_what_does_not_divide_is_refused(arguments, message):
    with pytest.raises(RankError, match=message):
        spawn(in_two_levels, *arguments, ranks=4, echo=False)


def test_nodes_and_elements_are_checked():
    with pytest.raises(RankError, match="ranks cannot be divided into nodes of 0"):
        spawn(in_two_levels, 0, 8, ranks=2, echo=False)


@pytest.mark.parametrize(("size", "buckets"), [(10, 1), (10, 3), (10, 10), (400_000_000, 64)])
def test_equal_buckets_add_up(size, buckets):
    found = equal_buckets(size, buckets)
    assert len(found) == buckets and sum(found) == size and max(found) - min(found) <= 1


@pytest.mark.parametrize("buckets", [0, 11])
def test_buckets_have_at_least_a_byte(buckets):
    with pytest.raises(ValueError, match="from 1 bucket to one for each byte of 10"):
        equal_buckets(10, buckets)


def test_buckets_follow_each_other_when_they_are_complete():
    # forward 1 s, backward 4 s, four buckets of 10 bytes, 2 bytes/s: the network is behind
    spans = bucket_spans(1.0, 4.0, [10] * 4, lambda size: size / 2)
    assert spans == [(2, 7), (7, 12), (12, 17), (17, 22)]
    # 20 bytes/s: it waits for backward
    spans = bucket_spans(1.0, 4.0, [10] * 4, lambda size: size / 20)
    assert spans == [(2, 2.5), (3, 3.5), (4, 4.5), (5, 5.5)]


def test_the_last_bucket_ends_the_step():
    def reduce(size):
        return ring_seconds(8, size, 50e-6, 20e9)

    for number in (1, 3, 64):
        buckets = equal_buckets(400_000_000, number)
        end = bucket_spans(0.02, 0.04, buckets, reduce)[-1][1]
        assert end == pytest.approx(step_seconds(0.02, 0.04, buckets, reduce), rel=1e-12)
