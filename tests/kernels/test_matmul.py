import pytest
import torch

from helpers.kernels.matmul import _matmul, matmul
from tests.kernels.numerics import DTYPES, assert_within_budget, composes, gradcheck, randn

SHAPES = [(1, 1, 1), (7, 5, 3), (32, 64, 32), (33, 123, 70), (1, 200, 40), (65, 1, 31)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_budget(device, shape, dtype):
    m, k, n = shape
    a, b = randn(m, k, device=device, dtype=dtype), randn(k, n, device=device, dtype=dtype)
    assert_within_budget(matmul, torch.matmul, [a, b])


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty(device, shape):
    m, k, n = shape
    a, b = randn(m, k, device=device), randn(k, n, device=device)
    assert_within_budget(matmul, torch.matmul, [a, b])


def test_any_strides(device):
    a, b = randn(40, 50, device=device), randn(50, 60, device=device)
    for left, right in [(a[::2], b), (a[:, ::5], b[::5]), (b.T, a.T), (a[:, :1].expand(-1, 50), b)]:
        assert_within_budget(matmul, torch.matmul, [left, right])


def test_more_tile_rows_than_a_group(device):
    a, b = randn(32 * 9 + 1, 4, device=device), randn(4, 70, device=device)
    assert_within_budget(matmul, torch.matmul, [a, b])


def test_gradient(device):
    if device == "cuda":
        pytest.skip("needs a CUDA device with float64 tiles: the interpreter checks this")
    gradcheck(matmul, randn(3, 4, device=device), randn(4, 2, device=device), double=True)


def test_only_the_needed_gradient(device):
    a, b = randn(3, 4, device=device), randn(4, 2, device=device, grad=False)
    matmul(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.sum(1).expand(3, 4))
    assert b.grad is None


def test_composes(device):
    many = [randn(3, 4, device=device), randn(4, 2, device=device)]
    composes(_matmul, matmul, tuple(many), many)


def test_errors(device):
    a = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match=r"and \[K, N\], got \[3, 4\] and \[3, 4\]"):
        matmul(a, a)
