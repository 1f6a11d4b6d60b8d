"""Mistakes planted in each kernel: the yardstick finds every one, in each dtype by itself."""

import importlib.util
import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import helpers.kernels.dropout
from tests.kernels import arithmetic
from tests.kernels.numerics import DTYPES, Rounded, assert_rounds_well, randn

HALF = DTYPES[1:]
FOLDER = Path(helpers.kernels.__file__).parent
NUMBERS = itertools.count()

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of what is planted


# What is tried on each module: (function, eager, arithmetic, inputs), as in its own tests.


def vector_add(module, dtype):
    inputs = [randn(1025, device="cpu", dtype=dtype) for _ in range(2)]
    yield module.vector_add, torch.add, arithmetic.vector_add, inputs


def softmax(module, dtype):
    eager = partial(torch.softmax, dim=-1)
    for most in (16, 16384):
        module.MAX_BLOCK = most
        how = partial(arithmetic.softmax, blocks=3)
        x = randn(3, 40, device="cpu", dtype=dtype, grad=False) * 3
        yield module.softmax, eager, how, [x]
        yield module.softmax, eager, how, [x * 50]
        masked = x.clone()
        masked[1, :20] = masked[2, 20:] = -math.inf
        yield module.softmax, eager, how, [masked]


def norms(module, dtype):
    for shape, size in [((5, 33), 1.0), ((37, 7), 1e-3)]:
        x = randn(*shape, device="cpu", dtype=dtype, grad=False) * size
        w, b = (randn(shape[1], device="cpu", dtype=dtype, grad=False) for _ in range(2))
        how = partial(arithmetic.norm, center=False, eps=1e-6)
        yield module.rms_norm, rms_norm, how, [x, w]
        how = partial(arithmetic.norm, center=True, eps=1e-5)
        yield module.layer_norm, layer_norm, how, [x + size, w, b]


def rms_norm(x, w):
    return F.rms_norm(x, w.shape, w, 1e-6)


def layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b)


def gelu(module, dtype):
    x = randn(5, 33, device="cpu", dtype=dtype, grad=False) * 2
    b = randn(33, device="cpu", dtype=dtype, grad=False)
    for kind in ("none", "tanh"):

        def eager(x, b, kind=kind):
            return F.gelu(x + b, approximate=kind)

        how = partial(arithmetic.gelu, tanh=kind == "tanh")
        yield partial(module.gelu, approximate=kind), eager, how, [x, b]


def dropout(module, dtype):
    keep = helpers.kernels.dropout.dropout(torch.ones(1500), 0.3, seed=4) != 0
    how = partial(arithmetic.dropout, keep=keep, p=0.3)
    x = randn(1500, device="cpu", dtype=dtype, grad=False)
    yield partial(module.dropout, p=0.3, seed=4), lambda x: x * keep / 0.7, how, [x]


def matmul(module, dtype):
    for m, k, n in [(40, 40, 40), (7, 33, 65)]:
        inputs = [randn(*s, device="cpu", dtype=dtype, grad=False) for s in [(m, k), (k, n)]]
        yield module.matmul, torch.matmul, arithmetic.matmul, inputs


def attention(module, dtype):
    many = [randn(1, 2, 40, 16, device="cpu", dtype=dtype, grad=False) for _ in range(3)]
    for causal in (False, True):
        eager = partial(F.scaled_dot_product_attention, is_causal=causal)
        how = partial(arithmetic.attention, causal=causal)
        yield partial(module.attention, causal=causal), eager, how, many
    q, k, v = (t[:, :1] for t in many)
    k = k.clone()
    k[:, :, :35] = -math.inf

    def keys_only(dtype, dy, k, v):
        o, _, dk, dv = arithmetic.attention(dtype, dy, Rounded.exact(q.abs().double()), k, v)
        return [o, dk, dv]

    def eager(k, v):
        return F.scaled_dot_product_attention(q.abs().to(k), k, v)

    yield lambda k, v: module.attention(q.abs(), k, v), eager, keys_only, [k, v]


def linear_cross_entropy(module, dtype):
    module.MAX_BLOCK = 16
    for n, d, v, size in [(20, 4, 33, 1.0), (3, 4, 410, 1.0), (6, 4, 9, 50.0)]:
        x = randn(n, d, device="cpu", dtype=dtype, grad=False) * size
        w = randn(v, d, device="cpu", dtype=dtype, grad=False)
        target = torch.randint(v, (n,))
        target[0] = v - 1
        target[1] = -100

        def eager(x, w, target=target):
            return F.cross_entropy(x @ w.T, target)

        how = partial(arithmetic.linear_cross_entropy, target=target, block=16)
        yield partial(module.linear_cross_entropy, target=target), eager, how, [x, w]


# (suite, name of the mistake, what stands in the file, what is planted there, dtypes if not all)
MISTAKES = [
    (
        vector_add,
        "the last block is left out",
        "triton.cdiv(x.numel(), 1024)",
        "x.numel() // 1024",
    ),
    (
        vector_add,
        "gradient of the wrong sign",
        "(grad, grad.clone())",
        "(grad, -grad)",
    ),
    (
        softmax,
        "zeros in the tail",
        "tl.store(y_ptr + col, y.to",
        "tl.store(y_ptr + col, tl.where(col < 35, y, 0.0).to",
    ),
    (
        softmax,
        "small results become zero",
        "y = e / tl.sum(e, 1, keep_dims=True)",
        ("y = e / tl.sum(e, 1, keep_dims=True)\n        y = tl.where(y < 1e-3, 0.0, y)"),
    ),
    (
        softmax,
        "no maximum subtracted",
        "e = tl.exp(x - tl.max(x, 1, keep_dims=True))",
        "e = tl.exp(x)",
    ),
    (
        softmax,
        "zeros beyond the row",
        'x = tl.load(x_ptr + col, col < D, -float("inf"))',
        "x = tl.load(x_ptr + col, col < D, 0.0)",
    ),
    (
        softmax,
        "masked first block",
        'tl.where(new == -float("inf"), 0.0, new)',
        "new",
    ),
    (
        softmax,
        "the old sum is not rescaled",
        "total * tl.exp(top - shift)",
        "total",
    ),
    (
        softmax,
        "gradient without the sum",
        "(dy - tl.sum(y * dy, 1, keep_dims=True))",
        "dy",
    ),
    (
        softmax,
        "gradient of a wide row: the last block",
        "dot += tl.sum",
        "dot = tl.sum",
    ),
    (
        softmax,
        "rounded before the division",
        "e = tl.exp(x - tl.max(x, 1, keep_dims=True))",
        ("e = tl.exp(x - tl.max(x, 1, keep_dims=True)).to(y_ptr.dtype.element_ty).to(ACC)"),
        HALF,
    ),
    (
        norms,
        "deviations beyond the row",
        "x = tl.where(col < D, x - mean, 0.0)",
        "x = x - mean",
    ),
    (
        norms,
        "mean over the block",
        "tl.sum(x * x, 1, keep_dims=True) / D",
        "tl.sum(x * x, 1, keep_dims=True) / BLOCK",
    ),
    (
        norms,
        "no eps",
        " / D + eps)",
        " / D)",
    ),
    (
        norms,
        "gradient without the mean of g",
        "dx -= tl.sum(g, 1, keep_dims=True) / D",
        "dx -= 0.0",
    ),
    (
        norms,
        "gradient without x_hat",
        "dx = g - x_hat * (tl.sum(g * x_hat, 1, keep_dims=True) / D)",
        "dx = g",
    ),
    (
        norms,
        "one row is not summed",
        ("dw += dy * x_hat\n        tl.store"),
        ("dw += tl.where(row < R - 1, dy * x_hat, 0.0)\n        tl.store"),
    ),
    (
        norms,
        "gradient of the weight without r",
        "x_hat = x * r",
        "x_hat = x",
    ),
    (
        norms,
        "rounded before the weight",
        "y = x * r\n",
        "y = (x * r).to(y_ptr.dtype.element_ty).to(ACC)\n",
        HALF,
    ),
    (
        gelu,
        "wrong constant of tanh",
        "y = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715",
        "y = z * tl.sigmoid(1.5957691216057308 * (z + 0.0447",
    ),
    (
        gelu,
        "no square root in erf",
        "y = z * 0.5 * (1 + tl.erf(z * 0.7071067811865476))",
        "y = z * 0.5 * (1 + tl.erf(z))",
    ),
    (
        gelu,
        "gradient without the density",
        " + z * density",
        "",
    ),
    (
        gelu,
        "bias gradient of dy",
        "db += dx",
        "db += dy",
    ),
    (
        gelu,
        "x + b rounded",
        "y = z * 0.5 *",
        ("z = z.to(y_ptr.dtype.element_ty).to(ACC)\n        y = z * 0.5 *"),
        HALF,
    ),
    (
        dropout,
        "missing scale",
        "1 / (1 - p)",
        "1.0",
    ),
    (
        dropout,
        "backward draws another mask",
        "dy.contiguous(), ctx.p, ctx.seed)",
        "dy.contiguous(), ctx.p, ctx.seed + 1)",
    ),
    (
        matmul,
        "transposed gradient",
        "da = _matmul(dc, b.T)",
        "da = _matmul(dc, b if b.shape[0] == b.shape[1] else b.T)",
    ),
    (
        matmul,
        "wrong k in the last slice",
        "b = tl.load(b_ptr, k[:, None] < K - start, 0.0)",
        ("b = tl.load(b_ptr - (start + BK > K) * b_k, k[:, None] < K - start, 0.0)"),
    ),
    (
        matmul,
        "one k is left out",
        "for start in range(0, K, BK)",
        "for start in range(0, K - 1, BK)",
    ),
    (
        matmul,
        "slices overlap",
        "a_ptr += BK * a_k",
        "a_ptr += (BK - 1) * a_k",
    ),
    (
        matmul,
        "the sum is kept in half precision",
        'input_precision="ieee", out_dtype=ACC)\n',
        ('input_precision="ieee", out_dtype=ACC).to(c_ptr.dtype.element_ty).to(ACC)\n'),
        HALF,
    ),
    (
        attention,
        "off by one in the causal mask, forward",
        ("((t[:, None] >= s[None, :]) | (not CAUSAL))\n                scores"),
        ("((t[:, None] > s[None, :]) | (not CAUSAL))\n                scores"),
    ),
    (
        attention,
        "off by one in the causal mask, backward",
        "seen = (t < T)[:, None] & (s < S)[None, :] & ((t[:, None] >= s",
        "seen = (t < T)[:, None] & (s < S)[None, :] & ((t[:, None] + 1 >= s",
    ),
    (
        attention,
        "keys beyond the end are seen",
        "seen = (s < S)[None, :] & (",
        "seen = (s > -1)[None, :] & (",
    ),
    (
        attention,
        "missing scale",
        (
            'scores = tl.dot(q, tl.trans(k), input_precision="ieee", '
            "out_dtype=ACC) * scale\n"
            "            if"
        ),
        ('scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)\n            if'),
    ),
    (
        attention,
        "the output is not rescaled",
        "o * old[:, None]",
        "o",
    ),
    (
        attention,
        "masked first block",
        'tl.where(new == -float("inf"), 0.0, new)',
        "new",
    ),
    (
        attention,
        "keys of the first head",
        ("k = _load(k_ptr + z * S * D, s, S, D, IN)\n            scores"),
        ("k = _load(k_ptr, s, S, D, IN)\n            scores"),
    ),
    (
        attention,
        "gradient of q in the wrong base",
        "dq *= scale * 0.6931471805599453",
        "dq *= scale",
    ),
    (
        attention,
        "gradient of k without the scale",
        "dk *= scale * 0.6931471805599453",
        "dk *= 1.0",
    ),
    (
        attention,
        "gradients without delta",
        "delta = (o.to(lse.dtype) * do).sum(-1)",
        "delta = 0 * (o.to(lse.dtype) * do).sum(-1)",
    ),
    (
        attention,
        "ds and p exchanged",
        "dv = tl.dot(tl.trans(p.to(IN)), do, dv",
        "dv = tl.dot(tl.trans(p.to(IN)), do * 0.99, dv",
    ),
    (
        linear_cross_entropy,
        "target in the first block alone",
        "hit += tl.where(start + col == target",
        "hit += tl.where(col == target",
    ),
    (
        linear_cross_entropy,
        "gradient without the target",
        ("dx = tl.exp(x - top) / total - tl.where(start + col == target, 1.0, 0.0)"),
        "dx = tl.exp(x - top) / total",
    ),
    (
        linear_cross_entropy,
        "ignored rows have a gradient",
        "dx = tl.where(keep, dx, 0.0).to",
        "dx = dx.to",
    ),
    (
        linear_cross_entropy,
        "mean over all rows",
        "loss.sum() / count",
        "loss.sum() / N",
    ),
    (
        linear_cross_entropy,
        "the old sum is not rescaled",
        "totals * less + 1",
        "totals + 1",
    ),
    (
        linear_cross_entropy,
        "gradient of w by the first chunk",
        "dw.addmm_(logits.T, x[rows])",
        "dw.addmm_(logits.T, x[rows], beta=0)",
    ),
    (
        linear_cross_entropy,
        "no maximum subtracted",
        "tl.sum(totals * tl.exp(tops - top), 0)",
        "tl.sum(totals * tl.exp(tops), 0) * tl.exp(-top)",
    ),
]


def planted(suite, old, new, folder):
    """The module of `suite` with `old` replaced, its operators under names of their own."""
    text = (FOLDER / f"{suite.__name__}.py").read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"not in the file: {old}"
    number = next(NUMBERS)
    text = text.replace(old, new).replace('@operator("', f'@operator("planted_{number}_')
    path = folder / f"planted_{number}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_new_memory_does_not_hold_an_earlier_result():
    assert torch.empty(1000).isnan().all()
    assert torch.empty_like(torch.ones(3, 4)).isnan().all()


@pytest.mark.parametrize(
    "suite", dict.fromkeys(mistake[0] for mistake in MISTAKES), ids=lambda suite: suite.__name__
)
def test_without_a_mistake_nothing_is_found(suite, tmp_path):
    module = planted(suite, "import torch", "import torch", tmp_path)
    for dtype in DTYPES:
        for case in suite(module, dtype):
            assert_rounds_well(*case)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m[0].__name__}, {m[1]}")
def test_each_mistake_is_found_in_each_dtype(mistake, tmp_path):
    suite, _, old, new, *dtypes = mistake
    module = planted(suite, old, new, tmp_path)
    for dtype in dtypes[0] if dtypes else DTYPES:
        with pytest.raises(AssertionError):
            for case in suite(module, dtype):
                assert_rounds_well(*case)
