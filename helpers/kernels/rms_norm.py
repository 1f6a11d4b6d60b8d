"""Chapter 13: RMSNorm with its backward (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

r = 1 / sqrt(mean(x^2) + eps)       y = x r w
dx = r (g - x r mean(g x r))        with g = dy w
dw = sum over rows of dy x r
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
    y_ptr,  # out  [R, D]
    r_ptr,  # out  [R], in ACC whatever x is: backward needs the precision
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
    w = tl.load(w_ptr + col, col < D, 0.0).to(ACC)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    tl.store(y_ptr + row * D + col, (x * r * w).to(y_ptr.dtype.element_ty), inside)
    tl.store(r_ptr + row, r, row < R)


@triton.jit
def _backward_kernel(
    x_ptr,  # in   [R, D], row stride x_stride
    w_ptr,  # in   [D]
    r_ptr,  # in   [R]
    dy_ptr,  # in   [R, D]
    dx_ptr,  # out  [R, D]
    dw_ptr,  # out  [P, D], the sum over the rows of each program
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
    for start in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < R) & (col < D)
        x = tl.load(x_ptr + row * x_stride + col, inside, 0.0).to(ACC)
        dy = tl.load(dy_ptr + row * D + col, inside, 0.0).to(ACC)
        r = tl.load(r_ptr + row, row < R, 0.0)
        x_hat = x * r
        g = dy * w
        dx = r * (g - x_hat * (tl.sum(g * x_hat, 1, keep_dims=True) / D))
        tl.store(dx_ptr + row * D + col, dx.to(dx_ptr.dtype.element_ty), inside)
        dw += dy * x_hat
    at = tl.program_id(0) * D + col
    tl.store(dw_ptr + at, tl.sum(dw, 0, keep_dims=True), col < D)


@operator("rms_norm")
def _rms_norm(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    y = torch.empty((R, D), dtype=x.dtype, device=x.device)
    r = torch.empty(R, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    grid = (triton.cdiv(R, tile["ROWS"]),)
    args = (x, w, y, r, x.stride(0), R, D)
    launch(_forward_kernel, grid, *args, eps=eps, ACC=accumulator(x.dtype), **tile)
    return y, r


@operator("rms_norm_backward")
def _rms_norm_backward(x: Tensor, w: Tensor, r: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    (R, D), tile = x.shape, row_tile(x.shape[1], MAX_COLUMNS)
    P = programs(triton.cdiv(R, tile["ROWS"]), x.device)
    dx, dw = torch.empty_like(dy), torch.empty((P, D), dtype=r.dtype, device=x.device)
    args = (x, w, r, dy, dx, dw, x.stride(0), R, D)
    launch(_backward_kernel, (P,), *args, ACC=accumulator(x.dtype), **tile)
    return dx, dw.sum(0).to(w.dtype)  # a sum in a fixed order: the same bits every time


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx, dy, _dr):
    return *_rms_norm_backward(*ctx.saved_tensors, dy.contiguous()), None


_rms_norm.register_autograd(_backward, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize the last dimension of x [..., D] and scale by weight [D]; as `F.rms_norm`.

    Computes in float32 (float64 for float64) and rounds once; D <= 65,536. Raises ValueError when
    dtypes, devices or D do not agree.
    """
    require(x=x, weight=weight)
    x2 = as_rows(x)
    if weight.shape != x2.shape[1:] or not 0 < len(weight) <= MAX_COLUMNS:
        raise ValueError(
            f"weight: expected [D] with D the last of x, {list(x.shape)}, "
            f"and 1 to {MAX_COLUMNS}; got {list(weight.shape)}"
        )
    return _rms_norm(x2, weight.contiguous(), eps)[0].view(x.shape)


class RMSNorm(nn.Module):
    """`rms_norm` as a layer with a weight [dim] that starts at one; as `nn.RMSNorm`."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
