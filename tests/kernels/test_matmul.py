import pytest
import torch

from helpers.kernels.matmul import _matmul, matmul
from tests.kernels import arithmetic
from tests.kernels.numerics import DTYPES, assert_rounds_well, composes, gradcheck, randn

SHAPES = [(1, 1, 1), (7, 5, 3), (32, 64, 32), (33, 123, 70), (1, 200, 40), (65, 1, 31)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding(device, shape, dtype):
    m, k, n = shape
    a, b = randn(m, k, device=device, dtype=dtype), randn(k, n, device=device, dtype=dtype)
    assert_rounds_well(matmul, torch.matmul, arithmetic.matmul, [a, b])


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty(device, shape):
    m, k, n = shape
    a, b = randn(m, k, device=device), randn(k, n, device=device)
    assert_rounds_well(matmul, torch.matmul, arithmetic.matmul, [a, b])


def test_any_strides(device):
    a, b = randn(40, 50, device=device), randn(50, 60, device=device)
    for left, right in [(a[::2], b), (a[:, ::5], b[::5]), (b.T, a.T), (a[:, :1].expand(-1, 50), b)]:
        assert_rounds_well(matmul, torch.matmul, arithmetic.matmul, [left, right])


def test_more_tile_rows_than_a_group(device):
    a, b = randn(32 * 9 + 1, 4, device=device), randn(4, 70, device=device)
    assert_rounds_well(matmul, torch.matmul, arithmetic.matmul, [a, b])


def test_gradient(device):
    if device == "cuda":
        pytest.skip("needs a CUDA device with float64 tiles: the interpreter checks this")
    gradcheck(matmul, randn(3, 4, device=device), randn(4, 2, device=device), double=True)


def test_only_the_needed_gradient(device):
    a, b = randn(3, 4, device=device), randn(4, 2, device=device, grad=False)
    matmul(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.sum(1).expand(3, 4))
    assert b.grad is None


def test_autocast_casts_as_for_products_of_pytorch(device):
    a, b = randn(3, 4, device=device), randn(4, 2, device=device)
    with torch.autocast(device, torch.bfloat16):
        c = matmul(a.half(), b)
        assert c.dtype is torch.matmul(a, b).dtype is torch.bfloat16
        assert matmul(a.double(), b.double()).dtype is torch.float64
    assert torch.equal(c, matmul(a.half().bfloat16(), b.bfloat16()))
    assert torch.autograd.grad(c.sum(), b)[0].dtype is torch.float32


def test_composes(device):
    many = [randn(3, 4, device=device), randn(4, 2, device=device)]
    composes(_matmul, matmul, tuple(many), many)


def test_errors(device):
    a = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match=r"and \[K, N\], got \[3, 4\] and \[3, 4\]"):
        matmul(a, a)
    with pytest.raises(ValueError, match="convert one of them, or use torch.autocast"):
        matmul(a, a.T.half())
