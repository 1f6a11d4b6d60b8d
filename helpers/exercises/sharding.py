"""Chapter 15, exercises: GPUs needed, a program to mend, a mesh, a pipeline, a batch for FSDP."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.exercises.harness import Exercise, WrongAnswer

NEAR = 1e-6  # losses that differ by less are equal: a few digits would vary from machine to machine

# ---- 1: how many GPUs


def gpus_needed(parameters: int, memory: int, level: int) -> int | None:
    """Return the fewest GPUs on which the states fit, in float32 with Adam; None if none suffice.

    parameters: their number. memory: bytes of a GPU for parameters, gradients and state. level: 0
    for DDP, 1 to 3 for ZeRO.
    """
    sharded = parameters * (0, 8, 12, 16)[level]
    left = memory - (16 * parameters - sharded)
    if left < 0 or (left == 0 and sharded):
        return None
    return max(1, -(-sharded // left)) if sharded else 1  # rounded up, without floats


def _trainings() -> list[tuple]:
    billion = 10**9
    cases = [(7 * billion, 80 * billion, level) for level in range(4)]
    cases += [(billion, 16 * billion, level) for level in range(4)]
    cases += [(7 * billion, 28 * billion, level) for level in range(4)]
    cases += [(7 * billion, 28 * billion + 10**6, 2)]  # 84,000 GPUs: far beyond any short search
    cases += [(5, 26, 3)]  # 80 / 3 is more than 26
    return [*cases, (70 * billion, 80 * billion, 3), (100, 10**6, 3), (3, 20, 3)]


# ---- the chapter's model and data, for what one process gets


class _Block(nn.Module):
    """The block of the chapter's runs/sharding/network.py."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, dtype=torch.float64)
        self.down = nn.Linear(64, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(_Block() for _ in range(4)), nn.Linear(16, 1, dtype=torch.float64))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :1]) + x[:, 1:2]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **clip: float) -> list:
    """Return the loss before each step and after the last one."""
    x, y = _data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), **clip)
        optimizer.step()
        losses.append(loss.item())
    return [*losses, F.mse_loss(model(x), y).item()]


# ---- 2: a program mended: what each of 2 ranks has returned


@cache
def trained_alone() -> tuple[float, float]:
    """Return the loss of a single process before and after 20 steps, gradients clipped to 1."""
    model = _model()
    losses = _train(model, torch.optim.SGD(model.parameters(), lr=0.1), 20, max_norm=1.0)
    return losses[0], losses[-1]


def _after_training(answer: Any) -> Callable[[int], Any]:
    """Say of a wrong loss whose it is, and whether the model has been trained at all."""

    def at(rank: int) -> Any:
        if callable(answer):
            return answer(rank)
        if len(answer) != 2:
            raise WrongAnswer(f"expected the results of 2 ranks, got {len(answer)}")
        before, after = trained_alone()
        if abs(answer[rank] - after) < NEAR:
            return after
        words = f"rank {rank} returned a loss of {answer[rank]:.4f}"
        if abs(answer[rank] - before) < NEAR:
            raise WrongAnswer(f"{words}, the loss before the first step: nothing was trained")
        raise WrongAnswer(f"{words}, which is not that of a single process")

    return at


# ---- 3: a place on a mesh


def on_mesh(rank: int, data: int, tensor: int, samples: int, width: int) -> tuple:
    """Return the first sample of a rank, how many it has, and the shapes of its two weights.

    The mesh has `data` rows and `tensor` columns. up.weight is [4 width, width], split by
    ColwiseParallel, and down.weight [width, 4 width], by RowwiseParallel; then FSDP cuts both
    along dimension 0. All can be divided.
    """
    row = rank // tensor
    count = samples // data
    up = (4 * width // (tensor * data), width)
    down = (width // data, 4 * width // tensor)
    return row * count, count, up, down


def _places() -> list[tuple]:
    cases = [(rank, 2, 4, 64, 16) for rank in range(8)]
    cases += [(rank, 4, 2, 64, 16) for rank in (1, 2, 7)]
    return [*cases, (5, 8, 1, 16, 8), (3, 1, 4, 12, 8), (0, 1, 1, 5, 4)]


# ---- 4: a pipeline


def pipeline_plan(stages: int, stage: int, percent: int) -> tuple[int, int]:
    """Return the fewest micro-batches, and for how many of them a stage stores activations.

    The bubble is at most `percent`% of the time, and 1F1B needs as many micro-batches as stages.
    """
    waiting = stages - 1
    whole = -(-100 * waiting // percent)  # m + s - 1, rounded up
    return max(whole - waiting, stages), stages - stage


def _pipelines() -> list[tuple]:
    cases = [(4, stage, 10) for stage in range(4)]
    cases += [(4, 1, 75), (8, 7, 60), (2, 0, 50)]  # as many as stages are enough, or needed
    cases += [(8, 0, 7), (8, 3, 1), (64, 5, 3), (6, 2, 100)]
    return [*cases, (1, 0, 5), (3, 2, 30)]


# ---- 5: the smallest batch with which gathering is hidden


def smallest_batch(
    machines: int, gpus: int, cards: int, card_bandwidth: int, flops: int, sequence_length: int
) -> int:
    """Return the fewest sequences of a batch for which T >= C / beta on each GPU.

    beta is the bandwidth of all cards of a machine together. Every GPU has equally many sequences,
    and there are at least 2 machines, or nothing would cross a card.
    """
    each = 1
    beta = cards * card_bandwidth
    needed = flops // (beta * sequence_length)  # rounded down: a first guess without floats
    if needed > 1:
        each = needed
    if each * sequence_length * beta < flops:
        each += 1
    return machines * gpus * each


def _clusters() -> list[tuple]:
    flops, card = 400 * 10**12, 25 * 10**9
    cases = [(4, 8, cards, card, flops, 4096) for cards in (8, 4, 1)]
    cases += [(2, 4, 4, 2 * card, flops, length) for length in (256, 1000, 8192)]
    cases += [(2, 8, 8, card, flops, 2000), (2, 8, 8, card, flops, 1999)]  # exactly, and nearly
    cases += [(3, 2, 1, 1, 10**17 + 1, 1)]  # more than a float can count
    return [*cases, (16, 8, 8, 2 * card, flops, 512), (2, 1, 1, card, flops, 4096)]


EXERCISES = {
    "gpus_needed": Exercise(reference=gpus_needed, cases=_trainings),
    "mended": Exercise(
        reference=lambda rank: trained_alone()[1],
        through=_after_training,
        cases=lambda: [(0,), (1,)],
    ),
    "on_mesh": Exercise(reference=on_mesh, cases=_places),
    "pipeline_plan": Exercise(reference=pipeline_plan, cases=_pipelines),
    "smallest_batch": Exercise(reference=smallest_batch, cases=_clusters),
}
