"""Chapter 13: RMSNorm and LayerNorm by one kernel: the forward pass and the operator.

    x_hat = (x - m) r      r = 1 / sqrt(mean (x - m)^2 + eps)      y = x_hat w + b

LayerNorm: m = mean x (Ba et al. 2016, https://arxiv.org/abs/1607.06450). RMSNorm: no m and no b
(Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).
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
    require,
    require_vectors,
    row_tile,
)
from helpers.kernels.norms_backward import MAX_COLUMNS, norm_backward

# R = rows, D = columns; a program holds a tile [ROWS, BLOCK]


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


def _backward(ctx, dy, _dstats):
    dx, (dw, *db) = norm_backward(*ctx.saved_tensors, dy.contiguous())
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
