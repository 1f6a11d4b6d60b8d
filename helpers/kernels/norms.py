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
    require_vectors,
    row_tile,
)

# R = rows, D = columns, P = programs that share the rows; a program holds a tile [ROWS, BLOCK]
MAX_COLUMNS = 65536  # a whole row must fit into the registers of a program
WIDE = 8192  # columns up to which the sums fit there as well


@triton.jit
def _mean(x, D, ACC: tl.constexpr):
    """Return the mean of each row, rounded.

    A plain `/` is compiled to a product with 1 / D, and the compiler fuses a product with the
    subtraction that follows: forward would subtract a mean of more digits than it saves, and
    backward, with the saved one, would see other deviations. (One return alone: after an early one,
    Triton 3.6 compiles the rest as well, and `div_rn` takes no float64.)
    """
    total = tl.sum(x, 1, keep_dims=True)
    if ACC == tl.float64:
        mean = total / D  # always rounded
    else:
        mean = tl.div_rn(total, tl.cast(D, ACC))
    return mean


@triton.jit
def _forward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D], or None: ones
    b_ptr,  # in   [D], or None: zeros
    y_ptr,  # out  [R, D]
    stats_ptr,  # out  [3 or 1, R]: r, mean, the rest of the mean; in ACC: backward needs it exact
    x_stride,
    R,
    D,
    eps: tl.constexpr,  # a constant: see launch.py
    CENTER: tl.constexpr,  # LayerNorm; else RMSNorm
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < R) & (col < D)
    x = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
    if CENTER:
        # A mean of 1e6 is rounded to 1/16, as much as the deviations from it may be. So the mean of
        # what is left is subtracted, too. (E[x^2] - mean^2 would lose all digits.)
        mean = _mean(x, D, ACC)
        x = tl.where(col < D, x - mean, 0.0)
        rest = _mean(x, D, ACC)
        x = tl.where(col < D, x - rest, 0.0)
        tl.store(stats_ptr + R + row, mean, row < R)
        tl.store(stats_ptr + 2 * R + row, rest, row < R)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    y = x * r
    if w_ptr is not None:
        y *= tl.load(w_ptr + col, col < D, 0.0).to(ACC)
    if b_ptr is not None:
        y += tl.load(b_ptr + col, col < D, 0.0).to(ACC)
    tl.store(y_ptr + row * D + col, y.to(y_ptr.dtype.element_ty), inside)
    tl.store(stats_ptr + row, r, row < R)


@triton.jit
def _centered(x, stats_ptr, row, inside, R):
    """Return x without its mean, as in the forward pass; 0 outside."""
    x -= tl.load(stats_ptr + R + row, row < R, 0.0)
    x -= tl.load(stats_ptr + 2 * R + row, row < R, 0.0)
    return tl.where(inside, x, 0.0)


@triton.jit
def _store_sums(sums_ptr, dw, db, program, col, D, CENTER: tl.constexpr):
    at = program * (2 if CENTER else 1) * D + col
    tl.store(sums_ptr + at, tl.sum(dw, 0, keep_dims=True), col < D)
    if CENTER:
        tl.store(sums_ptr + at + D, tl.sum(db, 0, keep_dims=True), col < D)


@triton.jit
def _backward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D], or None
    stats_ptr,  # in   [3 or 1, R]: r, mean, the rest of the mean
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
    w = 1.0
    if w_ptr is not None:
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
            x = _centered(x, stats_ptr, row, inside, R)
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
    stats_ptr,  # in   [3 or 1, R]: r, mean, the rest of the mean
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
            x = _centered(x, stats_ptr, row, inside, R)
            db += dy
        dw += dy * x * tl.load(stats_ptr + row, row < R, 0.0)
    _store_sums(sums_ptr, dw, db, tl.program_id(1), col, D, CENTER)


@operator("norm")
def _norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, center: bool = False
) -> tuple[Tensor, Tensor]:
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    y = torch.empty((R, D), dtype=x.dtype, device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    stats = torch.empty((3 if center else 1, R), dtype=wide, device=x.device)
    args = (x, w, b, y, stats, x.stride(0), R, D)
    constants = {"eps": eps, "CENTER": center, "ACC": accumulator(x.dtype), **tile}
    launch(_forward_kernel, (triton.cdiv(R, tile["ROWS"]),), *args, **constants)
    return y, stats


@operator("norm_backward")
def _norm_backward(x: Tensor, w: Tensor | None, stats: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx [R, D] and the sums over the rows: [dw] for RMSNorm, [dw, db] for LayerNorm."""
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    tiles, wide, center = triton.cdiv(R, tile["ROWS"]), D > WIDE, len(stats) == 3
    P = programs(triton.cdiv(R, 32) if wide else tiles, x.device)
    sums = torch.empty((P, 1 + center, D), dtype=stats.dtype, device=x.device)
    dx = torch.empty_like(dy)
    shared = {"CENTER": center, "ACC": accumulator(x.dtype)}

    args = (x, w, stats, dy, dx, sums, x.stride(0), R, D)
    launch(_backward_kernel, (tiles if wide else P,), *args, SUMS=not wide, **shared, **tile)
    if wide:
        args, tile = (x, stats, dy, sums, x.stride(0), R, D), {"ROWS": 32, "BLOCK": 128}
        grid = (triton.cdiv(D, 128), P)
        launch(_backward_sums_kernel, grid, *args, **shared, **tile, num_warps=8)
    return dx, sums.sum(0)  # in a fixed order: the same bits every time


def _save(ctx, inputs, output):
    x, w, b, *_ = inputs
    ctx.save_for_backward(x, w, output[1])
    ctx.bias_dtype = None if b is None else b.dtype


def _backward(ctx, dy, _dstats):
    x, w, stats = ctx.saved_tensors
    dx, sums = _norm_backward(x, w, stats, dy.contiguous())
    dw = None if w is None else sums[0].to(w.dtype)
    db = None if ctx.bias_dtype is None else sums[1].to(ctx.bias_dtype)
    return dx, dw, db, None, None


_norm.register_autograd(_backward, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Normalize the last dimension of x [..., D] and scale by weight [D]; as `F.rms_norm`.

    Computes in float32 (float64 for float64) and rounds once, to the dtype of x; the weight may be
    float32 beside a half x. D <= 65,536. Raises ValueError when dtypes, devices or D do not agree.
    """
    require_vectors(x, MAX_COLUMNS, weight=weight)
    weight = None if weight is None else weight.contiguous()
    return _norm(as_rows(x), weight, None, eps)[0].view(x.shape)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize x [..., D] over D, scale by weight [D], add bias [D]; as `F.layer_norm`.

    Otherwise as `rms_norm`.
    """
    require_vectors(x, MAX_COLUMNS, weight=weight, bias=bias)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _norm(as_rows(x), weight, bias, eps, True)[0].view(x.shape)


class RMSNorm(nn.Module):
    """`rms_norm` as a layer with a weight [dim] that starts at one; as `nn.RMSNorm`."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
