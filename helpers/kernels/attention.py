"""Chapter 13: attention that never stores its T x S weights: the forward pass and the operator.

    o = softmax(scale q k^T) v          lse = log sum exp(scale q k^T)

A program holds one tile of queries and walks over the keys with an online softmax; `lse` is all
that backward needs to compute the weights again (FlashAttention: Dao et al. 2022,
https://arxiv.org/abs/2205.14135; FlashAttention-2: Dao 2023, https://arxiv.org/abs/2307.08691).
Exponents are taken to base 2: one instruction. As `F.scaled_dot_product_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.attention_backward import attention_backward, config, constants, load
from helpers.kernels.launch import autotune, launch, operator, require

# Z = batch x heads, T = queries, S = keys, D = head size; tiles of BT queries and BS keys


CONFIGS = [
    config(32, 32, 1, 8),  # the one whose float32 products fit into registers
    config(64, 64, 3, 4),
    config(128, 64, 3, 4),
    config(128, 64, 3, 8),
    config(128, 128, 3, 8),
]


@autotune(CONFIGS, key=["T", "S", "D", "CAUSAL"])
@triton.jit
def _forward_kernel(
    q_ptr,  # in   [Z, T, D]
    k_ptr,  # in   [Z, S, D]
    v_ptr,  # in   [Z, S, D]
    o_ptr,  # out  [Z, T, D]
    lse_ptr,  # out  [Z, T], to base 2
    T,
    S,
    scale: tl.constexpr,  # of the scores, to base 2
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    IN: tl.constexpr,
    ACC: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    z = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BT
    t = first + tl.arange(0, BT)
    q = load(q_ptr + z * T * D, t, T, D, IN)  # [BT, D]
    top = tl.full([BT], -float("inf"), ACC)
    total = tl.zeros([BT], ACC)
    o = tl.zeros([BT, D], ACC)
    end = tl.minimum(first + BT, S) if CAUSAL else S
    whole = (first if CAUSAL else S) // BS * BS  # up to here every query sees every key
    for masked in tl.static_range(2):
        for start in range(whole if masked else 0, end if masked else whole, BS):
            s = start + tl.arange(0, BS)
            k = load(k_ptr + z * S * D, s, S, D, IN)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * scale
            if masked:
                seen = (s < S)[None, :] & ((t[:, None] >= s[None, :]) | (not CAUSAL))
                scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new[:, None])  # [BT, BS]
            old = tl.exp2(top - new)
            total = total * old + tl.sum(p, 1)
            v = load(v_ptr + z * S * D, s, S, D, IN)
            o = tl.dot(p.to(IN), v, o * old[:, None], input_precision="ieee", out_dtype=ACC)
            top = new
    at = z * T * D + t[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(o_ptr + at, (o / total[:, None]).to(o_ptr.dtype.element_ty), (t < T)[:, None])
    tl.store(lse_ptr + z * T + t, top + tl.log2(total), t < T)


@operator("attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    (Z, T, _), S = q.shape, k.shape[1]
    o, wide = torch.empty_like(q), torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty((Z, T), dtype=wide, device=q.device)
    args, fixed = (q, k, v, o, lse, T, S), constants(q, scale, causal)
    launch(_forward_kernel, lambda tile: (triton.cdiv(T, tile["BT"]), Z), *args, **fixed)
    return o, lse


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.settings = inputs[3:]


def _backward(ctx, do, _dlse):
    grads = attention_backward(*ctx.saved_tensors, do.contiguous(), *ctx.settings)
    return *grads, None, None


_attention.register_autograd(_backward, setup_context=_save)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return softmax(scale q k^T) v for q [B, H, T, D], k and v [B, H, S, D]; S == T if causal.

    scale: 1 / sqrt(D) unless given. D: 16, 32, 64 or 128. Inputs that are not contiguous are
    copied. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    require(q=q, k=k, v=v)
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2]
    if not fits or q.shape[3] != k.shape[3] or (causal and q.shape != k.shape) or not k.shape[2]:
        raise ValueError(
            "expected q [B, H, T, D] and k, v [B, H, S, D] with S > 0, and S == T if causal; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[3] not in (16, 32, 64, 128):
        raise ValueError(f"expected a head size D of 16, 32, 64 or 128, got {q.shape[3]}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    flat = (t.contiguous().flatten(0, 1) for t in (q, k, v))
    return _attention(*flat, scale, causal)[0].view(q.shape)
