import pytest
import torch
import torch.nn.functional as F

from helpers.kernels import gelu as file
from helpers.kernels.gelu import gelu
from tests.kernels.numerics import (
    DTYPES,
    WIDTHS,
    assert_within_budget,
    composes,
    gradcheck,
    randn,
)

KINDS = ["none", "tanh"]


def pair(kind):
    return lambda x, b: gelu(x, b, kind), lambda x, b: F.gelu(x + b, approximate=kind)


def inputs(*shape, device, dtype=torch.float32):
    x = randn(*shape, device=device, dtype=dtype) * 2
    return [x, randn(shape[-1], device=device, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_error_budget(device, kind, width, dtype):
    assert_within_budget(*pair(kind), inputs(2, width, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2, 0), (90, 3)])
def test_shapes(device, shape):
    assert_within_budget(*pair("none"), inputs(*shape, device=device))


def test_not_contiguous(device):
    x, b = inputs(6, 10, device=device)
    for view in (x[::2], x.expand(2, 6, 10), x.repeat(1, 2)[:, 5:15], x.T.contiguous().T):
        assert_within_budget(*pair("tanh"), [view, b])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient(device, kind):
    gradcheck(pair(kind)[0], *inputs(5, 3, device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_far_out(device, kind):
    x = torch.tensor([[-1e4, -30.0, -5.0, 0.0, 5.0, 30.0, 1e4]], device=device)
    ours, eager = pair(kind)
    b = torch.zeros(7, device=device)
    torch.testing.assert_close(ours(x, b), eager(x, b), atol=1e-6, rtol=1e-6)


def test_composes(device):
    many = inputs(3, 9, device=device)
    composes(file._gelu, gelu, (*many, True), many)


def test_errors(device):
    x, b = inputs(3, 4, device=device)
    with pytest.raises(ValueError, match=r"bias: expected .*, D the last of \[3, 4\], got \[3\]"):
        gelu(x, b[:3])
    with pytest.raises(ValueError, match="approximate: expected 'none' or 'tanh', got 'erf'"):
        gelu(x, b, "erf")
