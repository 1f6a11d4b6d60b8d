import pytest
import torch

from helpers.kernels import softmax as file
from helpers.kernels.softmax import softmax
from tests.kernels.numerics import (
    DTYPES,
    WIDTHS,
    assert_within_budget,
    composes,
    gradcheck,
    randn,
)


def eager(x):
    return torch.softmax(x, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_error_budget(device, width, dtype):
    assert_within_budget(softmax, eager, [randn(5, width, device=device, dtype=dtype) * 3])


@pytest.mark.parametrize("width", [5, 16, 33])
def test_rows_wider_than_a_block(device, width, monkeypatch):
    monkeypatch.setattr(file, "MAX_BLOCK", 16)
    x = randn(3, width, device=device)
    assert_within_budget(softmax, eager, [x * 3])
    gradcheck(softmax, x[:1])


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2, 0, 3)])
def test_shapes(device, shape):
    assert_within_budget(softmax, eager, [randn(*shape, device=device)])


def test_not_contiguous(device):
    x = randn(6, 10, device=device)
    for view in (x.T, x[:, ::2], x[::2], x[:, 3:], x.expand(2, 6, 10)):
        assert_within_budget(softmax, eager, [view])


def test_gradient(device):
    gradcheck(softmax, randn(3, 7, device=device))


def test_large_inputs_do_not_overflow(device):
    x = torch.tensor([[1e4, 0.0, -1e4], [3e38, 3e38, 0.0]], device=device)
    torch.testing.assert_close(softmax(x), eager(x))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy: -inf - -inf
def test_masked_scores(device):
    x = torch.tensor([[0.0, -float("inf"), 1.0], [-float("inf")] * 3], device=device)
    torch.testing.assert_close(softmax(x), eager(x), equal_nan=True)


def test_composes(device):
    x = randn(3, 9, device=device)
    composes(file._softmax, softmax, (x,), [x])


def test_errors(device):
    with pytest.raises(ValueError, match="x: expected a floating-point dtype, got torch.int64"):
        softmax(torch.arange(3, device=device))
    with pytest.raises(ValueError, match="expected at least one dimension, got a scalar"):
        softmax(torch.tensor(1.0, device=device))
