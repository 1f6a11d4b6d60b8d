"""Chapter 15, exercises: how many GPUs, a program to mend, a layer in parts, micro-batches."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.exercises.harness import Exercise, of_each_rank

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


class _Block(nn.Module):
    """The block of the chapter's runs/sharding/network.py."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, dtype=torch.float64)
        self.down = nn.Linear(64, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@cache
def trained_alone() -> float:
    """Return the loss on all samples after 20 steps of a single process, gradients clipped to 1."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :1]) + x[:, 1:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [_Block() for _ in range(4)]
        model = nn.Sequential(*blocks, nn.Linear(16, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return F.mse_loss(model(x), y).item()


def _alone(rank: int) -> float:
    return trained_alone()


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
    "mended": Exercise(
        reference=_alone, through=of_each_rank(2, trained_alone), cases=lambda: [(0,), (1,)]
    ),
    "mlp_terms": Exercise(reference=mlp_terms, cases=_layers),
    "micro_batches_for": Exercise(reference=micro_batches_for, cases=_pipelines),
}
