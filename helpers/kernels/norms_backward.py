"""Chapter 13: the backward pass of RMSNorm and LayerNorm.

    dx = r (g - mean g - x_hat mean(g x_hat))      with g = dy w; RMSNorm: no mean g
    dw = sum over rows of dy x_hat                 db = sum over rows of dy

One kernel does it all: each program walks over its share of the rows and keeps the sums of its
columns in registers. Beside a very wide row there is no room for them (the compiler would spill
them to memory, row after row), so then a second kernel reads x and dy once more, by columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import accumulator, launch, operator, programs, row_tile

# R = rows, D = columns, P = programs that share the rows; a program holds a tile [ROWS, BLOCK]
MAX_COLUMNS = 65536  # a whole row must fit into the registers of a program
WIDE = 8192  # columns up to which the sums fit there as well


@triton.jit
def _store_sums(sums_ptr, dw, db, program, col, D, CENTER: tl.constexpr):
    at = program * (2 if CENTER else 1) * D + col
    tl.store(sums_ptr + at, tl.sum(dw, 0, keep_dims=True), col < D)
    if CENTER:
        tl.store(sums_ptr + at + D, tl.sum(db, 0, keep_dims=True), col < D)


@triton.jit
def _backward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D]
    stats_ptr,  # in   [1 + CENTER, R]: r, mean
    dy_ptr,  # in   [R, D]
    dx_ptr,  # out  [R, D]
    sums_ptr,  # out  [P, 1 + CENTER, D] if SUMS: dw, db, each over the rows of one program
    x_stride,
    R,
    D,
    CENTER: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    col = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + col, col < D, 0.0).to(ACC)
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < R) & (col < D)
        x = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
        dy = tl.load(dy_ptr + row * D + col, inside, 0.0).to(ACC)
        r = tl.load(stats_ptr + row, row < R, 0.0)
        if CENTER:
            x = tl.where(inside, x - tl.load(stats_ptr + R + row, row < R, 0.0), 0.0)
        x_hat = x * r
        g = dy * w
        dx = g - x_hat * (tl.sum(g * x_hat, 1, keep_dims=True) / D)
        if CENTER:
            dx -= tl.sum(g, 1, keep_dims=True) / D
            db += dy
        dw += dy * x_hat
        tl.store(dx_ptr + row * D + col, (dx * r).to(dx_ptr.dtype.element_ty), inside)
    if SUMS:
        _store_sums(sums_ptr, dw, db, tl.program_id(0), col, D, CENTER)


@triton.jit
def _sums_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    stats_ptr,  # in   [1 + CENTER, R]: r, mean
    dy_ptr,  # in   [R, D]
    sums_ptr,  # out  [P, 1 + CENTER, D]: dw, db, each over the rows of one program
    x_stride,
    R,
    D,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(1) * ROWS, R, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < R) & (col < D)
        x = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
        dy = tl.load(dy_ptr + row * D + col, inside, 0.0).to(ACC)
        if CENTER:
            x -= tl.load(stats_ptr + R + row, row < R, 0.0)
            db += dy
        dw += dy * x * tl.load(stats_ptr + row, row < R, 0.0)
    _store_sums(sums_ptr, dw, db, tl.program_id(1), col, D, CENTER)


@operator("norm_backward")
def norm_backward(x: Tensor, w: Tensor, stats: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx [R, D] and [dw, db] or [dw], as one tensor, for the gradient dy of the output."""
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    tiles, wide = triton.cdiv(R, tile["ROWS"]), D > WIDE
    P = programs(triton.cdiv(R, 32) if wide else tiles, x.device)
    sums = torch.empty((P, len(stats), D), dtype=stats.dtype, device=x.device)
    dx, shared = torch.empty_like(dy), {"CENTER": len(stats) == 2, "ACC": accumulator(x.dtype)}
    args = (x, w, stats, dy, dx, sums, x.stride(0), R, D)
    launch(_backward_kernel, (tiles if wide else P,), *args, SUMS=not wide, **shared, **tile)
    if wide:
        args, tile = (x, stats, dy, sums, x.stride(0), R, D), {"ROWS": 32, "BLOCK": 128}
        launch(_sums_kernel, (triton.cdiv(D, 128), P), *args, **shared, **tile, num_warps=8)
    return dx, sums.sum(0).to(w.dtype)  # a sum in a fixed order: the same bits every time
