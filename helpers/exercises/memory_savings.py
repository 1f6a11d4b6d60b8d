"""Chapter 09, exercises: a peak, weights of micro-batches, groups, a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.exercises.harness import Exercise
from helpers.memory import SavedTensors
from helpers.memory_savings import group_peak

# ---- 1: the peak with checkpoints


def peak(layers: int, width: int, vocabulary: int, tokens: int, parameters: int) -> int:
    """Return the bytes of a step at its peak: float32, AdamW, every block checkpointed."""
    unit = 4 * tokens * width
    return 12 * parameters + layers * unit + max(20 * unit, 12 * tokens * vocabulary)


def _models() -> list[tuple]:
    return [
        (8, 64, 256, 2048, 424_576),
        (8, 64, 8192, 2048, 932_480),  # the logits are larger
        (12, 768, 50257, 1024, 124_439_808),
        (48, 1600, 50257, 4096, 1_557_611_200),
        (2, 512, 1000, 100, 7_000_000),
        (1, 32, 320, 7, 30_000),
    ]


# ---- 2: weights of micro-batches


def weights(targets: list[Tensor]) -> list[float]:
    """Return the factor of the mean loss of each micro-batch; -100 marks what does not count."""
    counts = [int((t != -100).sum()) for t in targets]
    return [count / sum(counts) for count in counts]


def _targets() -> list[tuple]:
    cases = []
    for lengths in ([4, 4], [1, 7], [3, 0, 5], [2], [8, 1, 1, 6], [5, 5, 5, 1]):
        parts = []
        for length in lengths:
            part = torch.randint(9, (2, 8))  # a target of 0 counts like any other
            part[0, length:] = -100
            part[1, :] = -100
            parts.append(part)
        cases.append((parts,))
    cases.append(([torch.randint(9, (3, 4)), torch.randint(9, (1, 4))],))
    return cases


# ---- 3: the best group


def best_group(layers: int, ratio: float) -> int:
    """Return the smallest size with the lowest peak."""
    return min(range(1, layers + 1), key=lambda size: group_peak(layers, ratio, size))


def _stacks() -> list[tuple]:
    return [(16, 1), (8, 16), (64, 16), (100, 4), (1, 3), (12, 0.5), (7, 0.1), (96, 34)]


# ---- 4: a checkpoint of one's own


def torch_checkpoint(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) and keep x alone, by PyTorch."""
    return checkpoint(function, x, use_reentrant=False)


def _gradient_and_bytes(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Call `answer` on each function and input; return result, gradient and saved bytes."""

    def measured(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        with SavedTensors() as saved:
            y = answer(function, x)
        if not isinstance(y, Tensor) or not y.requires_grad:
            return y
        size = saved.bytes
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y) * 0.5)
        return y.detach(), gradient, size

    return measured


def _chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = x.sin().exp()
    return x


def _rows(x: Tensor) -> Tensor:
    return (x * x).softmax(-1).sum(-1)


def _functions() -> list[tuple]:
    return [
        (_chain, torch.rand(6, dtype=torch.float64)),
        (_chain, torch.rand(3, 4, dtype=torch.float64).T.contiguous()),
        (_rows, torch.rand(5, 7, dtype=torch.float64)),
        (_rows, torch.rand(2, 3)),
    ]


EXERCISES = {
    "peak": Exercise(reference=peak, cases=_models),
    "weights": Exercise(reference=weights, cases=_targets),
    "best_group": Exercise(reference=best_group, cases=_stacks),
    "checkpoint": Exercise(
        reference=torch_checkpoint, cases=_functions, through=_gradient_and_bytes
    ),
}
