"""Chapter 15, exercises: how many GPUs, a program to mend, a layer in parts, micro-batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.exercises.harness import Exercise

# ---- 1: how many GPUs


def gpus_needed(parameters: int, memory: int, stage: int) -> int | None:
    """Return the fewest GPUs on which the states fit, in float32 with Adam; None if none suffice.

    parameters: their number. memory: bytes of a GPU for parameters, gradients and state. stage: 0
    for DDP, 1 to 3 for ZeRO.
    """
    sharded = parameters * (0, 8, 12, 16)[stage]
    left = memory - (16 * parameters - sharded)
    if left < 0 or (left == 0 and sharded):
        return None
    return max(1, -(-sharded // left)) if sharded else 1  # rounded up, without floats


def _trainings() -> list[tuple]:
    billion = 10**9
    cases = [(7 * billion, 80 * billion, stage) for stage in range(4)]
    cases += [(billion, 16 * billion, stage) for stage in range(4)]
    cases += [(7 * billion, 28 * billion, stage) for stage in range(4)]
    cases += [(7 * billion, 28 * billion + 10**6, 2)]  # 84,000 GPUs: far beyond any short search
    cases += [(5, 26, 3)]  # 80 / 3 is more than 26
    return [*cases, (70 * billion, 80 * billion, 3), (100, 10**6, 3), (3, 20, 3)]


# ---- 2: a program mended: what each of 2 ranks has returned

MENDED = 0.0810990  # the loss of a single process with clip_grad_norm_


def _within(answer: Any) -> Callable[[int], Any]:
    """Return the loss itself for a float that differs by less than the exercise allows."""

    def at(rank: int) -> Any:
        found = answer(rank) if callable(answer) else answer[rank]
        if isinstance(found, float) and abs(found - MENDED) < 1e-6:  # clipped with 1e-6 or not
            return MENDED
        return round(found, 4) if isinstance(found, float) else found

    return at


# ---- 3: two layers in parts


def mlp_terms(x: Tensor, up: Tensor, down: Tensor, ranks: int) -> list[Tensor]:
    """Return the term of each rank; their sum is relu(x upᵀ) downᵀ. x: [B, C], up: [H, C]."""
    pairs = zip(up.chunk(ranks, 0), down.chunk(ranks, 1), strict=True)
    return [F.linear(torch.relu(F.linear(x, a)), b) for a, b in pairs]


def _layers() -> list[tuple]:
    def numbers(*shape: int) -> Tensor:  # whole: all sums are exact
        return torch.randint(-4, 5, shape).double()

    return [
        (numbers(3, 4), numbers(8, 4), numbers(5, 8), 2),
        (numbers(1, 2), numbers(6, 2), numbers(2, 6), 3),
        (numbers(4, 3), numbers(7, 3), numbers(3, 7), 2),  # 4 and 3 hidden values
        (numbers(2, 3), numbers(4, 3), numbers(3, 4), 1),
    ]


# ---- 4: enough micro-batches


def micro_batches_for(stages: int, percent: int) -> int:
    """Return the fewest micro-batches with which the bubble is at most `percent` % of the time."""
    found = 1
    while 100 * (stages - 1) > percent * (found + stages - 1):
        found += 1
    return found


def _pipelines() -> list[tuple]:
    cases = [(4, 25), (4, 50), (8, 13), (2, 50), (1, 10), (4, 75), (16, 30), (4, 20)]
    return [*cases, (5, 35)]  # 7.4: to the nearest is too few


EXERCISES = {
    "gpus_needed": Exercise(reference=gpus_needed, cases=_trainings),
    "mended": Exercise(reference=[MENDED] * 2, through=_within, cases=lambda: [(0,), (1,)]),
    "mlp_terms": Exercise(reference=mlp_terms, cases=_layers),
    "micro_batches_for": Exercise(reference=micro_batches_for, cases=_pipelines),
}
