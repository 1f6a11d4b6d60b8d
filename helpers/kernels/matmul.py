"""Chapter 13: a tiled matrix product: each program computes one tile of C, K-slice by K-slice.

    C[i, j] = sum over k of A[i, k] B[k, j]

A tile of A and one of B are used BLOCK times for each time they are read, which is what makes the
product compute-bound. Programs run in groups of tile rows, so that tiles in use at one time share
their inputs in the L2 cache (triton-lang.org, tutorial 03). Reference: `torch.matmul`; cuBLAS is
the library to use.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import (
    accumulator,
    autocast,
    autotune,
    launch,
    operand,
    operator,
    require,
)

# C [M, N] = A [M, K] @ B [K, N]; a program computes a tile [BM, BN] in slices of BK


def config(BM: int, BN: int, BK: int, stages: int, warps: int) -> triton.Config:
    """Return one way to launch: the tile, how many slices are loaded ahead, warps a program."""
    return triton.Config(
        {"BM": BM, "BN": BN, "BK": BK, "GROUP": 8}, num_stages=stages, num_warps=warps
    )


CONFIGS = [
    config(32, 32, 32, 3, 2),
    config(64, 64, 32, 4, 4),
    config(64, 128, 64, 4, 4),
    config(128, 64, 64, 4, 4),
    config(128, 128, 64, 3, 4),
    config(128, 128, 64, 4, 8),
    config(128, 256, 64, 3, 8),
    config(256, 128, 64, 3, 8),
]


@autotune(CONFIGS, key=["M", "N", "K"], tiles={"BM": "M", "BN": "N", "BK": "K"})
@triton.jit
def _kernel(
    a_ptr,  # in   [M, K], strides a_m, a_k: a transposed view costs no copy
    b_ptr,  # in   [K, N], strides b_k, b_n
    c_ptr,  # out  [M, N], contiguous
    a_m,
    a_k,
    b_k,
    b_n,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    IN: tl.constexpr,
    ACC: tl.constexpr,
):
    # Walk GROUP tile rows column by column, then the next GROUP rows.
    program, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + program % (GROUP * tiles_n) % height
    tile_n = program % (GROUP * tiles_n) // height

    m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    n = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns beyond the edge wrap around: read twice, never stored.
    a_ptr += (m % M)[:, None] * a_m + k[None, :] * a_k  # [BM, BK]
    b_ptr += k[:, None] * b_k + (n % N)[None, :] * b_n  # [BK, BN]
    c = tl.zeros([BM, BN], ACC)
    for start in range(0, K, BK):
        a = tl.load(a_ptr, k[None, :] < K - start, 0.0).to(IN)
        b = tl.load(b_ptr, k[:, None] < K - start, 0.0).to(IN)
        c = tl.dot(a, b, c, input_precision="ieee", out_dtype=ACC)
        a_ptr += BK * a_k
        b_ptr += BK * b_k
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(c_ptr + m[:, None] * N + n[None, :], c.to(c_ptr.dtype.element_ty), inside)


@operator("matmul")
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    args = (a, b, c, *a.stride(), *b.stride(), M, N, K)
    dtypes = {"IN": operand(a.dtype), "ACC": accumulator(a.dtype)}
    launch(_kernel, lambda t: (triton.cdiv(M, t["BM"]) * triton.cdiv(N, t["BN"]),), *args, **dtypes)
    return c


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dc):
    a, b = ctx.saved_tensors
    da = _matmul(dc, b.T) if ctx.needs_input_grad[0] else None
    return da, _matmul(a.T, dc) if ctx.needs_input_grad[1] else None


_matmul.register_autograd(_backward, setup_context=_save)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] @ b [K, N] of any strides, summed in float32; as `torch.matmul`.

    float32 inputs are multiplied as float32, not as TF32; under autocast they are cast as eager
    casts them. Raises ValueError when dtypes, devices or shapes do not fit.
    """
    a, b = autocast(a, b)
    require(a=a, b=b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    return _matmul(a, b)
