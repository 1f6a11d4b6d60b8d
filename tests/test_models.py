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


SMALL = {"vocabulary": 11, "context": 9, "layers": 3, "heads": 2, "width": 16}


def gpt(**changes):
    return models.GPT(models.GPTConfig(**(SMALL | changes)))


@pytest.mark.parametrize("shape", [(2, 9), (1, 1), (3, 4), (0, 5)])
def test_gpt_shapes_and_gradients(shape):
    model = gpt()
    out = model(torch.randint(0, 11, shape))
    assert out.shape == (*shape, 11)
    out.logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"layers": 1}, {"width": 24, "heads": 3}])
def test_gpt_parameters_by_formula(changes):
    model = gpt(**changes)
    v, t, n, c = (getattr(model.config, k) for k in ("vocabulary", "context", "layers", "width"))
    formula = v * c + t * c + n * (12 * c**2 + 13 * c) + 2 * c
    assert models.count_parameters(model) == formula


def test_gpt2_small_has_its_published_number_of_parameters():
    sizes = {"vocabulary": 50257, "context": 1024, "layers": 12, "heads": 12, "width": 768}
    with torch.device("meta"):
        assert models.count_parameters(gpt(**sizes)) == 124_439_808


def test_gpt_does_not_see_the_future():
    model, tokens = gpt().eval(), torch.randint(0, 11, (2, 9))
    want = model(tokens)
    for at in range(9):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 1) % 11
        same = ((model(other) - want).abs() < 1e-5).all(2).all(0)
        assert same[:at].all() and not same[at]
        assert torch.allclose(model(tokens[:, : at + 1]), want[:, : at + 1], atol=1e-5)


def test_a_block_is_pytorchs_pre_norm_encoder_layer():
    block = models.Block(models.GPTConfig(**SMALL)).double()
    theirs = nn.TransformerEncoderLayer(
        16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    parts = {"self_attn.in_proj": block.qkv, "self_attn.out_proj": block.projection}
    parts |= {"linear1": block.mlp[0], "linear2": block.mlp[2]}
    parts |= {"norm1": block.norm1, "norm2": block.norm2}
    state = {}
    for name, part in parts.items():
        nn.init.normal_(part.bias)
        joint = "_" if name.endswith("in_proj") else "."
        state |= {name + joint + "weight": part.weight, name + joint + "bias": part.bias}
    theirs.load_state_dict(state)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    assert torch.allclose(block(x), theirs(x, mask), atol=1e-12)


def test_gpt_initialization():
    model = gpt(width=128, layers=8, vocabulary=500, context=64)
    for name, p in model.named_parameters():
        last = name.endswith(("projection.weight", "mlp.2.weight"))
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert p.eq(1).all(), name
        else:
            assert p.std().item() == pytest.approx(0.005 if last else 0.02, rel=0.05), name
    tokens = torch.randint(0, 500, (4, 64))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(500.0).log().item(), abs=0.1)


def test_gpt_ties_its_embedding_through_state_dict_and_double():
    model = gpt()
    assert model.head.weight is model.tokens.weight
    other = gpt()
    other.load_state_dict(model.state_dict())
    other.double()
    assert other.head.weight is other.tokens.weight
    tokens = torch.randint(0, 11, (2, 5))
    assert torch.allclose(other(tokens).float(), model(tokens), atol=1e-5)


def test_gpt_dropout_acts_in_training_only():
    model, tokens = gpt(dropout=0.5), torch.randint(0, 11, (2, 9))
    assert not model(tokens).equal(model(tokens))
    assert model.eval()(tokens).equal(model(tokens))


def test_gpt_learns_a_batch_by_heart():
    model, tokens = gpt(), torch.randint(0, 11, (4, 9))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.8  # the first token of a row cannot be known, nor what follows it alone


@pytest.mark.parametrize("shape", [(2, 10), (9,), (1, 2, 3)])
def test_gpt_refuses_other_tokens(shape):
    with pytest.raises(
        ValueError, match=r"expected tokens \[B, T\] with T at most 9, got"
    ) as error:
        gpt()(torch.zeros(shape, dtype=torch.int64))
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("name", ["vocabulary", "context", "layers", "heads", "width"])
def test_gpt_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        gpt(**{name: 0})


def test_gpt_width_must_split_into_heads():
    with pytest.raises(ValueError, match="width 16 cannot be split into 3 heads"):
        gpt(heads=3)
