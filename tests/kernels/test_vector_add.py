import pytest
import torch

from helpers.kernels.vector_add import _vector_add, vector_add
from tests.kernels import arithmetic
from tests.kernels.numerics import DTYPES, assert_rounds_well, composes, gradcheck, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1023,), (1024,), (3, 1025), (0,), ()])
def test_rounding(device, shape, dtype):
    x, y = (randn(*shape, device=device, dtype=dtype) for _ in range(2))
    assert_rounds_well(vector_add, torch.add, arithmetic.vector_add, [x, y])


def test_not_contiguous(device):
    x, y = randn(6, 10, device=device), randn(10, 6, device=device)
    assert_rounds_well(vector_add, torch.add, arithmetic.vector_add, [x.T, y])


def test_gradient_and_the_two_gradients_are_two_tensors(device):
    x, y = randn(3, 2, device=device), randn(3, 2, device=device)
    gradcheck(vector_add, x, y, double=True)
    vector_add(x, y).sum().backward()
    assert x.grad.data_ptr() != y.grad.data_ptr()


def test_composes(device):
    x, y = randn(9, device=device), randn(9, device=device)
    composes(_vector_add, vector_add, (x, y), [x, y])


def test_errors(device):
    x = torch.zeros(3, device=device)
    with pytest.raises(ValueError, match=r"y: expected the shape of x, \[3\], got \[3, 1\]"):
        vector_add(x, x[:, None])
    with pytest.raises(
        ValueError, match="y must match x: expected torch.float32 on .*, got .*float16"
    ):
        vector_add(x, x.half())
    with pytest.raises(ValueError, match="y must match x: .* got torch.float32 on meta"):
        vector_add(x, x.to("meta"))


@pytest.mark.gpu
def test_a_cpu_tensor_is_refused_where_kernels_are_compiled():
    with pytest.raises(ValueError, match="x: expected a CUDA tensor, got one on cpu"):
        vector_add(torch.zeros(3), torch.zeros(3))
