"""Chapter 10, exercises: updates that are lost, the size of a batch, clipping, rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.exercises.harness import Exercise

# ---- 1: is an update too small to change a weight?


def is_lost(weight: float, update: float, dtype: torch.dtype) -> bool:
    """Add in float64, round to `dtype`, and say whether the weight is still the same."""
    return torch.tensor(weight + update, dtype=torch.float64).to(dtype).item() == weight


def _updates() -> list[tuple[float, float, torch.dtype]]:
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        drawn = (torch.rand(4) + 0.5).to(dtype).tolist()
        for weight in (1.0, 256.0, 1.5, 0.0625, 0.75, 3.0, *drawn):
            for share in (0.2, 0.3, 0.45, 0.55, 0.9, 3.0):  # of the gap if this were at 1
                for sign in (1, -1):
                    cases.append((weight, sign * share * weight * eps, dtype))
    return cases


# ---- 2: the batch size from which autocast keeps less


def smallest_batch(weights: int, low: int, high: int) -> int:
    """Add up the bytes that are kept with and without autocast until autocast needs fewer."""
    batch = 1
    while 2 * weights + batch * (2 * low + 4 * high) >= batch * (4 * low + 4 * high):
        batch += 1
    return batch


def _sizes() -> list[tuple[int, int, int]]:
    fixed = [(2_099_712, 5376, 786), (1000, 10, 0), (1000, 10, 7), (999, 10, 3), (1001, 10, 3)]
    drawn = torch.randint(1, 500, (6, 3)).tolist()
    return [*fixed, (5, 1000, 20), *(tuple(row) for row in drawn)]


# ---- 3: clipping with a scaler


def clipped_step(
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    parameters: list[nn.Parameter],
    max_norm: float,
) -> None:
    """Backward, clip the true gradients to `max_norm`, update, and choose the next scale."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()


def _trained(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Run three updates with the answer; return the weights and the scale at the end."""

    def run(start: Tensor, slopes: Tensor, max_norm: float, scale: float) -> Any:
        p = nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        for slope in slopes:
            optimizer.zero_grad()
            loss = (p * slope).sum()
            if answer(scaler, optimizer, loss, [p], max_norm) is ...:
                return ...
        return p.detach(), scaler.get_scale()

    return run


def _slopes() -> list[tuple]:
    start = torch.tensor([1.0, -2.0])
    large = torch.tensor([[3.0, 4.0], [0.3, -0.4], [-6.0, 8.0]])
    broken = torch.tensor([[3.0, 4.0], [torch.inf, 1.0], [0.6, 0.8]])
    return [
        (start, large, 1.0, 1024.0),
        (start, large, 1e-3, 65536.0),
        (start, large, 100.0, 8.0),  # nothing to clip
        (start, broken, 1.0, 4096.0),
    ]


# ---- 4: rounding to bfloat16, by the bits


def round_to_bf16(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to bfloat16, as float32, by PyTorch's cast."""
    return x.bfloat16().float()


def _numbers() -> list[tuple[Tensor]]:
    one = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-7, -1 - 2**-8])
    edge = torch.tensor([3.3895e38, 3.3962e38, 3.4e38, torch.inf, -torch.inf, 0.0, -0.0])
    tiny = torch.tensor([1e-38, 1.2e-38, 9e-41, 4e-41, 5e-41, 1e-45])
    random = torch.randn(200) * torch.logspace(-30, 30, 200)
    return [(one,), (edge,), (tiny,), (random,), (torch.randn(4, 6).T,), (torch.zeros(0),)]


EXERCISES = {
    "is_lost": Exercise(
        reference=is_lost, cases=_updates, forbid=("tensor", "bfloat16", "half", "to", "full")
    ),
    "smallest_batch": Exercise(reference=smallest_batch, cases=_sizes),
    "clipped_step": Exercise(reference=clipped_step, cases=_slopes, through=_trained),
    "round_to_bf16": Exercise(
        reference=round_to_bf16,
        cases=_numbers,
        forbid=("bfloat16", "to", "type", "copy_"),
        scale=0.0,
    ),
}
