"""Chapter 13: LayerNorm with its backward (Ba et al. 2016, https://arxiv.org/abs/1607.06450).

h = (x - mean x) r      r = 1 / sqrt(var x + eps)      y = h w + b
dx = r (g - mean g - h mean(g h))                      with g = dy w
dw = sum over rows of dy h,   db = sum over rows of dy
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
    row_tile,
)

# R = rows, D = columns, P = programs of the backward kernel; a program holds a tile [ROWS, BLOCK]
MAX_COLUMNS = 65536  # a whole row must fit into the registers of a program


@triton.jit
def _forward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D]
    b_ptr,  # in   [D]
    y_ptr,  # out  [R, D]
    stats_ptr,  # out  [R, 2]: mean and r, in ACC whatever x is: backward needs the precision
    x_stride,
    R,
    D,
    eps: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < R) & (col < D)
    x = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
    mean = tl.sum(x, 1, keep_dims=True) / D
    h = tl.where(col < D, x - mean, 0.0)  # two passes over registers: E[x^2] - mean^2 cancels
    r = 1.0 / tl.sqrt(tl.sum(h * h, 1, keep_dims=True) / D + eps)
    w = tl.load(w_ptr + col, col < D, 0.0).to(ACC)
    b = tl.load(b_ptr + col, col < D, 0.0).to(ACC)
    tl.store(y_ptr + row * D + col, (h * r * w + b).to(y_ptr.dtype.element_ty), inside)
    tl.store(stats_ptr + 2 * row, mean, row < R)
    tl.store(stats_ptr + 2 * row + 1, r, row < R)


@triton.jit
def _backward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D]
    stats_ptr,  # in   [R, 2]
    dy_ptr,  # in   [R, D]
    dx_ptr,  # out  [R, D]
    sums_ptr,  # out  [P, 2, D]: dw and db, summed over the rows of each program
    x_stride,
    R,
    D,
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
        mean = tl.load(stats_ptr + 2 * row, row < R, 0.0)
        r = tl.load(stats_ptr + 2 * row + 1, row < R, 0.0)
        h = tl.where(inside, x - mean, 0.0) * r
        g = dy * w
        mean_g = tl.sum(g, 1, keep_dims=True) / D
        mean_gh = tl.sum(g * h, 1, keep_dims=True) / D
        dx = r * (g - mean_g - h * mean_gh)
        tl.store(dx_ptr + row * D + col, dx.to(dx_ptr.dtype.element_ty), inside)
        dw += dy * h
        db += dy
    at = tl.program_id(0) * 2 * D + col
    tl.store(sums_ptr + at, tl.sum(dw, 0, keep_dims=True), col < D)
    tl.store(sums_ptr + at + D, tl.sum(db, 0, keep_dims=True), col < D)


@operator("layer_norm")
def _layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    y = torch.empty((R, D), dtype=x.dtype, device=x.device)
    stats = torch.empty((R, 2), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    grid = (triton.cdiv(R, tile["ROWS"]),)
    args = (x, w, b, y, stats, x.stride(0), R, D)
    launch(_forward_kernel, grid, *args, eps=eps, ACC=accumulator(x.dtype), **tile)
    return y, stats


@operator("layer_norm_backward")
def _layer_norm_backward(x: Tensor, w: Tensor, stats: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    P = programs(triton.cdiv(R, tile["ROWS"]), x.device)
    dx, sums = torch.empty_like(dy), torch.empty((P, 2, D), dtype=stats.dtype, device=x.device)
    args = (x, w, stats, dy, dx, sums, x.stride(0), R, D)
    launch(_backward_kernel, (P,), *args, ACC=accumulator(x.dtype), **tile)
    return dx, sums.sum(0).to(w.dtype)  # a sum in a fixed order: the same bits every time


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx, dy, _dstats):
    dx, sums = _layer_norm_backward(*ctx.saved_tensors, dy.contiguous())
    return dx, sums[0], sums[1], None


_layer_norm.register_autograd(_backward, setup_context=_save)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize x [..., D] over D, scale by weight [D], add bias [D]; as `F.layer_norm`.

    Computes in float32 (float64 for float64) and rounds once; D <= 65,536. Raises ValueError when
    dtypes, devices or D do not agree.
    """
    require(x=x, weight=weight, bias=bias)
    x2 = as_rows(x)
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor.shape != x2.shape[1:] or not 0 < len(tensor) <= MAX_COLUMNS:
            raise ValueError(
                f"{name}: expected [D] with D the last of x, {list(x.shape)}, "
                f"and 1 to {MAX_COLUMNS}; got {list(tensor.shape)}"
            )
    return _layer_norm(x2, weight.contiguous(), bias.contiguous(), eps)[0].view(x.shape)


class LayerNorm(nn.Module):
    """`layer_norm` as a layer: weight [dim] of ones, bias [dim] of zeros; as `nn.LayerNorm`."""

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
