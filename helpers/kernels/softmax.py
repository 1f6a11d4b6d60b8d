"""Chapter 13: softmax over the last dimension, fused: each row is read once and written once.

    y = exp(x - max x) / sum exp(x - max x)         dx = y * (dy - sum y dy)

Subtracting the maximum keeps exp from overflowing. Rows wider than a block are read twice: once
for maximum and sum together, "online" (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867),
once for the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import accumulator, as_rows, launch, operator, require, row_tile

# R = rows, D = columns; a program holds a tile [ROWS, BLOCK]
MAX_BLOCK = 16384


@triton.jit
def _forward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    y_ptr,  # out  [R, D]
    x_stride,
    R,
    D,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # does a block hold a whole row?
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, R - 1)  # programs at the end write the last row again: the same numbers
    col = tl.arange(0, BLOCK)[None, :]
    x_ptr += row * x_stride
    y_ptr += row * D
    if WHOLE:
        x = tl.load(x_ptr + col, col < D, -float("inf")).to(ACC)
        e = tl.exp(x - tl.max(x, 1, keep_dims=True))
        y = e / tl.sum(e, 1, keep_dims=True)
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), col < D)
    else:
        top = tl.full([ROWS, 1], -float("inf"), ACC)  # maximum so far
        total = tl.zeros([ROWS, 1], ACC)  # sum of exp(x - top) so far
        for start in range(0, D, BLOCK):
            x = tl.load(x_ptr + start + col, start + col < D, -float("inf")).to(ACC)
            new = tl.maximum(top, tl.max(x, 1, keep_dims=True))
            shift = tl.where(new == -float("inf"), 0.0, new)  # masked so far: -inf - -inf is NaN
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 1, keep_dims=True)
            top = new
        for start in range(0, D, BLOCK):
            x = tl.load(x_ptr + start + col, start + col < D, -float("inf")).to(ACC)
            y = tl.exp(x - top) / total
            tl.store(y_ptr + start + col, y.to(y_ptr.dtype.element_ty), start + col < D)


@triton.jit
def _backward_kernel(
    y_ptr,  # in   [R, D]
    dy_ptr,  # in   [R, D]
    dx_ptr,  # out  [R, D]
    R,
    D,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, R - 1)
    col = tl.arange(0, BLOCK)[None, :]
    y_ptr += row * D
    dy_ptr += row * D
    dx_ptr += row * D
    if WHOLE:
        y = tl.load(y_ptr + col, col < D, 0.0).to(ACC)
        dy = tl.load(dy_ptr + col, col < D, 0.0).to(ACC)
        dx = y * (dy - tl.sum(y * dy, 1, keep_dims=True))
        tl.store(dx_ptr + col, dx.to(dx_ptr.dtype.element_ty), col < D)
    else:
        dot = tl.zeros([ROWS, 1], ACC)
        for start in range(0, D, BLOCK):
            y = tl.load(y_ptr + start + col, start + col < D, 0.0).to(ACC)
            dy = tl.load(dy_ptr + start + col, start + col < D, 0.0).to(ACC)
            dot += tl.sum(y * dy, 1, keep_dims=True)
        for start in range(0, D, BLOCK):
            y = tl.load(y_ptr + start + col, start + col < D, 0.0).to(ACC)
            dy = tl.load(dy_ptr + start + col, start + col < D, 0.0).to(ACC)
            dx = (y * (dy - dot)).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + start + col, dx, start + col < D)


def _tile(x: Tensor) -> tuple[tuple[int], dict]:
    R, D = x.shape
    tile = row_tile(D, MAX_BLOCK)
    tile |= {"WHOLE": tile["BLOCK"] >= D, "ACC": accumulator(x.dtype)}
    return (triton.cdiv(R, tile["ROWS"]),), tile


@operator("softmax")
def _softmax(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, tile = _tile(x)
    launch(_forward_kernel, grid, x, y, x.stride(0), *x.shape, **tile)
    return y


@operator("softmax_backward")
def _softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(y)
    grid, tile = _tile(y)
    launch(_backward_kernel, grid, y, dy, dx, *y.shape, **tile)
    return dx


_softmax.register_autograd(
    lambda ctx, dy: _softmax_backward(ctx.saved_tensors[0], dy.contiguous()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def softmax(x: Tensor) -> Tensor:
    """Return softmax over the last dimension of x [..., D], any D; as `F.softmax(x, -1)`.

    Computes in float32 (float64 for float64) and rounds once. -inf, as a mask puts it, gives 0; a
    row of nothing but -inf gives NaN, as in eager. Raises ValueError for integers and float8.
    """
    require(x=x)
    return _softmax(as_rows(x)).view(x.shape)
