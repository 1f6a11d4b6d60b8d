import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from helpers.kernels import attention as file
from helpers.kernels.attention import attention
from tests.kernels import arithmetic
from tests.kernels.numerics import DTYPES, Rounded, assert_rounds_well, composes, gradcheck, randn


def trio(causal, scale=None):
    return (
        lambda q, k, v: attention(q, k, v, causal, scale),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
        partial(arithmetic.attention, causal=causal, scale=scale),
    )


def inputs(t, s, d, device, dtype=torch.float32, lead=(1, 2)):
    return [randn(*lead, n, d, device=device, dtype=dtype) for n in (t, s, s)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "s", "causal"),
    [(1, 1, True), (7, 7, True), (65, 65, True), (32, 32, True), (5, 40, False), (70, 33, False)],
)
def test_rounding(device, t, s, causal, dtype):
    assert_rounds_well(*trio(causal), inputs(t, s, 16, device, dtype))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_head_sizes(device, size):
    assert_rounds_well(*trio(True), inputs(20, 20, size, device))


def test_batches_and_heads(device):
    assert_rounds_well(*trio(True), inputs(5, 5, 16, device, lead=(2, 3)))


@pytest.mark.parametrize(("lead", "t"), [((0, 2), 5), ((2, 0), 5), ((1, 2), 0)])
def test_empty(device, lead, t):
    """Without the reference: PyTorch 2.11's own operation divides by zero and ends the process."""
    q, k, v = inputs(t, 5, 16, device, lead=lead)
    y = attention(q, k, v)
    y.sum().backward()
    assert y.shape == (*lead, t, 16)
    assert all(x.grad.eq(0).all() for x in (q, k, v))


def test_heads_from_a_transposed_projection(device):
    q = randn(2, 9, 3, 16, device=device).transpose(1, 2)
    assert_rounds_well(*trio(True), [q, q * 2, q + 1])


def test_scale(device):
    assert_rounds_well(*trio(False, scale=0.5), inputs(9, 9, 16, device))


def test_large_scores_do_not_overflow(device):
    q, k, v = inputs(9, 9, 16, device)
    assert_rounds_well(*trio(True), [q * 1000, k, v])
    far = trio(True)[0](q * 1e18, k * 1e18, v)  # scores up to 1e37, near the end of float32
    assert far.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy: 0 * inf
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start", [0, 1, 31, 32, 40])
@pytest.mark.parametrize("end", [1, 31, 32, 33, 64, 69, 70])
def test_a_masked_stretch_of_keys_anywhere(device, start, end, causal, dtype):
    """Scores of -inf from key `start` to `end`, to the borders of blocks of 32; 0 where all are."""
    if start >= end:
        return
    q, k, v = (t.detach() for t in inputs(70, 70, 16, device, dtype, lead=(1, 1)))
    q = q.abs() + 1
    k[:, :, start:end] = -math.inf
    assert_rounds_well(*(partial(f, q) for f in with_fixed_queries(causal)), [k, v])
    hidden = attention(q, k, v, causal).eq(0).all(-1).flatten()
    assert hidden.tolist() == [start == 0 and (t < end if causal else end == 70) for t in range(70)]


def with_fixed_queries(causal):
    """Their gradient has terms 0 * -inf. In eager these are NaN even where they are not summed."""

    def arithmetic_of_two(q, dtype, dy, k, v):
        q = Rounded.exact(q.cpu().double())
        o, _, dk, dv = arithmetic.attention(dtype, dy, q, k, v, causal=causal)
        return [o, dk, dv]

    ours, eager, _ = trio(causal)
    return ours, lambda q, k, v: eager(q.to(k), k, v), arithmetic_of_two


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # float16 has no such numbers
@pytest.mark.parametrize("end", [1, 31, 32, 33, 64, 69])
def test_scores_that_overflow_to_minus_infinity(device, end, dtype):
    """A mask by very large negative keys: here the gradient of the queries is finite as well."""
    q, k, v = (t.detach() for t in inputs(70, 70, 16, device, dtype, lead=(1, 1)))
    k[:, :, :end] = -3e38
    assert_rounds_well(*trio(False), [q.abs() + 1, k, v])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 33, 69])
def test_nan_spreads_as_in_eager(device, which, at):
    many = [t.detach() for t in inputs(70, 70, 16, device)]
    many[which][0, 0, at] = math.nan
    assert_rounds_well(*trio(False), many)


def test_nan_that_the_causal_mask_hides_stays_within_its_tile(device):
    q, k, v = (t.detach() for t in inputs(70, 70, 16, device))
    v[:, :, 69] = math.nan
    rows = attention(q, k, v, True).isnan().any(-1)
    assert rows[..., 69].all() and not rows[..., :-128].any()
    if device == "cpu":  # tiles of 32
        assert not rows[..., :64].any()


def test_autocast_casts_as_for_products_of_pytorch(device):
    q, k, v = inputs(9, 9, 16, device)
    with torch.autocast(device, torch.bfloat16):
        y = attention(q, k.bfloat16(), v)
        assert y.dtype is F.scaled_dot_product_attention(q, k, v).dtype is torch.bfloat16
    assert torch.equal(y, attention(*(t.bfloat16() for t in (q, k, v))))
    assert torch.autograd.grad(y.sum(), q)[0].dtype is torch.float32


def test_the_future_is_not_seen(device):
    q, k, v = inputs(40, 40, 16, device)
    changed = k.clone().detach()
    changed[:, :, 30:] = 100
    same = attention(q, k, v, True) == attention(q, changed, v, True)
    assert same[:, :, :30].all() and not same[:, :, 30:].any()


def test_gradient(device):
    if device == "cuda":
        pytest.skip("needs a CUDA device with float64 tiles: the interpreter checks this")
    gradcheck(trio(True)[0], *inputs(2, 2, 16, device, lead=(1, 1)))


def test_composes(device):
    many = inputs(5, 5, 16, device)
    flat = tuple(t.flatten(0, 1) for t in many)
    composes(file._attention, attention, (*flat, 0.25, True), many)


def test_errors(device):
    q, k, v = inputs(5, 6, 16, device)
    with pytest.raises(ValueError, match=r"S == T if causal; got \[1, 2, 5, 16\], \[1, 2, 6, 16\]"):
        attention(q, k, v, causal=True)
    with pytest.raises(ValueError, match="expected a head size D of 16, 32, 64 or 128, got 24"):
        attention(*inputs(5, 5, 24, device))
