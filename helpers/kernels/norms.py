"""Chapter 13: RMSNorm and LayerNorm by one kernel.

    x_hat = (x - m) r      r = 1 / sqrt(mean (x - m)^2 + eps)      y = x_hat w + b
    dx = r (g - mean g - x_hat mean(g x_hat))                      with g = dy w
    dw = sum over rows of dy x_hat                                 db = sum over rows of dy

LayerNorm: m = mean x (Ba et al. 2016, https://arxiv.org/abs/1607.06450). RMSNorm: no m, no b and
no mean g (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

Backward is one kernel as well: each program walks over its share of the rows and keeps the sums of
its columns in registers. Beside a very wide row there is no room for them (the compiler would spill
them to memory, row after row), so then a second kernel reads x and dy once more, by columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from helpers.kernels.launch import (
    accumulator,
    as_rows,
    launch,
    operator,
    programs,
    require,
    require_vectors,
    row_tile,
)

# R = rows, D = columns, P = programs that share the rows; a program holds a tile [ROWS, BLOCK]
MAX_COLUMNS = 65536  # a whole row must fit into the registers of a program
WIDE = 8192  # columns up to which the sums fit there as well


@triton.jit
def _forward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D]
    b_ptr,  # in   [D], None unless CENTER
    y_ptr,  # out  [R, D]
    stats_ptr,  # out  [1 + CENTER, R]: r, mean; in ACC whatever x is: backward needs the precision
    x_stride,
    R,
    D,
    eps: tl.constexpr,
    CENTER: tl.constexpr,  # LayerNorm; else RMSNorm
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < R) & (col < D)
    x = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
    w = tl.load(w_ptr + col, col < D, 0.0).to(ACC)
    if CENTER:
        mean = tl.sum(x, 1, keep_dims=True) / D
        x = tl.where(col < D, x - mean, 0.0)  # a second pass: E[x^2] - mean^2 would cancel
        tl.store(stats_ptr + R + row, mean, row < R)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    y = x * r * w
    if CENTER:
        y += tl.load(b_ptr + col, col < D, 0.0).to(ACC)
    tl.store(y_ptr + row * D + col, y.to(y_ptr.dtype.element_ty), inside)
    tl.store(stats_ptr + row, r, row < R)


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
def _backward_sums_kernel(
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


@operator("norm")
def _norm(x: Tensor, w: Tensor, b: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    (R, D), tile, center = x.shape, row_tile(x.shape[1], MAX_COLUMNS), b is not None
    y = torch.empty((R, D), dtype=x.dtype, device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    stats = torch.empty((1 + center, R), dtype=wide, device=x.device)
    args = (x, w, b, y, stats, x.stride(0), R, D)
    constants = {"eps": eps, "CENTER": center, "ACC": accumulator(x.dtype), **tile}
    launch(_forward_kernel, (triton.cdiv(R, tile["ROWS"]),), *args, **constants)
    return y, stats


@operator("norm_backward")
def _norm_backward(x: Tensor, w: Tensor, stats: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    tiles, wide = triton.cdiv(R, tile["ROWS"]), D > WIDE
    P = programs(triton.cdiv(R, 32) if wide else tiles, x.device)
    sums = torch.empty((P, len(stats), D), dtype=stats.dtype, device=x.device)
    dx, shared = torch.empty_like(dy), {"CENTER": len(stats) == 2, "ACC": accumulator(x.dtype)}
    args = (x, w, stats, dy, dx, sums, x.stride(0), R, D)
    launch(_backward_kernel, (tiles if wide else P,), *args, SUMS=not wide, **shared, **tile)
    if wide:
        args, tile = (x, stats, dy, sums, x.stride(0), R, D), {"ROWS": 32, "BLOCK": 128}
        launch(
            _backward_sums_kernel, (triton.cdiv(D, 128), P), *args, **shared, **tile, num_warps=8
        )
    return dx, sums.sum(0).to(w.dtype)  # a sum in a fixed order: the same bits every time


def _backward(ctx, dy, _dstats):
    dx, (dw, *db) = _norm_backward(*ctx.saved_tensors, dy.contiguous())
    return dx, dw, db[0] if db else None, None


_norm.register_autograd(
    _backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1]),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize the last dimension of x [..., D] and scale by weight [D]; as `F.rms_norm`.

    Computes in float32 (float64 for float64) and rounds once; D <= 65,536. Raises ValueError when
    dtypes, devices or D do not agree.
    """
    require(x=x, weight=weight)
    require_vectors(x, MAX_COLUMNS, weight=weight)
    return _norm(as_rows(x), weight.contiguous(), None, eps)[0].view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize x [..., D] over D, scale by weight [D], add bias [D]; as `F.layer_norm`.

    Otherwise as `rms_norm`.
    """
    require(x=x, weight=weight, bias=bias)
    require_vectors(x, MAX_COLUMNS, weight=weight, bias=bias)
    return _norm(as_rows(x), weight.contiguous(), bias.contiguous(), eps)[0].view(x.shape)


class RMSNorm(nn.Module):
    """`rms_norm` as a layer with a weight [dim] that starts at one; as `nn.RMSNorm`."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
