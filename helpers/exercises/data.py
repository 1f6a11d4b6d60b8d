"""Chapter 05, exercises: stalls, weights, statistics that merge, padding, shares."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helpers.exercises.harness import Exercise


def _stall(load: Tensor, step: Tensor, workers: int) -> Tensor:
    period = load + step if workers == 0 else torch.maximum(step, load / workers)
    return 1 - step / period


def _stall_cases() -> list[tuple]:
    load = torch.tensor([0.5, 1, 2, 7, 0, 1e6, 1e-9], dtype=torch.float64)
    cases = []
    for seconds in (1.0, 0.5, 3.0):
        step = torch.full_like(load, seconds)
        cases += [(load, step, workers) for workers in (0, 1, 2, 5)]
    grid = torch.rand(3, 4, dtype=torch.float64) + 0.1
    cases += [(grid.T, 2 * grid.T, workers) for workers in (0, 3)]  # not contiguous
    cases += [(load[:0], load[:0], 2)]
    return cases


def _sample_weights(labels: Tensor) -> Tensor:
    same = labels[:, None] == labels
    return 1 / same.sum(1).double()


def _label_cases() -> list[tuple]:
    short = [[0, 0, 1], [5, 2, 2, 2], [3], [1, 0, 0, 4, 4, 1, 1]]
    many = torch.randint(50, (300,))
    return [
        *((torch.tensor(labels),) for labels in short),
        (many,),
        (torch.stack([many, many + 1], 1)[:, 0],),  # not contiguous
        (torch.zeros(0, dtype=torch.int64),),
    ]


def _statistics(x: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of all values, float64 [3]."""
    count = torch.tensor(x.numel(), dtype=torch.float64)
    mean = x.sum() / count.clamp(min=1)
    return torch.stack([count, mean, (x - mean).square().sum()])


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Chan, Golub and LeVeque 1983; a test compares it with the statistics of all the data."""
    count = a[0] + b[0]
    gap = b[1] - a[1]
    share = b[0] / count.clamp(min=1)
    return torch.stack([count, a[1] + gap * share, a[2] + b[2] + gap**2 * a[0] * share])


def _merge_cases() -> list[tuple]:
    u = torch.tensor([1, 2, 4, -3], dtype=torch.float64) / 3
    v = torch.tensor([10, 0.5], dtype=torch.float64) / 3
    w = torch.randn(40, dtype=torch.float64)
    pairs = [(u, v), (v, u), (u[:1], v[:1]), (u, w), (u.repeat(50), v - 100), (w, w)]
    pairs += [(u, u[:0]), (u[:0], v), (u[:0], v[:0])]
    pairs += [(u + 1e5, v + 1e5), (w + 1e5, u + 1e5)]
    cases = [(_statistics(x), _statistics(y)) for x, y in pairs]
    every_other = torch.stack([_statistics(u), _statistics(v)], 1)  # columns, not contiguous
    return [*cases, (every_other[:, 0], every_other[:, 1])]


def _pad_left(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    real = [torch.ones_like(sequence, dtype=torch.bool) for sequence in batch]
    how = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(batch, **how), pad_sequence(real, **how)


def _sequence_cases() -> list[tuple]:
    texts = [
        [[5, 0, 7], [9]],
        [[1], [2, 3]],
        [[], [4, 4]],
        [[0, 0]],
        [[6], [], [8, 0, 0, 1]],
        [[], []],
        [[2**40, -1], [3]],
    ]
    cases = [([torch.tensor(text, dtype=torch.int64) for text in batch],) for batch in texts]
    columns = torch.randint(9, (4, 3)).unbind(1)  # each of them not contiguous
    return [*cases, ([columns[0], columns[1][1:], columns[2][:2]],)]


def _share(n: int, rank: int, world: int, worker: int, workers: int) -> list[int]:
    mine = list(range(n))[: n // world * world][rank::world]
    return mine[worker::workers] if workers else mine


def _share_cases() -> list[tuple]:
    cases = []
    for n in (0, 1, 7, 12, 100):
        for world in (1, 2, 3):
            for workers in (0, 1, 2, 5):
                for rank in range(world):
                    cases += [(n, rank, world, w, workers) for w in range(max(1, workers))]
    return cases


EXERCISES = {
    "stall": Exercise(reference=_stall, cases=_stall_cases),
    "sample_weights": Exercise(reference=_sample_weights, cases=_label_cases),
    # Means around 1e5 are known to 1.5e-11, so squared deviations of a few units to some 1e-9.
    # The formula with squares is off by 1e-5 there.
    "merge": Exercise(reference=_merge, cases=_merge_cases, scale=1e4),
    "collate": Exercise(reference=_pad_left, cases=_sequence_cases),
    "share": Exercise(reference=_share, cases=_share_cases),
}
