import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import layers

few = settings(max_examples=40, deadline=None)


class TorchAttention(nn.MultiheadAttention):
    """PyTorch's attention with our signature, without the weights it also returns."""

    def forward(self, query, memory=None, causal=False):
        memory = query if memory is None else memory
        mask = None
        if causal:
            mask = torch.ones(query.shape[1], memory.shape[1], dtype=torch.bool).triu(1)
        return super().forward(query, memory, memory, attn_mask=mask, need_weights=False)[0]


def assert_same(ours, theirs, *inputs, second=True, **options):
    """Equal outputs, gradients and second derivatives, with `theirs` giving the weights."""
    ours, theirs = ours.double(), theirs.double()
    ours.load_state_dict(theirs.state_dict())
    sides = []
    for layer in (ours, theirs):
        xs = [x.double().requires_grad_() for x in inputs]
        wanted = [*xs, *dict(sorted(layer.named_parameters())).values()]
        out = layer(*xs, **options)
        found = torch.autograd.grad(out.sin().sum(), wanted, create_graph=second)
        if second:
            total = sum(g.sin().sum() for g in found)
            found += torch.autograd.grad(total, wanted, allow_unused=True)
        sides.append([out, *found, *layer.buffers()])
    for got, want in zip(*sides, strict=True):
        assert got is want is None or torch.allclose(got, want, atol=1e-10), (got, want)


@settings(deadline=None)
@given(*[st.integers(1, 12)] * 2, st.integers(0, 3), *[st.integers(1, 3)] * 2)
def test_conv_size_is_that_of_every_layer(size, kernel, padding, stride, dilation):
    x = torch.empty(1, size, device="meta")
    conv = nn.Conv1d(1, 1, kernel, stride, padding, dilation, device="meta")
    reach = dilation * (kernel - 1) + 1
    if reach > size + 2 * padding:
        with pytest.raises(ValueError, match=f"kernel reach of at most .* got {reach}"):
            layers.conv_size(size, kernel, stride, padding, dilation)
        with pytest.raises(RuntimeError):
            conv(x)
        return
    got = layers.conv_size(size, kernel, stride, padding, dilation)
    assert got == conv(x).shape[-1]
    if 2 * padding <= kernel:
        pool = nn.MaxPool1d(kernel, stride, padding, dilation)
        assert got == pool(torch.zeros(1, size)).shape[-1]


@pytest.mark.parametrize("shape", [(4,), (3, 4), (0, 4), (2, 3, 4), (1, 1, 4)])
def test_linear(shape):
    assert_same(layers.Linear(4, 3), nn.Linear(4, 3), torch.randn(shape))


def test_linear_on_a_transposed_input():
    assert_same(layers.Linear(4, 3), nn.Linear(4, 3), torch.randn(4, 5).T)


@few
@given(
    st.sampled_from([0, 1, 3]),
    st.sampled_from([(7, 7), (8, 5), (6, 11)]),
    st.sampled_from([1, 2, 3]),
    *[st.integers(1, 2)] * 2,
    st.integers(0, 2),
    st.sampled_from([1, 2]),
)
def test_conv2d(n, image, kernel, stride, dilation, padding, groups):
    how = (kernel, stride, padding, dilation, groups)
    torch.manual_seed(0)
    x = torch.randn(n, 4, *image)
    assert_same(layers.Conv2d(4, 6, *how), nn.Conv2d(4, 6, *how), x, second=n > 0)


def test_conv2d_on_an_input_that_is_not_contiguous():
    x = torch.randn(2, 7, 6, 4).permute(0, 3, 2, 1)
    assert_same(layers.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, groups=4), x)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    assert_same(layers.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 3), x)


NORMS = [
    (nn.BatchNorm1d, (4, 3)),
    (nn.BatchNorm1d, (2, 3, 5)),
    (nn.BatchNorm2d, (2, 3, 4, 5)),
    (nn.BatchNorm2d, (1, 3, 2, 2)),
    (nn.BatchNorm3d, (2, 3, 2, 1, 2)),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "shape"), NORMS)
def test_batch_norm(kind, shape, training):
    theirs, ours = kind(3), layers.BatchNorm(3)
    with torch.no_grad():
        theirs.weight.uniform_(-1, 2), theirs.bias.normal_()
        theirs(torch.randn(5, *shape[1:]) * 2 + 3)  # running statistics that are not 0 and 1
    assert_same(ours.train(training), theirs.train(training), torch.randn(shape) + 1)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
def test_batch_norm_moves_its_statistics_like_pytorch(momentum):
    ours, theirs = layers.BatchNorm(2, momentum=momentum), nn.BatchNorm1d(2, momentum=momentum)
    for n in (3, 2, 0, 7):
        x = torch.randn(n, 2)
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    for name, buffer in theirs.named_buffers():
        assert torch.allclose(ours.get_buffer(name), buffer), name


@pytest.mark.parametrize("shape", [(3, 6), (2, 0, 6), (2, 3, 6)])
def test_layer_norm(shape):
    assert_same(layers.LayerNorm(6), nn.LayerNorm(6), torch.randn(shape))


def test_layer_norm_over_two_dimensions_and_another_eps():
    x = torch.randn(3, 5, 2).transpose(1, 2)
    assert_same(layers.LayerNorm((2, 5), eps=0.1), nn.LayerNorm((2, 5), eps=0.1), x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [*product([1, 3], [1, 5], [None, 1, 5, 7])])
def test_attention(batch, queries, keys, causal):
    inputs = [torch.randn(batch, n, 8) for n in (queries, keys) if n]
    pair = layers.MultiheadAttention(8, 2), TorchAttention(8, 2, batch_first=True)
    assert_same(*pair, *inputs, causal=causal, second=False)


def test_attention_second_derivatives_and_strides():
    x = torch.randn(5, 2, 8).transpose(0, 1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        pair = layers.MultiheadAttention(8, 4), TorchAttention(8, 4, batch_first=True)
        assert_same(*pair, x, causal=True)


def test_attention_does_not_see_the_future():
    layer, x = layers.MultiheadAttention(8, 2), torch.randn(1, 6, 8)
    other = x.clone()
    other[:, 4] += 1
    same = (layer(x, causal=True) - layer(other, causal=True)).abs().amax((0, 2)) < 1e-6
    assert same.tolist() == [True] * 4 + [False] * 2


PAIRS = [
    (layers.Linear, nn.Linear, (5, 3)),
    (layers.Conv2d, nn.Conv2d, (4, 6, 3, 1, 0, 1, 2)),
    (layers.BatchNorm, nn.BatchNorm2d, (4,)),
    (layers.LayerNorm, nn.LayerNorm, (4,)),
    (layers.MultiheadAttention, nn.MultiheadAttention, (8, 2)),
]


@pytest.mark.parametrize(("ours", "theirs", "sizes"), PAIRS, ids=[p[0].__name__ for p in PAIRS])
def test_the_same_seed_gives_the_weights_of_pytorch(ours, theirs, sizes):
    states = []
    for kind in (ours, theirs):
        torch.manual_seed(1)
        states.append(kind(*sizes).state_dict())
    assert states[0].keys() == states[1].keys()
    for name, want in states[1].items():
        assert torch.allclose(states[0][name], want) and states[0][name].dtype == want.dtype, name


def test_the_default_variance_is_a_third_of_one_over_fan_in():
    assert math.isclose(layers.Linear(300, 300).weight.var().item(), 1 / 900, rel_tol=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.Linear(4, 3)(torch.zeros(2, 5)), r"the last size 4, got \[2, 5\]"),
        (lambda: layers.Linear(4, 3)(torch.zeros(())), r"expected the last size 4, got \[\]"),
        (lambda: layers.Conv2d(3, 4, 3, groups=2), "3 and 4 channels: not divisible by 2 groups"),
        (lambda: layers.Conv2d(3, 4, 3)(torch.zeros(3, 5, 5)), r"images \[N, 3, H, W\], got"),
        (lambda: layers.Conv2d(3, 4, 3)(torch.zeros(1, 2, 5, 5)), r"got \[1, 2, 5, 5\]"),
        (lambda: layers.Conv2d(1, 1, 3)(torch.zeros(1, 1, 5, 2)), "reach of at most 2, got 3"),
        (lambda: layers.BatchNorm(3)(torch.zeros(4, 2)), r"expected \[N, 3, ...\], got \[4, 2\]"),
        (lambda: layers.BatchNorm(3)(torch.zeros(3)), r"expected \[N, 3, ...\], got \[3\]"),
        (lambda: layers.BatchNorm(3)(torch.zeros(1, 3)), r"more than one value a channel, got"),
        (lambda: layers.LayerNorm((2, 3))(torch.zeros(3, 2)), r"last dimensions \(2, 3\), got"),
        (lambda: layers.MultiheadAttention(8, 3), "width 8 cannot be split into 3 heads"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_value_a_channel_is_fine_in_evaluation():
    assert layers.BatchNorm(3).eval()(torch.ones(1, 3)).shape == (1, 3)
