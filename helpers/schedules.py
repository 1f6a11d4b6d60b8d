"""Chapter 06: learning rates as pure functions of the step — nothing to save, easy to draw."""

import math


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Return the learning rate at `step`: linear to `peak` in `warmup` steps, then a half cosine.

    peak, floor: elsewhere max_lr and min_lr. warmup, total: in steps; `floor` is reached at
    `total` and kept. Raises ValueError unless 0 <= warmup < total.
    Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983
    """
    if not 0 <= warmup < total:
        raise ValueError(f"expected 0 <= warmup < total, got warmup {warmup}, total {total}")
    if step < warmup:
        return peak * (step + 1) / warmup  # + 1: a first step at rate 0 would be wasted
    progress = min(1.0, (step - warmup) / (total - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def one_cycle(step: int, *, peak: float, total: int, warmup: float = 0.2) -> float:
    """Return the learning rate at `step`: up in a half cosine, then down to almost nothing.

    Equals `torch.optim.lr_scheduler.OneCycleLR` with its default factors: the cycle begins at
    peak / 25 and ends at peak / 250,000. peak: its max_lr; total: its total_steps; warmup: the
    share of the steps that go up, 0..1, its pct_start. Where that is exactly one step, PyTorch
    divides by zero; here the one step is at the peak, as the last of any rise.
    Raises ValueError for a step or a share out of range.
    Smith and Topin 2018, https://arxiv.org/abs/1708.07120
    """
    if not 0 <= step < total:
        raise ValueError(f"expected 0 <= step < {total}, got {step}")
    if not 0 <= warmup <= 1:
        raise ValueError(f"expected a share of the steps 0 <= warmup <= 1, got {warmup}")
    start, end = peak / 25, peak / 25e4
    turn = warmup * total - 1  # the step at the peak
    if step < turn:
        low, high, progress = start, peak, step / turn
    elif turn < total - 1:
        low, high, progress = peak, end, (step - turn) / (total - 1 - turn)
    else:  # all steps go up, this is the last
        return peak
    return low + (high - low) * (1 - math.cos(math.pi * progress)) / 2
