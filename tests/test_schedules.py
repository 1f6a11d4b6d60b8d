import math

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from helpers import schedules


def torch_rates(make, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("total", "warmup"), [(10, 0.3), (96, 0.2), (7, 0.5)])
def test_one_cycle_equals_pytorchs(total, warmup):
    want = torch_rates(lambda o: OneCycleLR(o, 0.3, total_steps=total, pct_start=warmup), total)
    got = [schedules.one_cycle(s, peak=0.3, total=total, warmup=warmup) for s in range(total)]
    assert got == pytest.approx(want, rel=1e-9)


def test_warmup_cosine_equals_a_composition():
    def make(o):
        up = LinearLR(o, start_factor=1 / 5, total_iters=4)
        down = CosineAnnealingLR(o, T_max=15)
        return SequentialLR(o, [up, down], milestones=[5])

    want = torch_rates(make, 20)
    got = [schedules.warmup_cosine(s, peak=0.3, warmup=5, total=20) for s in range(20)]
    assert got == pytest.approx(want, rel=1e-6)


def test_warmup_cosine_ends_at_the_floor_and_stays():
    rate = [schedules.warmup_cosine(s, peak=1, warmup=2, total=10, floor=0.1) for s in range(15)]
    assert rate[1] == 1 and max(rate) == 1
    assert rate[10:] == pytest.approx([0.1] * 5)
    assert math.isclose(rate[6], 0.55)


def test_bad_ranges():
    with pytest.raises(ValueError, match="expected 0 <= warmup < total, got warmup 5, total 5"):
        schedules.warmup_cosine(0, peak=1, warmup=5, total=5)
    with pytest.raises(ValueError, match="expected 0 <= step < 5, got 5"):
        schedules.one_cycle(5, peak=1, total=5)


@pytest.mark.parametrize(("total", "warmup"), [(5, 0.2), (10, 0.1), (20, 0.05), (2, 0.5)])
def test_one_cycle_whose_rise_is_one_step_begins_at_the_peak(total, warmup):
    """PyTorch divides by zero there; a rise a little shorter or longer tells what it must be."""
    with pytest.raises(ZeroDivisionError):
        torch_rates(lambda o: OneCycleLR(o, 0.3, total_steps=total, pct_start=warmup), total)
    got, shorter = (
        [schedules.one_cycle(s, peak=0.3, total=total, warmup=w) for s in range(total)]
        for w in (warmup, warmup - 1e-9)
    )
    assert got[0] == 0.3 and got == pytest.approx(shorter, rel=1e-6)
    assert sorted(got, reverse=True) == got and got[-1] == pytest.approx(0.3 / 250_000)


def test_one_cycle_that_only_goes_up():
    got = [schedules.one_cycle(s, peak=0.3, total=8, warmup=1.0) for s in range(8)]
    assert got == sorted(got) and got[0] == pytest.approx(0.3 / 25) and got[-1] == 0.3


@pytest.mark.parametrize("warmup", [-0.1, 1.1, float("nan")])
def test_the_rise_is_a_share_of_the_steps(warmup):
    with pytest.raises(ValueError, match=f"0 <= warmup <= 1, got {warmup}"):
        schedules.one_cycle(0, peak=1, total=5, warmup=warmup)
