"""Chapter 13: dropout that stores no mask (Srivastava et al. 2014, jmlr.org/papers/v15).

    y = x * (1 / (1 - p) where keep, else 0)          keep = random(seed, position) >= p

The generator is a pure function of seed and position (Philox; Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), so the backward pass draws the same mask again: it is the same kernel
applied to the gradient, and the forward pass saves nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import accumulator, launch, operator, require

# N = number of elements


@triton.jit
def _kernel(
    x_ptr,  # in   [N]
    y_ptr,  # out  [N]
    N,
    seed,
    p: tl.constexpr,  # these two are compiled in, see launch.py on numbers that are constants
    scale: tl.constexpr,  # of what is kept
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N).to(ACC)
    y = x * tl.where(tl.rand(seed, at) >= p, scale, 0.0)  # a product: NaN * 0 stays NaN
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), at < N)


@operator("dropout")
def _dropout(x: Tensor, p: float, seed: int) -> Tensor:
    y, grid = torch.empty_like(x), (triton.cdiv(x.numel(), 1024),)
    args = (x, y, x.numel(), seed)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    launch(_kernel, grid, *args, p=p, scale=scale, BLOCK=1024, ACC=accumulator(x.dtype))
    return y


def _save(ctx, inputs, output):
    _, ctx.p, ctx.seed = inputs


_dropout.register_autograd(
    lambda ctx, dy: (_dropout(dy.contiguous(), ctx.p, ctx.seed), None, None), setup_context=_save
)


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Zero each element of x with probability p, scale the rest by 1 / (1 - p); as `F.dropout`.

    The mask depends on `seed` and the element's position alone: the same on every GPU, in every
    run. NaN and inf become NaN where they are dropped, as in eager. Raises ValueError unless
    0 <= p <= 1 and 0 <= seed < 2**31.
    """
    require(x=x)
    if not 0 <= p <= 1:
        raise ValueError(f"p: expected 0 <= p <= 1, got {p}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed: expected 0 <= seed < 2**31, got {seed}")
    return _dropout(x.contiguous(), p, seed)
