"""Chapter 14, exercises: whose sample, which device, the mean over ranks, a reduce-scatter."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from helpers.exercises.harness import Exercise

# ---- 1: where a rank runs


def place(rank: int, per_node: int) -> tuple[int, int]:
    """Return (number of the node, local rank)."""
    return divmod(rank, per_node)


# ---- 2: the samples of a rank


def rows_of(rank: int, ranks: int, samples: int) -> list[int]:
    """Return what DistributedSampler gives to `rank` without shuffling."""
    return list(DistributedSampler(range(samples), ranks, rank, shuffle=False))


def _splits() -> list[tuple]:
    return [
        (rank, ranks, samples)
        for ranks, samples in [(1, 3), (2, 8), (2, 9), (4, 10), (3, 12), (3, 2)]
        for rank in range(ranks)
    ]


# ---- 3: the mean of all samples


def mean_loss(means: Sequence[float], counts: Sequence[int]) -> float:
    """Return the mean over all samples, from each rank's mean and its number of samples."""
    total = math.fsum(mean * count for mean, count in zip(means, counts, strict=True))
    return total / sum(counts)


def _ranks() -> list[tuple]:
    return [
        ([1.0, 3.0], [64, 64]),
        ([1.0, 3.0], [96, 32]),
        ([0.5], [10]),
        ([2.0, 0.25, 1.0], [1, 2, 5]),
        ([4.0, 0.0], [3, 0]),
    ]


# ---- 4: reduce-scatter, in one process


def reduce_scatter(held: list[Tensor]) -> list[Tensor]:
    """Return what each rank holds after a reduce-scatter of `held`, one tensor for each rank."""
    return list(torch.stack(held).sum(0).chunk(len(held)))


def _held() -> list[tuple]:
    four = [10**rank * torch.arange(1, 5) for rank in range(4)]
    return [
        (four,),
        ([torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])],),
        ([torch.randn(6, 2).round() for _ in range(3)],),
        ([torch.tensor([7])],),
    ]


EXERCISES = {
    "place": Exercise(
        reference=place, cases=lambda: [(0, 4), (3, 4), (4, 4), (5, 4), (17, 8), (2, 1)]
    ),
    "rows_of": Exercise(reference=rows_of, cases=_splits),
    "mean_loss": Exercise(reference=mean_loss, cases=_ranks),
    "reduce_scatter": Exercise(reference=reduce_scatter, cases=_held),
}
