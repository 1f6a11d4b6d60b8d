from functools import partial

import pytest
import torch
import torch.nn.functional as F

from helpers.kernels import gelu as file
from helpers.kernels.gelu import gelu
from tests.kernels import arithmetic
from tests.kernels.numerics import (
    DTYPES,
    WIDTHS,
    assert_rounds_well,
    composes,
    gradcheck,
    randn,
)

KINDS = ["none", "tanh"]


def trio(kind):
    return (
        lambda x, b: gelu(x, b, kind),
        lambda x, b: F.gelu(x + b, approximate=kind),
        partial(arithmetic.gelu, tanh=kind == "tanh"),
    )


def inputs(*shape, device, dtype=torch.float32):
    x = randn(*shape, device=device, dtype=dtype) * 2
    return [x, randn(shape[-1], device=device, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding(device, kind, width, dtype):
    assert_rounds_well(*trio(kind), inputs(2, width, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2, 0), (90, 3)])
def test_shapes(device, shape):
    assert_rounds_well(*trio("none"), inputs(*shape, device=device))


def test_not_contiguous(device):
    x, b = inputs(6, 10, device=device)
    for view in (x[::2], x.expand(2, 6, 10), x.repeat(1, 2)[:, 5:15], x.T.contiguous().T):
        assert_rounds_well(*trio("tanh"), [view, b])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient(device, kind):
    gradcheck(trio(kind)[0], *inputs(5, 3, device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_far_out(device, kind):
    x = torch.tensor([[-1e4, -30.0, -5.0, 0.0, 5.0, 30.0, 1e4]], device=device)
    assert_rounds_well(*trio(kind), [x, torch.zeros(7, device=device)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_bias(device, kind, dtype):
    x, _ = inputs(5, 33, device=device, dtype=dtype)
    ours, eager = (lambda x: gelu(x, None, kind), lambda x: F.gelu(x, approximate=kind))
    assert_rounds_well(ours, eager, trio(kind)[2], [x])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_bias_beside_half_precision(device, dtype):
    x, b = inputs(5, 33, device=device, dtype=dtype)
    b = b.detach().float().requires_grad_()
    y = gelu(x, b)
    (db,) = torch.autograd.grad(y.sum(), b)
    assert y.dtype is dtype and db.dtype is torch.float32
    assert torch.equal(y, gelu(x, b.to(dtype)))


def test_composes(device):
    many = inputs(3, 9, device=device)
    composes(file._gelu, gelu, (*many, True), many)


def test_errors(device):
    x, b = inputs(3, 4, device=device)
    with pytest.raises(
        ValueError, match=r"bias: expected \[D\] with D the last of x, \[3, 4\]; got \[3\]"
    ):
        gelu(x, b[:3])
    with pytest.raises(ValueError, match="bias: expected torch.float32, or float32 beside half"):
        gelu(x, b.half())
    with pytest.raises(ValueError, match="approximate: expected 'none' or 'tanh', got 'erf'"):
        gelu(x, b, "erf")
