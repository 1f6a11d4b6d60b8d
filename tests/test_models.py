import pytest
import torch
from torch import nn

from helpers import models


@pytest.mark.parametrize("sizes", [(3, 2), (7, 5, 3), (4, 8, 8, 1)])
def test_mlp_shapes_and_parameters(sizes):
    model = models.MLP(*sizes)
    assert model(torch.randn(6, sizes[0])).shape == (6, sizes[-1])
    expected = sum(a * b + b for a, b in zip(sizes, sizes[1:], strict=False))
    assert models.count_parameters(model) == expected
    assert isinstance(model[-1], nn.Linear)  # logits


def test_mlp_needs_two_sizes():
    with pytest.raises(ValueError, match=r"input and an output size, got \(3,\)"):
        models.MLP(3)


@pytest.mark.parametrize("n", [1, 3])
def test_convnet_shape_and_gradients(n):
    model = models.ConvNet(classes=7, width=4).train()
    out = model(torch.randn(n, 1, 28, 28))
    assert out.shape == (n, 7)
    out.logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_convnet_is_the_same_in_channels_last():
    model = models.ConvNet(width=8).eval()
    x = torch.randn(5, 1, 28, 28)
    want = model(x)
    got = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert torch.allclose(got, want, atol=1e-5)


def test_convnet_parameters_by_formula():
    w = 6
    shapes = [(w, 1, 5), (w, w, 3), (2 * w, w, 3), (2 * w, 2 * w, 3), (4 * w, 2 * w, 3)]
    convolutions = sum(o * i * k * k + 2 * o for o, i, k in shapes)  # weights, BN scale and shift
    assert models.count_parameters(models.ConvNet(width=w)) == convolutions + 4 * w * 16 * 10 + 10


def test_frozen_parameters_do_not_count():
    model = models.MLP(3, 2)
    model[0].bias.requires_grad_(False)
    assert models.count_parameters(model) == 6


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 3, 28, 28), (2, 1, 32, 32)])
def test_convnet_refuses_other_images(shape):
    with pytest.raises(ValueError, match="expected images .* got") as error:
        models.ConvNet()(torch.zeros(shape))
    assert str(list(shape)) in str(error.value)


def test_kaiming_keeps_the_variance_through_relu_layers():
    model = models.MLP(*[512] * 12)
    out = model(torch.randn(256, 512))
    assert (
        0.5 < (out.square().mean() / 2).item() < 2
    )  # second moment stays 1, last layer doubles it
    assert all(m.bias.eq(0).all() for m in model if isinstance(m, nn.Linear))
