import math
from functools import partial

import pytest
import torch

from helpers.kernels import softmax as file
from helpers.kernels.softmax import softmax
from tests.kernels import arithmetic
from tests.kernels.numerics import (
    DTYPES,
    WIDTHS,
    assert_rounds_well,
    composes,
    gradcheck,
    randn,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy: -inf - -inf


def eager(x):
    return torch.softmax(x, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rounding(device, width, dtype):
    x = randn(5, width, device=device, dtype=dtype) * 3
    assert_rounds_well(softmax, eager, arithmetic.softmax, [x])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 33])
def test_rows_wider_than_a_block(device, width, dtype, monkeypatch):
    monkeypatch.setattr(file, "MAX_BLOCK", 16)
    x = randn(3, width, device=device, dtype=dtype)
    in_blocks = partial(arithmetic.softmax, blocks=3)
    assert_rounds_well(softmax, eager, in_blocks, [x * 3])
    if dtype is torch.float32:  # gradcheck computes in float64, whatever it is given
        gradcheck(softmax, x[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [file.MAX_BLOCK, 16])
def test_a_masked_stretch_anywhere(device, most, dtype, monkeypatch):
    """-inf from `start` to `end`, in every position to the borders of three blocks of 16."""
    monkeypatch.setattr(file, "MAX_BLOCK", most)
    D = 40
    ends = [0, 1, 8, 15, 16, 17, 31, 32, 33, 39, 40]
    stretches = [(start, end) for start in ends for end in ends if start < end]
    x = randn(len(stretches), D, device=device, dtype=dtype, grad=False)
    for row, (start, end) in zip(x, stretches, strict=True):
        row[start:end] = -math.inf
    in_blocks = partial(arithmetic.softmax, blocks=3)
    assert_rounds_well(softmax, eager, in_blocks, [x])
    assert softmax(x).isnan().all(1).tolist() == [stretch == (0, D) for stretch in stretches]


@pytest.mark.parametrize("most", [file.MAX_BLOCK, 16])
@pytest.mark.parametrize("at", [0, 16, 39])
def test_nan_reaches_its_whole_row(device, most, at, monkeypatch):
    monkeypatch.setattr(file, "MAX_BLOCK", most)
    x = randn(3, 40, device=device, grad=False)
    x[1, at] = math.nan
    x[2, :20] = -math.inf
    x[2, at] = math.nan
    assert_rounds_well(softmax, eager, partial(arithmetic.softmax, blocks=3), [x])


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2, 0, 3)])
def test_shapes(device, shape):
    assert_rounds_well(softmax, eager, arithmetic.softmax, [randn(*shape, device=device)])


def test_not_contiguous(device):
    x = randn(6, 10, device=device)
    for view in (x.T, x[:, ::2], x[::2], x[:, 3:], x.expand(2, 6, 10)):
        assert_rounds_well(softmax, eager, arithmetic.softmax, [view])


def test_gradient(device):
    gradcheck(softmax, randn(3, 7, device=device))


def test_large_inputs_do_not_overflow(device):
    x = torch.tensor([[1e4, 0.0, -1e4], [3e38, 3e38, 0.0]], device=device)
    assert_rounds_well(softmax, eager, arithmetic.softmax, [x])


def test_composes(device):
    x = randn(3, 9, device=device)
    composes(file._softmax, softmax, (x,), [x])


def test_errors(device):
    known = "x: expected float16, bfloat16, float32 or float64, got torch"
    with pytest.raises(ValueError, match=f"{known}.int64"):
        softmax(torch.arange(3, device=device))
    with pytest.raises(ValueError, match=f"{known}.float8_e4m3fn"):
        softmax(torch.zeros(3, device=device).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="expected at least one dimension, got a scalar"):
        softmax(torch.tensor(1.0, device=device))
