import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.kernels import rms_norm as file
from helpers.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.numerics import (
    DTYPES,
    WIDTHS,
    assert_within_budget,
    composes,
    gradcheck,
    randn,
)


def eager(x, w):
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def inputs(*shape, device, dtype=torch.float32):
    x = randn(*shape, device=device, dtype=dtype)
    w = randn(shape[-1], device=device, dtype=dtype)
    return [x, w]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_error_budget(device, width, dtype):
    assert_within_budget(rms_norm, eager, inputs(5, width, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2100, 3)])
def test_shapes(device, shape):
    assert_within_budget(rms_norm, eager, inputs(*shape, device=device))


def test_not_contiguous(device):
    x, w = inputs(6, 10, device=device)
    for view in (x[::2], x.expand(2, 6, 10), x.repeat(1, 2)[:, 5:15], x.T.contiguous().T):
        assert_within_budget(rms_norm, eager, [view, w])


def test_gradient(device):
    gradcheck(rms_norm, *inputs(5, 7, device=device))


def test_a_large_mean_costs_no_more_than_in_eager(device):
    x, *rest = inputs(4, 100, device=device)
    assert_within_budget(rms_norm, eager, [x + 1000, *rest])


def test_the_same_bits_every_time(device):
    many = inputs(600, 33, device=device)

    def gradients():
        return torch.autograd.grad(rms_norm(*many).square().sum(), many)

    for once, again in zip(gradients(), gradients(), strict=True):
        assert torch.equal(once, again)


def test_composes(device):
    many = inputs(3, 9, device=device)
    composes(file._rms_norm, rms_norm, (*many, 1e-6), many)


def test_layer(device):
    ours, theirs = RMSNorm(9).to(device), nn.RMSNorm(9, eps=1e-6).to(device)
    theirs.load_state_dict(ours.state_dict())
    x = randn(2, 3, 9, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


def test_errors(device):
    x, w = inputs(3, 4, device=device)
    with pytest.raises(ValueError, match=r"weight: expected \[D\] with D the last of x, \[3, 4\]"):
        rms_norm(x, w[:3])

    wide = torch.zeros(2, file.MAX_COLUMNS + 1, device=device)
    with pytest.raises(ValueError, match="and 1 to 65536; got .65537."):
        rms_norm(wide, wide[0])
