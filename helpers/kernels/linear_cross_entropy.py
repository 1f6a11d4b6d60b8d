"""Chapter 13: the last linear layer and the cross-entropy in one, without all logits in memory.

    loss_i = log sum_v exp(x_i . w_v) - x_i . w_target       dlogits = softmax(logits) - one_hot

With a vocabulary of 128k words the logits are often the largest tensor of a training step: 8,192
tokens in bfloat16 make 2.1 GB, twice a weight of 4,096 columns. So a chunk of rows at a time:
logits by cuBLAS, then one kernel that turns them into the loss and, in place, into their gradient,
which is multiplied into dx and dw at once (Wijmans et al. 2024, https://arxiv.org/abs/2411.09009;
Hsu et al. 2024, https://arxiv.org/abs/2410.10989). Backward only has to scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels import INTERPRETED
from helpers.kernels.launch import accumulator, autocast, has_data, launch, operator, require

# N = rows (tokens), D = columns of x, V = vocabulary; a program handles one row of logits
MAX_BLOCK = 4096
CHUNKS = 8  # logits in memory: one eighth; more chunks would round dw more often than eager does


@triton.jit
def _kernel(
    logits_ptr,  # in   [N, V]; out: the gradient of the loss of each row, if GRAD
    target_ptr,  # in   [N], int64
    loss_ptr,  # out  [N], 0 where ignored, NaN where the target is not a word
    V,
    ignore: tl.constexpr,  # a constant: see launch.py
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    logits_ptr += row * V
    col = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], -float("inf"), ACC)  # maximum so far, in each lane
    totals = tl.zeros([BLOCK], ACC)  # sum of exp(logit - top) so far, in each lane
    hit = tl.zeros([BLOCK], ACC)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + col, start + col < V, -float("inf")).to(ACC)
        # Of the two exponentials one is exp(0). -inf - -inf would be NaN, so it is kept away.
        less = tl.exp(-tl.abs(x - tl.where(tops == -float("inf"), 0.0, tops)))
        totals = tl.where(x > tops, totals * less + 1, totals + less)
        tops = tl.maximum(tops, x)
        hit += tl.where(start + col == target, x, 0.0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - top), 0)
    keep = target != ignore
    total = tl.where((target >= 0) & (target < V), total, float("nan"))  # so that all becomes NaN
    loss = top + tl.log(total) - tl.sum(hit, 0)
    tl.store(loss_ptr + row, tl.where(keep, loss, 0.0))
    if GRAD:
        for start in range(0, V, BLOCK):
            x = tl.load(logits_ptr + start + col, start + col < V, -float("inf")).to(ACC)
            dx = tl.exp(x - top) / total - tl.where(start + col == target, 1.0, 0.0)
            dx = tl.where(keep, dx, 0.0).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + start + col, dx, start + col < V)


def _require_words(target: Tensor, V: int, ignore: int) -> None:
    """Raise IndexError as eager does. Not on a GPU: to look there is to wait for it."""
    wrong = target[(target != ignore) & ((target < 0) | (target >= V))]
    if len(wrong):
        raise IndexError(
            f"target: expected words 0 to {V - 1}, or {ignore} to be ignored, got {wrong[0].item()}"
        )


@operator("linear_cross_entropy")
def _linear_cross_entropy(
    x: Tensor, w: Tensor, target: Tensor, ignore: int, grad_x: bool, grad_w: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, V, wide = len(x), len(w), torch.promote_types(x.dtype, torch.float32)
    if INTERPRETED and has_data(target):
        _require_words(target, V, ignore)
    loss = torch.zeros(N, dtype=wide, device=x.device)
    dx = torch.empty_like(x if grad_x else x[:0])
    dw = torch.zeros_like(w if grad_w else w[:0])
    block = min(triton.next_power_of_2(V), MAX_BLOCK)
    constants = {"ignore": ignore, "GRAD": grad_x or grad_w, "BLOCK": block}
    size = max(triton.cdiv(N, CHUNKS), 1)
    for start in range(0, N, size):
        rows = slice(start, start + size)
        logits = x[rows] @ w.T  # [n, V]
        args = (logits, target[rows], loss[rows], V)
        launch(_kernel, (len(logits),), *args, ACC=accumulator(x.dtype), **constants, num_warps=8)
        if grad_x:
            torch.mm(logits, w, out=dx[rows])
        if grad_w:
            dw.addmm_(logits.T, x[rows])
        del logits, args  # else this chunk lives on beside the next
    count = (target != ignore).sum()
    return loss.sum() / count, dx, dw, count.clamp(min=1)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zeros as large as dx and dw for their own gradients
    ctx.save_for_backward(*output[1:])


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 6
    dx, dw, count = ctx.saved_tensors
    scale = dloss / count
    needed = ctx.needs_input_grad
    grads = (dx * scale if needed[0] else None, dw * scale if needed[1] else None)
    return *grads, None, None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100
) -> Tensor:
    """Return the mean of `F.cross_entropy(x @ weight.T, target)` over targets not ignored.

    x [N, D], weight [V, D], target [N] int64 -> scalar in float32 (float64 for float64). Under
    autocast, x and weight are cast as eager casts them. Differentiable once. Raises ValueError when
    shapes, dtypes or devices do not fit, IndexError for a target outside the vocabulary; on a GPU,
    which nobody waits for, that target's loss and gradients are NaN instead.
    """
    x, weight = autocast(x, weight)
    require(x=x, weight=weight)
    if x.ndim != 2 or weight.shape[1:] != x.shape[1:] or not len(weight):
        raise ValueError(
            f"expected [N, D] and [V, D], got {list(x.shape)} and {list(weight.shape)}"
        )
    if target.dtype != torch.int64 or target.shape != x.shape[:1] or target.device != x.device:
        raise ValueError(
            f"target: expected int64 [{len(x)}] on {x.device}, "
            f"got {target.dtype} {list(target.shape)} on {target.device}"
        )
    on = torch.is_grad_enabled()
    needs = (on and x.requires_grad, on and weight.requires_grad)
    args = (x.contiguous(), weight.contiguous(), target.contiguous())
    return _linear_cross_entropy(*args, ignore_index, *needs)[0]
