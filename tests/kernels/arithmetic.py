"""What each kernel computes and where it rounds, for the yardstick in numerics.py.

Every function takes (dtype, dy, *inputs) and returns the output and the gradients. `.to(dtype)`
stands where the kernel rounds to the dtype of its inputs; everything else is float32.
"""

import math

import torch

from tests.kernels.numerics import Rounded, U


def constant(x: float) -> Rounded:
    """A number compiled into a kernel: rounded to float32."""
    return Rounded(torch.tensor(x, dtype=torch.float64), torch.tensor(U * abs(x)).double())


def exp_online(x: Rounded, top: torch.Tensor, blocks: int) -> Rounded:
    """exp(x - top) by an online sum: each block rescales by an exponential and a product.

    The exponents of these factors and of the term itself have one sign and add up to x - top.
    """
    shift = top.where(top != -math.inf, 0.0)
    return (x - shift).exp().times(9 * blocks)


def log_sum_exp(x: Rounded, blocks: int) -> Rounded:
    """Of x with errors: moved by no more than the most that any x is (its gradient adds up to 1).

    Those that are smaller than the largest by 88, so that float32 has no number for exp, do not
    count. The approximate logarithm to base 2 has an absolute error near 1.
    """
    top = x.value.amax(-1, keepdim=True)
    own = exp_online(Rounded.exact(x.value), top, blocks).sum(-1).apply(torch.log)
    counts = x.value + x.error >= (x.value - x.error).amax(-1, keepdim=True) - 88
    moved = x.error.where(counts, 0.0).amax(-1, keepdim=True)
    lse = top + own
    return Rounded(lse.value, lse.error + moved + 8 * U)


def over_rows(x: Rounded) -> Rounded:
    return x.sum(0) if x.value.ndim > 1 else x


def vector_add(dtype, dy, x, y):
    return [(x + y).to(dtype), dy, dy]


def softmax(dtype, dy, x, blocks=1):
    top = x.value.amax(-1, keepdim=True) if x.value.numel() else x.value
    e = exp_online(x, top, blocks)
    y = (e / e.sum(-1)).to(dtype)
    dx = y * (dy - (y * dy).sum(-1))
    return [y, dx.to(dtype)]


def norm(dtype, dy, x, w=None, b=None, *, center, eps):
    """RMSNorm, LayerNorm; the rounding of the mean is harmless: any shift is undone by the next."""
    D = x.value.shape[-1]
    if x.value.ndim > 1:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    if center:
        mean = x.value.mean(-1, keepdim=True)
        off = (D + 2) * U * x.value.abs().mean(-1, keepdim=True)  # |rounded mean - mean|
        # x - shift for some shift within `off` of the mean: larger by `off`, but no less exact
        rounding = U * ((x.value - mean).abs() + off)
        mean_of_rest = (D + 3) * U * ((x.value - mean).abs() + off).mean(-1, keepdim=True)
        x = Rounded(x.value - mean, rounding + mean_of_rest + U * off) + 0.0
    r = 1 / ((x * x).sum(-1) / D + constant(eps)).apply(torch.sqrt) if D else x
    x_hat = x * r
    y = x_hat if w is None else x_hat * w
    y = y if b is None else y + b
    g = dy if w is None else dy * w
    dx = g - x_hat * ((g * x_hat).sum(-1) / D)
    if center:
        dx = dx - g.sum(-1) / D
    grads = [(dx * r).to(dtype)]
    if w is not None:
        grads.append(over_rows(dy * x_hat).to(dtype))
    if b is not None:
        grads.append(over_rows(dy).to(dtype))
    return [y.to(dtype), *grads]


def gelu(dtype, dy, x, b=None, *, tanh):
    if x.value.ndim > 1:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    z = x if b is None else x + b
    if tanh:
        double = constant(2 * math.sqrt(2 / math.pi))
        w = double * (z + constant(0.044715) * z * z * z)
        normal = 1 / (1 + (-w).exp())
        other = 1 / (1 + w.exp())
        slope = double * (1 + constant(3 * 0.044715) * z * z)
        slope = normal + z * normal * other * slope
    else:
        normal = 0.5 * (1 + (z * constant(math.sqrt(0.5))).apply(torch.erf))
        slope = normal + z * (constant(1 / math.sqrt(2 * math.pi)) * (-0.5 * z * z).exp())
    dx = dy * slope
    grads = [dx.to(dtype)]
    if b is not None:
        grads.append(over_rows(dx).to(dtype))
    return [(z * normal).to(dtype), *grads]


def dropout(dtype, dy, x, *, keep, p):
    scale = constant(1 / (1 - p)) * keep.double()
    return [(x * scale).to(dtype), (dy * scale).to(dtype)]


def matmul(dtype, dy, a, b):
    return [(a @ b).to(dtype), (dy @ b.mT).to(dtype), (a.mT @ dy).to(dtype)]


def attention(dtype, dy, q, k, v, *, causal=False, scale=None, block=32):
    """Half precision: the tensor cores take the weights p and ds rounded to the inputs' dtype."""
    T, S, D = q.value.shape[-2], k.value.shape[-2], q.value.shape[-1]
    operand = dtype if dtype.itemsize == 2 else torch.float64  # that is, not rounded
    scale = constant(D**-0.5 if scale is None else scale)
    blocks = math.ceil(S / block) + 1
    scores = (q @ k.mT) * scale
    if causal:
        seen = torch.ones(T, S).tril().bool()
        scores = Rounded(
            scores.value.where(seen, -math.inf), scores.error.where(seen, torch.tensor(0.0))
        )

    p = exp_online(scores, scores.value.amax(-1, keepdim=True), blocks)
    total = p.sum(-1)
    empty = total.value == 0
    total = Rounded(total.value.where(~empty, 1.0), total.error.where(~empty, 0.0))
    o = ((p.to(operand) @ v) / total).to(dtype)

    lse = log_sum_exp(scores, blocks)
    lse = Rounded(lse.value.where(~empty, math.inf), lse.error.where(~empty, 0.0))
    p = (scores - lse).exp()
    delta = (o * dy).sum(-1)
    ds = p * (dy @ v.mT - delta)
    dq = (ds.to(operand) @ k) * (scale * constant(1.0))
    dk = (ds.to(operand).mT @ q) * (scale * constant(1.0))
    dv = p.to(operand).mT @ dy
    return [o, dq.to(dtype), dk.to(dtype), dv.to(dtype)]


def linear_cross_entropy(dtype, dy, x, w, *, target, ignore=-100, chunks=8, block=4096):
    """The logits and their gradient are rounded to dtype; dw is after each of the chunks."""
    N, V = len(x.value), len(w.value)
    logits = (x @ w.mT).to(dtype)
    keep = (target != ignore)[:, None]
    word = target.where(keep[:, 0], 0)[:, None]
    count = keep.sum().item()

    top = logits.value.amax(-1, keepdim=True)
    e = exp_online(logits, top, math.ceil(V / block) + 1)
    total = e.sum(-1)
    hit = Rounded(logits.value.gather(1, word), logits.error.gather(1, word))
    losses = (log_sum_exp(logits, math.ceil(V / block) + 1) - hit) * keep.double()
    loss = losses.sum(0, keepdim=False).sum(0, keepdim=False) / count

    one_hot = torch.zeros(N, V).double().scatter_(1, word, 1.0)
    dlogits = ((e / total - one_hot) * keep.double()).to(dtype)
    dx = (dlogits @ w).to(dtype)
    dw = Rounded.exact(torch.zeros_like(w.value))
    size = max(math.ceil(N / chunks), 1)
    for start in range(0, N, size):
        rows = slice(start, start + size)
        part = Rounded(dlogits.value[rows], dlogits.error[rows]).mT
        dw = (dw + part @ Rounded(x.value[rows], x.error[rows])).to(dtype)
    scale = (dy / count).to(dtype)
    return [loss, (dx * scale).to(dtype), (dw * scale).to(dtype)]
