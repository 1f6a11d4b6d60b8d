import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.kernels import norms
from tests.kernels import numerics

RMS = (norms.rms_norm, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6))
LAYER = (norms.layer_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b))
both = pytest.mark.parametrize("pair", [RMS, LAYER], ids=["rms", "layer"])


def inputs(pair, *shape, device, dtype=torch.float32):
    """x [..., D] and the vectors [D]: weight, and bias for LayerNorm."""
    shapes = [shape, *[shape[-1:]] * (1 if pair is RMS else 2)]
    return [numerics.randn(*shape, device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", numerics.DTYPES)
@pytest.mark.parametrize("width", numerics.WIDTHS)
@both
def test_error_budget(device, pair, width, dtype):
    numerics.assert_within_budget(*pair, inputs(pair, 5, width, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2100, 3)])
@both
def test_shapes(device, pair, shape):
    numerics.assert_within_budget(*pair, inputs(pair, *shape, device=device))


@both
def test_not_contiguous(device, pair):
    x, *rest = inputs(pair, 6, 10, device=device)
    for view in (x[::2], x.expand(2, 6, 10), x.repeat(1, 2)[:, 5:15], x.T.contiguous().T):
        numerics.assert_within_budget(*pair, [view, *rest])


@both
def test_vectors_with_a_stride(device, pair):
    x, *rest = inputs(pair, 6, 10, device=device)
    numerics.assert_within_budget(*pair, [x, *(t.repeat_interleave(2)[::2] for t in rest)])


@pytest.mark.parametrize("shape", [(70, 300), (3, 9), (0, 9)])
@both
def test_rows_too_wide_for_the_sums(device, pair, shape, monkeypatch):
    monkeypatch.setattr(norms, "WIDE", 8)
    numerics.assert_within_budget(*pair, inputs(pair, *shape, device=device))


@both
def test_gradient(device, pair):
    numerics.gradcheck(pair[0], *inputs(pair, 5, 7, device=device))


@both
def test_a_large_mean_costs_no_more_than_in_eager(device, pair):
    x, *rest = inputs(pair, 4, 100, device=device)
    numerics.assert_within_budget(*pair, [x + 1000, *rest])


@both
def test_the_same_bits_every_time(device, pair):
    many = inputs(pair, 600, 33, device=device)

    def gradients():
        return torch.autograd.grad(pair[0](*many).square().sum(), many)

    for once, again in zip(gradients(), gradients(), strict=True):
        assert torch.equal(once, again)


@both
def test_composes(device, pair):
    x, w, *b = many = inputs(pair, 3, 9, device=device)
    numerics.composes(norms._norm, pair[0], (x, w, b[0] if b else None, 1e-6), many)


def test_layer(device):
    ours, theirs = norms.RMSNorm(9).to(device), nn.RMSNorm(9, eps=1e-6).to(device)
    theirs.load_state_dict(ours.state_dict())
    x = numerics.randn(2, 3, 9, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


def test_errors(device):
    x, w, b = inputs(LAYER, 3, 4, device=device)
    with pytest.raises(ValueError, match=r"weight: expected \[D\] with D the last of x, \[3, 4\]"):
        norms.rms_norm(x, w[:3])
    with pytest.raises(ValueError, match=r"bias: expected .D. with D the last of x, .* got .4, 1."):
        norms.layer_norm(x, w, b[:, None])
    wide = torch.zeros(2, norms.MAX_COLUMNS + 1, device=device)
    with pytest.raises(ValueError, match="and 1 to 65536; got .65537."):
        norms.rms_norm(wide, wide[0])
