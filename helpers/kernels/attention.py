"""Chapter 13: attention that never stores its T x S weights.

    o = softmax(scale q k^T) v          lse = log sum exp(scale q k^T)
    p = exp(scale q k^T - lse)          dv = p^T do
    ds = p (do v^T - sum(o do))         dq = scale ds k,  dk = scale ds^T q

Forward, a program holds one tile of queries and walks over the keys with an online softmax; `lse`
is all that backward needs to compute the weights p again, tile by tile (FlashAttention: Dao et al.
2022, https://arxiv.org/abs/2205.14135; FlashAttention-2: Dao 2023,
https://arxiv.org/abs/2307.08691). Backward is two kernels: one walks over the keys for a tile of
queries (dq), one over the queries for a tile of keys (dk, dv), so no program waits for another and
the sums are the same in every run. Exponents are taken to base 2: one instruction. As
`F.scaled_dot_product_attention`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import (
    accumulator,
    autocast,
    autotune,
    launch,
    operand,
    operator,
    require,
)

# Z = batch x heads, T = queries, S = keys, D = head size; tiles of BT queries and BS keys


def _config(BT: int, BS: int, stages: int, warps: int) -> triton.Config:
    """Return one way to launch: the tiles, how many are loaded ahead, warps a program."""
    return triton.Config({"BT": BT, "BS": BS}, num_stages=stages, num_warps=warps)


TILES = {"BT": "T", "BS": "S"}
FORWARD = [
    _config(32, 32, 1, 8),  # the one whose float32 products fit into registers
    _config(64, 64, 3, 4),
    _config(128, 64, 3, 4),
    _config(128, 64, 3, 8),
    _config(128, 128, 3, 8),
]
BACKWARD = [
    _config(32, 32, 1, 8),  # the one whose float32 products fit into registers
    _config(64, 64, 2, 4),
    _config(64, 128, 2, 8),
    _config(128, 64, 2, 8),
]


@triton.jit
def _load(ptr, row, rows, D: tl.constexpr, TO: tl.constexpr):
    """Load rows of a matrix [rows, D] as a tile [len(row), D], zeros beyond the end."""
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(ptr + at, (row < rows)[:, None], 0.0).to(TO)


@autotune(FORWARD, key=["T", "S", "D", "CAUSAL"], tiles=TILES)
@triton.jit
def _forward_kernel(
    q_ptr,  # in   [Z, T, D]
    k_ptr,  # in   [Z, S, D]
    v_ptr,  # in   [Z, S, D]
    o_ptr,  # out  [Z, T, D]
    lse_ptr,  # out  [Z, T], to base 2; +inf where all scores are -inf: exp2(s - lse) is 0 then
    T,
    S,
    scale: tl.constexpr,  # of the scores, to base 2; a constant: see launch.py
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
    q = _load(q_ptr + z * T * D, t, T, D, IN)  # [BT, D]
    top = tl.full([BT], -float("inf"), ACC)
    total = tl.zeros([BT], ACC)
    o = tl.zeros([BT, D], ACC)
    end = tl.minimum(first + BT, S) if CAUSAL else S
    whole = (first if CAUSAL else S) // BS * BS  # up to here every query sees every key
    for masked in tl.static_range(2):
        for start in range(whole if masked else 0, end if masked else whole, BS):
            s = start + tl.arange(0, BS)
            k = _load(k_ptr + z * S * D, s, S, D, IN)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * scale
            if masked:
                seen = (s < S)[None, :] & ((t[:, None] >= s[None, :]) | (not CAUSAL))
                scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new == -float("inf"), 0.0, new)  # all masked: -inf - -inf is NaN
            p = tl.exp2(scores - shift[:, None])  # [BT, BS]
            old = tl.exp2(top - shift)
            total = total * old + tl.sum(p, 1)
            v = _load(v_ptr + z * S * D, s, S, D, IN)
            o = tl.dot(p.to(IN), v, o * old[:, None], input_precision="ieee", out_dtype=ACC)
            top = new
    at = z * T * D + t[:, None] * D + tl.arange(0, D)[None, :]
    masked_rows = total == 0  # eager gives 0 there, not 0 / 0
    o /= tl.where(masked_rows, 1.0, total)[:, None]
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), (t < T)[:, None])
    lse = tl.where(masked_rows, float("inf"), top + tl.log2(total))
    tl.store(lse_ptr + z * T + t, lse, t < T)


@triton.jit
def _weights(q, k, lse, t, s, T, S, scale: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr):
    """Return p [BT, BS] again, from the saved `lse`; 0 where a query does not see a key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * scale
    seen = (t < T)[:, None] & (s < S)[None, :] & ((t[:, None] >= s[None, :]) | (not CAUSAL))
    return tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)


@autotune(BACKWARD, key=["T", "S", "D", "CAUSAL"], tiles=TILES)
@triton.jit
def _backward_q_kernel(
    q_ptr,  # in   [Z, T, D]
    k_ptr,  # in   [Z, S, D]
    v_ptr,  # in   [Z, S, D]
    do_ptr,  # in   [Z, T, D]
    lse_ptr,  # in   [Z, T], to base 2
    delta_ptr,  # in   [Z, T], sum(o do)
    dq_ptr,  # out  [Z, T, D]
    T,
    S,
    scale: tl.constexpr,
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
    q, do = _load(q_ptr + z * T * D, t, T, D, IN), _load(do_ptr + z * T * D, t, T, D, IN)
    lse, delta = (
        tl.load(lse_ptr + z * T + t, t < T, 0.0),
        tl.load(delta_ptr + z * T + t, t < T, 0.0),
    )
    dq = tl.zeros([BT, D], ACC)
    for start in range(0, tl.minimum(first + BT, S) if CAUSAL else S, BS):
        s = start + tl.arange(0, BS)
        k, v = _load(k_ptr + z * S * D, s, S, D, IN), _load(v_ptr + z * S * D, s, S, D, IN)
        p = _weights(q, k, lse, t, s, T, S, scale, CAUSAL, ACC)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee", out_dtype=ACC) - delta[:, None])
        dq = tl.dot(ds.to(IN), k, dq, input_precision="ieee", out_dtype=ACC)
    at = z * T * D + t[:, None] * D + tl.arange(0, D)[None, :]
    dq *= scale * 0.6931471805599453  # log 2: the scale without the change of base
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), (t < T)[:, None])


@autotune(BACKWARD, key=["T", "S", "D", "CAUSAL"], tiles=TILES)
@triton.jit
def _backward_kv_kernel(
    q_ptr,  # in   [Z, T, D]
    k_ptr,  # in   [Z, S, D]
    v_ptr,  # in   [Z, S, D]
    do_ptr,  # in   [Z, T, D]
    lse_ptr,  # in   [Z, T], to base 2
    delta_ptr,  # in   [Z, T], sum(o do)
    dk_ptr,  # out  [Z, S, D]
    dv_ptr,  # out  [Z, S, D]
    T,
    S,
    scale: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    IN: tl.constexpr,
    ACC: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    z = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BS
    s = first + tl.arange(0, BS)
    k, v = _load(k_ptr + z * S * D, s, S, D, IN), _load(v_ptr + z * S * D, s, S, D, IN)
    dk, dv = tl.zeros([BS, D], ACC), tl.zeros([BS, D], ACC)
    for start in range(first // BT * BT if CAUSAL else 0, T, BT):  # earlier queries see no key here
        t = start + tl.arange(0, BT)
        q, do = _load(q_ptr + z * T * D, t, T, D, IN), _load(do_ptr + z * T * D, t, T, D, IN)
        lse = tl.load(lse_ptr + z * T + t, t < T, 0.0)
        delta = tl.load(delta_ptr + z * T + t, t < T, 0.0)
        p = _weights(q, k, lse, t, s, T, S, scale, CAUSAL, ACC)
        dv = tl.dot(tl.trans(p.to(IN)), do, dv, input_precision="ieee", out_dtype=ACC)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee", out_dtype=ACC) - delta[:, None])
        dk = tl.dot(tl.trans(ds.to(IN)), q, dk, input_precision="ieee", out_dtype=ACC)
    at = z * S * D + s[:, None] * D + tl.arange(0, D)[None, :]
    dk *= scale * 0.6931471805599453
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), (s < S)[:, None])
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), (s < S)[:, None])


def _constants(q: Tensor, scale: float, causal: bool) -> dict:
    """Return the compile-time arguments of all three kernels."""
    dtypes = {"IN": operand(q.dtype), "ACC": accumulator(q.dtype)}
    return {"scale": scale / math.log(2), "D": q.shape[2], "CAUSAL": causal, **dtypes}


@operator("attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    (Z, T, _), S = q.shape, k.shape[1]
    o, wide = torch.empty_like(q), torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty((Z, T), dtype=wide, device=q.device)
    args, fixed = (q, k, v, o, lse, T, S), _constants(q, scale, causal)
    launch(_forward_kernel, lambda tile: (triton.cdiv(T, tile["BT"]), Z), *args, **fixed)
    return o, lse


@operator("attention_backward")
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (Z, T, _), S = q.shape, k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = (o.to(lse.dtype) * do).sum(-1)  # [Z, T]
    args, fixed = (q, k, v, do, lse, delta), _constants(q, scale, causal)
    launch(_backward_q_kernel, lambda t: (triton.cdiv(T, t["BT"]), Z), *args, dq, T, S, **fixed)
    grid = lambda t: (triton.cdiv(S, t["BS"]), Z)  # noqa: E731
    launch(_backward_kv_kernel, grid, *args, dk, dv, T, S, **fixed)
    return dq, dk, dv


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.settings = inputs[3:]


def _backward(ctx, do, _dlse):
    grads = _attention_backward(*ctx.saved_tensors, do.contiguous(), *ctx.settings)
    return *grads, None, None


_attention.register_autograd(_backward, setup_context=_save)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return softmax(scale q k^T) v for q [B, H, T, D], k and v [B, H, S, D]; S == T if causal.

    scale: 1 / sqrt(D) unless given. D: 16, 32, 64 or 128. Inputs that are not contiguous are
    copied. Under autocast the inputs are cast as eager casts them. A query whose scores are all
    -inf gives 0, as in eager. NaN in a key or value that the causal mask hides reaches the queries
    of the same tile alone (0 * NaN), in eager all. Raises ValueError when shapes, dtypes or
    devices do not fit.
    """
    q, k, v = autocast(q, k, v)
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
