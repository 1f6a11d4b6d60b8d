"""The exercises of chapter 06 refuse plausible wrong answers and take right ones of any style."""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

# ---- bce


def with_maximum(z, t):
    positive = torch.maximum(z, torch.zeros_like(z))
    return (positive - z * t + (-z.abs()).exp().log1p()).mean()


def with_logsigmoid(z, t):
    return -(t * F.logsigmoid(z) + (1 - t) * F.logsigmoid(-z)).mean()


def with_softplus(z, t):
    return (torch.logaddexp(z, torch.zeros_like(z)) - z * t).sum() / z.numel()


def with_clamp(z, t):
    """Right but for the gradient at z = 0, where clamp passes all of it and abs none."""
    return (z.clamp(min=0) - z * t + (-z.abs()).exp().log1p()).mean()


def log_of_sigmoid(z, t):
    s = z.sigmoid()
    return -(t * s.log() + (1 - t) * (1 - s).log()).mean()


def log_of_sigmoid_and_a_little(z, t):
    s = z.sigmoid()
    return -(t * (s + 1e-12).log() + (1 - t) * (1 - s + 1e-12).log()).mean()


def log_of_one_plus_exp(z, t):
    return ((1 + z.exp()).log() - z * t).mean()


# ---- mean_of


def of_filled(means, sizes):
    filled = sizes > 0
    return (means[filled] * sizes[filled]).sum() / sizes.sum()


def where_filled(means, sizes):
    return torch.where(sizes == 0, 0.0, means * sizes).sum().div(sizes.sum())


def by_shares(means, sizes):
    shares = sizes[sizes > 0] / sizes.sum().to(means.dtype)
    return (shares * means[sizes > 0]).sum()


# ---- clip


def by_one_norm(a, b, bound, eps=1e-6):
    norm = (a.square().sum() + b.square().sum()).sqrt()
    factor = (bound / (norm + eps)).clamp(max=1)
    return a * factor, b * factor


def by_cat(a, b, bound):
    norm = torch.cat([a.flatten(), b.flatten()]).norm()
    factor = min(1.0, bound / (norm.item() + 1e-6))
    return [a * factor, b * factor]


def with_eps_under_the_root(a, b, bound):
    norm = (a.square().sum() + b.square().sum() + 1e-6).sqrt()
    factor = (bound / norm).clamp(max=1)
    return a * factor, b * factor


def with_two_norms(a, b, bound):
    return tuple(g * (bound / (g.norm() + 1e-6)).clamp(max=1) for g in (a, b))


def without_limit(a, b, bound):
    norm = (a.square().sum() + b.square().sum()).sqrt()
    return a * bound / (norm + 1e-6), b * bound / (norm + 1e-6)


def with_sum_of_norms(a, b, bound):
    factor = (bound / (a.norm() + b.norm() + 1e-6)).clamp(max=1)
    return a * factor, b * factor


def in_place(a, b, bound):
    factor = (bound / ((a.square().sum() + b.square().sum()).sqrt() + 1e-6)).clamp(max=1)
    return a.mul_(factor), b.mul_(factor)


# ---- stop_at


def with_count(losses, patience, better=lambda new, best: new < best, first=1, more=0, start=True):
    """A count of looks since the best; the options make it wrong."""
    best, best_at, since = math.inf, 0, 0
    for look, loss in enumerate(losses, first):
        if better(loss, best):
            best, best_at = loss, look
            since = 0 if start else since
        else:
            since += 1
        if since >= patience + more:
            break
    return best_at, look


def with_distance(losses, patience):
    best, best_at = math.inf, 0
    for look, loss in enumerate(losses, 1):
        if loss < best:
            best, best_at = loss, look
        elif look - best_at >= patience:
            break
    return [best_at, np.int64(look)]


def with_hindsight(losses, patience):
    _, last = with_count(losses, patience)
    return int(np.nanargmin(losses)) + 1, last


def best_of_all_seen(losses, patience):
    best, last = with_count(losses, patience)
    return best, len(losses)


# ---- amsgrad


def update(p, grads, lr, decay, *, ams=True, correct_first=False, eps_inside=False, decoupled=False,
           from_zero=False, no_correction=False):  # fmt: skip
    """AMSGrad's steps; the options make it wrong."""
    m, v, largest = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    p = p.clone()
    for t, g in enumerate(grads, 0 if from_zero else 1):
        if decoupled:
            p = p * (1 - lr * decay)
        else:
            g = g + decay * p
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        bias1, bias2 = 1 - 0.9**t, 1 - 0.999**t
        if no_correction:
            bias1 = bias2 = 1.0
        if correct_first:
            largest = torch.maximum(largest, v / bias2)
            second = largest
        else:
            largest = torch.maximum(largest, v) if ams else v
            second = largest / bias2
        root = (second + 1e-8).sqrt() if eps_inside else second.sqrt() + 1e-8
        p = p - lr * m / bias1 / root
    return p


def adam_of_torch(p, grads, lr, decay):
    q = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.Adam([q], lr=lr, weight_decay=decay)
    for g in grads:
        q.grad = g.clone()
        optimizer.step()
    return q.detach()


def with_lerp(p, grads, lr, decay):
    m, v, largest = (torch.zeros_like(p) for _ in range(3))
    for t, g in enumerate(grads, 1):
        g = g + decay * p
        m = m.lerp(g, 0.1)
        v = v.mul(0.999).addcmul(g, g, value=0.001)
        largest = largest.maximum(v)
        root = largest.sqrt() / math.sqrt(1 - 0.999**t) + 1e-8
        p = p - lr / (1 - 0.9**t) * m / root
    return p.clone()


def on_p_itself(p, grads, lr, decay):
    return p.copy_(update(p, grads, lr, decay))


RIGHT = [
    ("bce", with_maximum),
    ("bce", with_logsigmoid),
    ("bce", with_softplus),
    ("mean_of", of_filled),
    ("mean_of", where_filled),
    ("mean_of", by_shares),
    ("clip", by_one_norm),
    ("clip", by_cat),
    ("stop_at", with_count),
    ("stop_at", with_distance),
    ("amsgrad", update),
    ("amsgrad", with_lerp),
]

WRONG = [
    ("bce", with_clamp, "gradient of argument 1: value: "),
    ("bce", log_of_sigmoid, "inf or nan"),
    ("bce", log_of_sigmoid_and_a_little, "value: "),
    ("bce", log_of_one_plus_exp, "inf or nan"),
    ("bce", lambda z, t: with_maximum(z, t) * z.numel(), "value: "),
    ("bce", lambda z, t: with_maximum(z, 1 - t), "value: "),
    ("bce", lambda z, t: with_maximum(z, t).detach(), "is cut off from its arguments"),
    ("bce", lambda z, t: with_maximum(z, t.detach()), "gradient of argument 2"),
    ("mean_of", lambda m, s: m.mean(), "value: "),
    ("mean_of", lambda m, s: (m * s).sum() / s.sum(), "inf or nan"),
    ("mean_of", lambda m, s: (m.nan_to_num() * s).sum() / s.sum(), "value: "),
    ("mean_of", lambda m, s: torch.nansum(m * s) / s.sum(), "value: "),
    ("mean_of", lambda m, s: m[s > 0].mean(), "value: "),
    ("mean_of", lambda m, s: of_filled(m, s).item(), "expected Tensor, got float"),
    ("mean_of", lambda m, s: of_filled(m.double(), s), "dtype: expected torch.float32"),
    ("clip", partial(by_one_norm, eps=0.0), "value: "),
    ("clip", partial(by_one_norm, eps=1e-4), "value: "),
    ("clip", partial(by_one_norm, eps=1e-8), "value: "),
    ("clip", with_eps_under_the_root, "value: "),
    ("clip", with_two_norms, "value: "),
    ("clip", without_limit, "value: "),
    ("clip", with_sum_of_norms, "value: "),
    ("clip", lambda a, b, c: (a.clamp(-c, c), b.clamp(-c, c)), "value: "),
    ("clip", in_place, "argument 1 was changed in place"),
    ("stop_at", partial(with_count, better=lambda new, best: new <= best), "value is not right"),
    ("stop_at", partial(with_count, better=lambda new, best: not new >= best), "not right: "),
    ("stop_at", partial(with_count, first=0), "result 1: value is not right"),
    ("stop_at", partial(with_count, more=1), "result 2: value is not right"),
    ("stop_at", partial(with_count, start=False), "value is not right"),
    ("stop_at", with_hindsight, "result 1: "),
    ("stop_at", best_of_all_seen, "result 2: value is not right"),
    (
        "stop_at",
        lambda losses, patience: with_count(losses, patience)[0],
        "expected tuple, got int",
    ),
    ("amsgrad", adam_of_torch, "value: "),
    ("amsgrad", partial(update, ams=False), "value: "),
    ("amsgrad", partial(update, correct_first=True), "value: "),
    ("amsgrad", partial(update, eps_inside=True), "value: "),
    ("amsgrad", partial(update, decoupled=True), "value: "),
    ("amsgrad", partial(update, from_zero=True), "inf or nan"),
    ("amsgrad", partial(update, no_correction=True), "value: "),
    ("amsgrad", on_p_itself, "argument 1 was changed in place"),
]
