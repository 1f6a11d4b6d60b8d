from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.kernels import norms
from tests.kernels import arithmetic, numerics

RMS = (
    norms.rms_norm,
    lambda x, w=None: F.rms_norm(x, x.shape[-1:], w, 1e-6),
    partial(arithmetic.norm, center=False, eps=1e-6),
)
LAYER = (
    norms.layer_norm,
    lambda x, w=None, b=None: F.layer_norm(x, x.shape[-1:], w, b),
    partial(arithmetic.norm, center=True, eps=1e-5),
)
both = pytest.mark.parametrize("trio", [RMS, LAYER], ids=["rms", "layer"])


def inputs(trio, *shape, device, dtype=torch.float32):
    """x [..., D] and the vectors [D]: weight, and bias for LayerNorm."""
    shapes = [shape, *[shape[-1:]] * (1 if trio is RMS else 2)]
    return [numerics.randn(*shape, device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", numerics.DTYPES)
@pytest.mark.parametrize("width", numerics.WIDTHS)
@both
def test_rounding(device, trio, width, dtype):
    numerics.assert_rounds_well(*trio, inputs(trio, 5, width, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 5), (7,), (1, 1, 1), (2100, 3)])
@both
def test_shapes(device, trio, shape):
    numerics.assert_rounds_well(*trio, inputs(trio, *shape, device=device))


@both
def test_not_contiguous(device, trio):
    x, *rest = inputs(trio, 6, 10, device=device)
    for view in (x[::2], x.expand(2, 6, 10), x.repeat(1, 2)[:, 5:15], x.T.contiguous().T):
        numerics.assert_rounds_well(*trio, [view, *rest])


@both
def test_vectors_with_a_stride(device, trio):
    x, *rest = inputs(trio, 6, 10, device=device)
    numerics.assert_rounds_well(*trio, [x, *(t.repeat_interleave(2)[::2] for t in rest)])


@pytest.mark.parametrize("shape", [(70, 300), (3, 9), (0, 9)])
@both
def test_rows_too_wide_for_the_sums(device, trio, shape, monkeypatch):
    monkeypatch.setattr(norms, "WIDE", 8)
    numerics.assert_rounds_well(*trio, inputs(trio, *shape, device=device))


@both
def test_gradient(device, trio):
    numerics.gradcheck(trio[0], *inputs(trio, 3, 5, device=device))


@pytest.mark.parametrize("mean", [1e3, 1e6])
@both
def test_a_large_mean(device, trio, mean):
    x, *rest = inputs(trio, 4, 100, device=device)
    numerics.assert_rounds_well(*trio, [x + mean, *rest])


def test_a_large_mean_costs_layer_norm_no_digits(device):
    """The deviations are exact in float32; only the roundings after them are left."""
    x = numerics.randn(4, 100, device=device, grad=False) + 1e6
    y = norms.layer_norm(x).double()
    exact = F.layer_norm(x.double(), (100,))
    assert ((y - exact).abs() <= 8 * 2.0**-24 * 100 * (1 + exact.abs())).all()


@pytest.mark.parametrize("dtype", numerics.DTYPES)
@both
def test_without_weight_and_bias(device, trio, dtype):
    x, w, *_ = inputs(trio, 5, 33, device=device, dtype=dtype)
    numerics.assert_rounds_well(*trio, [x])
    if trio is LAYER:
        numerics.assert_rounds_well(*trio, [x, w])

        def bias_alone(dtype, dy, x, b):
            return arithmetic.norm(dtype, dy, x, None, b, center=True, eps=1e-5)

        numerics.assert_rounds_well(
            lambda x, b: norms.layer_norm(x, None, b),
            lambda x, b: F.layer_norm(x, (33,), None, b),
            bias_alone,
            [x, w],
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both
def test_float32_weights_beside_half_precision(device, trio, dtype):
    """As under autocast, whose weights stay float32."""
    x, *wide = inputs(trio, 5, 33, device=device, dtype=dtype)
    wide = [t.detach().float().requires_grad_() for t in wide]
    y = trio[0](x, *wide)
    grads = torch.autograd.grad(y.sum(), [x, *wide])
    assert y.dtype is dtype and [g.dtype for g in grads] == [dtype, *(torch.float32 for _ in wide)]
    assert torch.equal(y, trio[0](x, *(t.to(dtype) for t in wide)))


@both
def test_the_same_bits_every_time(device, trio):
    many = inputs(trio, 600, 33, device=device)

    def gradients():
        return torch.autograd.grad(trio[0](*many).square().sum(), many)

    for once, again in zip(gradients(), gradients(), strict=True):
        assert torch.equal(once, again)


@both
def test_composes(device, trio):
    x, w, *b = many = inputs(trio, 3, 9, device=device)
    args = (x, w, b[0] if b else None, 1e-6, bool(b))
    numerics.composes(norms._norm, trio[0], args, many)


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
    with pytest.raises(ValueError, match=r"with D from 1 to 65536, got \[2, 65537\]"):
        norms.rms_norm(wide, wide[0])
    with pytest.raises(ValueError, match="weight: expected torch.float32, or float32 beside half"):
        norms.rms_norm(x, w.half())
