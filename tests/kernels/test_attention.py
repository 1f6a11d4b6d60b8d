import pytest
import torch
import torch.nn.functional as F

from helpers.kernels import attention as file
from helpers.kernels.attention import attention
from tests.kernels.numerics import DTYPES, assert_within_budget, composes, gradcheck, randn


def pair(causal, scale=None):
    return (
        lambda q, k, v: attention(q, k, v, causal, scale),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
    )


def inputs(t, s, d, device, dtype=torch.float32, lead=(1, 2)):
    return [randn(*lead, n, d, device=device, dtype=dtype) for n in (t, s, s)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "s", "causal"),
    [(1, 1, True), (7, 7, True), (65, 65, True), (32, 32, True), (5, 40, False), (70, 33, False)],
)
def test_error_budget(device, t, s, causal, dtype):
    assert_within_budget(*pair(causal), inputs(t, s, 16, device, dtype))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_head_sizes(device, size):
    assert_within_budget(*pair(True), inputs(20, 20, size, device))


def test_batches_and_heads(device):
    assert_within_budget(*pair(True), inputs(5, 5, 16, device, lead=(2, 3)))


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
    assert_within_budget(*pair(True), [q, q * 2, q + 1])


def test_scale(device):
    assert_within_budget(*pair(False, scale=0.5), inputs(9, 9, 16, device))


def test_large_scores_do_not_overflow(device):
    q, k, v = inputs(9, 9, 16, device)
    ours, eager = (f(q * 1000, k, v) for f in pair(True))
    torch.testing.assert_close(ours, eager)


def test_the_future_is_not_seen(device):
    q, k, v = inputs(40, 40, 16, device)
    changed = k.clone().detach()
    changed[:, :, 30:] = 100
    same = attention(q, k, v, True) == attention(q, changed, v, True)
    assert same[:, :, :30].all() and not same[:, :, 30:].any()


def test_gradient(device):
    if device == "cuda":
        pytest.skip("needs a CUDA device with float64 tiles: the interpreter checks this")
    gradcheck(pair(True)[0], *inputs(2, 2, 16, device, lead=(1, 1)))


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
