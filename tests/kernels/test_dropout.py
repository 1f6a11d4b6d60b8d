import math
from functools import partial

import pytest
import torch

from helpers.kernels.dropout import _dropout, dropout
from tests.kernels import arithmetic
from tests.kernels.numerics import DTYPES, assert_rounds_well, composes, gradcheck, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_scale(device, p, dtype):
    n = 20_000
    y = dropout(torch.ones(n, device=device, dtype=dtype), p, seed=1)
    kept = y != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)
    eps = torch.finfo(dtype).eps
    assert ((y[kept].double() * (1 - p) - 1).abs() <= eps).all()


def test_a_seed_gives_one_mask_and_two_seeds_give_independent_masks(device):
    x = torch.ones(20_000, device=device)
    a, b = dropout(x, 0.5, seed=1), dropout(x, 0.5, seed=2)
    assert torch.equal(a, dropout(x, 0.5, seed=1))
    both = ((a != 0) & (b != 0)).double().mean().item()
    assert abs(both - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 20_000)


def test_the_mask_depends_on_the_position_alone(device):
    x = torch.ones(5000, device=device)
    assert torch.equal(dropout(x, 0.5, seed=3)[:1500], dropout(x[:1500], 0.5, seed=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.7])
def test_rounding(device, p, dtype):
    keep = dropout(torch.ones(3, 1025, device=device), p, seed=4) != 0
    assert_rounds_well(
        lambda x: dropout(x, p, seed=4),
        lambda x: x * keep.to(x.device) / (1 - p),
        partial(arithmetic.dropout, keep=keep.cpu(), p=p),
        [randn(3, 1025, device=device, dtype=dtype)],
    )


def test_all_dropped(device):
    x = randn(3, 5, device=device)
    y = dropout(x, 1.0, seed=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.nn.functional.dropout(x, 1.0)) and gradient.eq(0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy: inf * 0
def test_nan_and_infinity_are_not_dropped(device):
    """As in eager: a product with 0 is NaN."""
    x = torch.tensor([math.nan, math.inf], device=device).repeat_interleave(50)
    y = dropout(x, 0.5, seed=1)
    assert y[:50].isnan().all() and 10 < y[50:].isnan().sum() < 40
    assert y[50:][~y[50:].isnan()].eq(math.inf).all()


def test_no_dropout_changes_nothing(device):
    x = randn(3, 5, device=device)
    assert torch.equal(dropout(x, 0.0, seed=0), x)


def test_backward_draws_the_same_mask(device):
    x = randn(50, 30, device=device)
    (gradient,) = torch.autograd.grad(dropout(x, 0.3, seed=5).sum(), x)
    assert torch.equal(gradient, dropout(torch.ones_like(x), 0.3, seed=5))
    gradcheck(lambda x: dropout(x, 0.3, 5), x[:2, :3], double=True)


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:0], lambda x: x[::2, 1:]])
def test_views(device, view):
    x = view(torch.ones(6, 4, device=device))
    assert torch.equal(dropout(x, 0.5, 1), dropout(x.contiguous(), 0.5, 1))


def test_composes(device):
    x = randn(9, device=device)
    composes(_dropout, lambda x: dropout(x, 0.5, 7), (x, 0.5, 7), [x])


def test_errors(device):
    x = torch.ones(3, device=device)
    with pytest.raises(ValueError, match="p: expected 0 <= p <= 1, got 1.5"):
        dropout(x, 1.5, 0)
    with pytest.raises(ValueError, match="seed: expected 0 <= seed < 2..31, got -1"):
        dropout(x, 0.5, -1)
