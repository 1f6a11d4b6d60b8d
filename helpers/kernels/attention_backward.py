"""Chapter 13: the backward pass of attention, weights computed again tile by tile.

    p = exp(scale q k^T - lse)          dv = p^T do
    ds = p (do v^T - sum(o do))         dq = scale ds k,  dk = scale ds^T q

Two kernels: one walks over the keys for a tile of queries (dq), one over the queries for a tile of
keys (dk, dv), so no program waits for another and the sums are the same in every run. The order of
operations is that of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.kernels.launch import accumulator, autotune, launch, operand, operator

# Z = batch x heads, T = queries, S = keys, D = head size; tiles of BT queries and BS keys


def config(BT: int, BS: int, stages: int, warps: int) -> triton.Config:
    """Return one way to launch: the tiles, how many are loaded ahead, warps a program."""
    return triton.Config({"BT": BT, "BS": BS}, num_stages=stages, num_warps=warps)


CONFIGS = [
    config(32, 32, 1, 8),  # the one whose float32 products fit into registers
    config(64, 64, 2, 4),
    config(64, 128, 2, 8),
    config(128, 64, 2, 8),
]


@triton.jit
def load(ptr, row, rows, D: tl.constexpr, TO: tl.constexpr):
    """Load rows of a matrix [rows, D] as a tile [len(row), D], zeros beyond the end."""
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(ptr + at, (row < rows)[:, None], 0.0).to(TO)


@triton.jit
def _weights(q, k, lse, t, s, T, S, scale: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr):
    """Return p [BT, BS] again, from the saved `lse`; 0 where a query does not see a key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * scale
    seen = (t < T)[:, None] & (s < S)[None, :] & ((t[:, None] >= s[None, :]) | (not CAUSAL))
    return tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)


@autotune(CONFIGS, key=["T", "S", "D", "CAUSAL"])
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
    q, do = load(q_ptr + z * T * D, t, T, D, IN), load(do_ptr + z * T * D, t, T, D, IN)
    lse, delta = (
        tl.load(lse_ptr + z * T + t, t < T, 0.0),
        tl.load(delta_ptr + z * T + t, t < T, 0.0),
    )
    dq = tl.zeros([BT, D], ACC)
    for start in range(0, tl.minimum(first + BT, S) if CAUSAL else S, BS):
        s = start + tl.arange(0, BS)
        k, v = load(k_ptr + z * S * D, s, S, D, IN), load(v_ptr + z * S * D, s, S, D, IN)
        p = _weights(q, k, lse, t, s, T, S, scale, CAUSAL, ACC)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee", out_dtype=ACC) - delta[:, None])
        dq = tl.dot(ds.to(IN), k, dq, input_precision="ieee", out_dtype=ACC)
    at = z * T * D + t[:, None] * D + tl.arange(0, D)[None, :]
    dq *= scale * 0.6931471805599453  # log 2: the scale without the change of base
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), (t < T)[:, None])


@autotune(CONFIGS, key=["T", "S", "D", "CAUSAL"])
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
    k, v = load(k_ptr + z * S * D, s, S, D, IN), load(v_ptr + z * S * D, s, S, D, IN)
    dk, dv = tl.zeros([BS, D], ACC), tl.zeros([BS, D], ACC)
    for start in range(first // BT * BT if CAUSAL else 0, T, BT):  # earlier queries see no key here
        t = start + tl.arange(0, BT)
        q, do = load(q_ptr + z * T * D, t, T, D, IN), load(do_ptr + z * T * D, t, T, D, IN)
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


def constants(q: Tensor, scale: float, causal: bool) -> dict:
    """Return the compile-time arguments of all three kernels."""
    dtypes = {"IN": operand(q.dtype), "ACC": accumulator(q.dtype)}
    return {"scale": scale / math.log(2), "D": q.shape[2], "CAUSAL": causal, **dtypes}


@operator("attention_backward")
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv for the gradient `do` of the output `o`."""
    (Z, T, _), S = q.shape, k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = (o.to(lse.dtype) * do).sum(-1)  # [Z, T]
    args, fixed = (q, k, v, do, lse, delta), constants(q, scale, causal)
    launch(_backward_q_kernel, lambda t: (triton.cdiv(T, t["BT"]), Z), *args, dq, T, S, **fixed)
    grid = lambda t: (triton.cdiv(S, t["BS"]), Z)  # noqa: E731
    launch(_backward_kv_kernel, grid, *args, dk, dv, T, S, **fixed)
    return dq, dk, dv
