"""Chapter 13: bias and GELU in one kernel (Hendrycks & Gimpel 2016, arxiv.org/abs/1606.08415).

    z = x + b       y = z F(z)      dx = dy (F(z) + z F'(z))      db = sum over rows of dx

F is the normal distribution (exact), or sigmoid(2u) with u = sqrt(2/pi) (z + 0.044715 z^3), which
equals the usual (1 + tanh u) / 2 and does not cancel. Apart, the bias and GELU would read and write
the activations twice; together once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import (
    accumulator,
    as_rows,
    launch,
    operator,
    programs,
    require_vectors,
)

# R = rows, D = columns, P = row chunks of the backward kernel; a program holds a tile [ROWS, BLOCK]


@triton.jit
def _forward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    b_ptr,  # in   [D], or None
    y_ptr,  # out  [R, D]
    x_stride,
    R,
    D,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < R) & (col < D)
    z = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
    if b_ptr is not None:
        z += tl.load(b_ptr + col, col < D, 0.0).to(ACC)
    if TANH:  # 1.5957… is 2 sqrt(2/pi)
        y = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    else:  # 0.7071… is sqrt(1/2)
        y = z * 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    tl.store(y_ptr + row * D + col, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    b_ptr,  # in   [D], or None
    dy_ptr,  # in   [R, D]
    dx_ptr,  # out  [R, D]
    db_ptr,  # out  [P, D], the sum over the rows of each chunk
    x_stride,
    R,
    D,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    b = 0.0
    if b_ptr is not None:
        b = tl.load(b_ptr + col, col < D, 0.0).to(ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < R) & (col < D)
        z = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC) + b
        dy = tl.load(dy_ptr + row * D + col, inside, 0.0).to(ACC)
        if TANH:
            w = 1.5957691216057308 * (z + 0.044715 * z * z * z)
            slope = 1.5957691216057308 * (1 + 3 * 0.044715 * z * z)
            slope = tl.sigmoid(w) + z * tl.sigmoid(w) * tl.sigmoid(-w) * slope
        else:  # 0.3989… is sqrt(1/(2 pi))
            density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
            slope = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * density
        dx = dy * slope
        tl.store(dx_ptr + row * D + col, dx.to(dx_ptr.dtype.element_ty), inside)
        db += dx
    at = tl.program_id(0) * D + col
    tl.store(db_ptr + at, tl.sum(db, 0, keep_dims=True), col < D)


def _tile(x: Tensor, tanh: bool) -> dict:
    block = min(triton.next_power_of_2(max(x.shape[1], 1)), 1024)
    tile = {"ROWS": max(1, 1024 // block), "BLOCK": block}
    return {"TANH": tanh, "ACC": accumulator(x.dtype), **tile}


@operator("gelu")
def _gelu(x: Tensor, b: Tensor | None, tanh: bool) -> Tensor:
    (R, D), tile = x.shape, _tile(x, tanh)
    y = torch.empty((R, D), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(R, tile["ROWS"]), triton.cdiv(D, tile["BLOCK"]))
    launch(_forward_kernel, grid, x, b, y, x.stride(0), R, D, **tile)
    return y


@operator("gelu_backward")
def _gelu_backward(x: Tensor, b: Tensor | None, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return dx [R, D] and db [D], in float32 (float64 for float64)."""
    (R, D), tile = x.shape, _tile(x, tanh)
    P = programs(triton.cdiv(R, tile["ROWS"]), x.device)
    dx = torch.empty_like(dy)
    db = torch.empty((P, D), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    grid = (P, triton.cdiv(D, tile["BLOCK"]))
    launch(_backward_kernel, grid, x, b, dy, dx, db, x.stride(0), R, D, **tile)
    return dx, db.sum(0)  # in a fixed order: the same bits every time


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.tanh = inputs[2]


def _backward(ctx, dy):
    x, b = ctx.saved_tensors
    dx, db = _gelu_backward(x, b, dy.contiguous(), ctx.tanh)
    return dx, None if b is None else db.to(b.dtype), None


_gelu.register_autograd(_backward, setup_context=_save)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(x + bias) for x [..., D] and bias [D]; as `F.gelu(x + bias, approximate=…)`.

    approximate: "none" or "tanh". Computes in float32 (float64 for float64) and rounds once, to
    the dtype of x; the bias may be float32 beside a half x. Raises ValueError for another word, or
    when dtypes, devices or D do not agree.
    """
    require_vectors(x, bias=bias)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    bias = None if bias is None else bias.contiguous()
    return _gelu(as_rows(x), bias, approximate == "tanh").view(x.shape)
