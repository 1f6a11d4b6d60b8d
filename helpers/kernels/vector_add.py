"""Chapter 13: the hello world of kernels, z = x + y: three memory accesses and one FLOP each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import launch, operator, require

# N = number of elements


@triton.jit
def _kernel(
    x_ptr,  # in   [N]
    y_ptr,  # in   [N]
    z_ptr,  # out  [N]
    N,
    BLOCK: tl.constexpr,
):
    # Each program adds one block. 64 bits: an offset of 2**31 elements would wrap around.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N  # the last block may stick out
    x, y = tl.load(x_ptr + at, inside), tl.load(y_ptr + at, inside)
    if x.dtype != tl.float64:  # the interpreter cannot add bfloat16; a GPU goes by float32 anyway
        x, y = x.to(tl.float32), y.to(tl.float32)
    tl.store(z_ptr + at, (x + y).to(z_ptr.dtype.element_ty), inside)


@operator("vector_add")
def _vector_add(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty_like(x)
    launch(_kernel, (triton.cdiv(x.numel(), 1024),), x, y, z, x.numel(), BLOCK=1024)
    return z


_vector_add.register_autograd(lambda ctx, grad: (grad, grad.clone()))


def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y for two tensors of one shape, floating dtype and device; as `torch.add`.

    Raises ValueError when shapes, dtypes or devices differ: nothing is broadcast.
    """
    require(x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"y: expected the shape of x, {list(x.shape)}, got {list(y.shape)}")
    return _vector_add(x.contiguous(), y.contiguous())
