import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from helpers.kernels import linear_cross_entropy as file
from helpers.kernels.launch import accumulator
from helpers.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels import arithmetic
from tests.kernels.numerics import (
    DTYPES,
    assert_rounds_well,
    composes,
    gradcheck,
    randn,
)


def trio(target, ignore=-100):
    return (
        lambda x, w: linear_cross_entropy(x, w, target, ignore),
        lambda x, w: F.cross_entropy(
            (x @ w.T).to(wide(x)), target.to(x.device), ignore_index=ignore
        ),
        partial(arithmetic.linear_cross_entropy, target=target.cpu(), ignore=ignore),
    )


def wide(x):  # the loss is float32 for half precision: eager has to be told
    return torch.promote_types(x.dtype, torch.float32)


def inputs(n, d, v, device, dtype=torch.float32):
    x = randn(n, d, device=device, dtype=dtype)
    return [x, randn(v, d, device=device, dtype=dtype)], torch.randint(v, (n,), device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (19, 8, 123), (16, 5, 5000), (64, 16, 33)])
def test_rounding(device, shape, dtype):
    many, target = inputs(*shape, device, dtype)
    assert_rounds_well(*trio(target), many)


def test_ignored_targets(device):
    many, target = inputs(20, 4, 9, device)
    target[::3] = -100
    assert_rounds_well(*trio(target), many)
    target[::3] = 5
    assert_rounds_well(*trio(target, 5), many)


def test_all_ignored_gives_nan_and_no_gradient_as_in_eager(device):
    many, target = inputs(6, 4, 9, device)
    for function in trio(target.fill_(-100))[:2]:
        loss = function(*many)
        assert loss.isnan()
        assert all(g.eq(0).all() for g in torch.autograd.grad(loss, many))


@pytest.mark.parametrize("word", [-1, 9])
def test_a_target_outside_the_vocabulary(device, word):
    """As in eager; compiled, nobody waits for the GPU to look, and everything is NaN instead."""
    (x, w), target = inputs(6, 4, 9, device)
    target[2] = word
    if device == "cpu":
        with pytest.raises(IndexError, match=f"words 0 to 8, or -100 to be ignored, got {word}"):
            linear_cross_entropy(x, w, target)
    loss, gradient = torch.empty(6, device=device), (x @ w.T).detach()
    file._kernel[(6,)](gradient, target, loss, 9, -100, True, 16, accumulator(x.dtype))
    assert loss.isnan().tolist() == gradient.isnan().all(1).tolist() == [i == 2 for i in range(6)]


@pytest.mark.parametrize("words", [9, 5000])
def test_nan_in_a_word_that_is_no_target(device, words):
    (x, w), target = inputs(6, 4, words, device)
    w = w.detach()
    w[8] = math.nan
    target.clamp_(max=7)
    assert_rounds_well(*trio(target), [x, w])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy: -inf - -inf
@pytest.mark.parametrize("masked", [slice(0, 7), slice(7, 9), slice(0, 4096), slice(4000, 4999)])
def test_words_masked_by_minus_infinity(device, masked):
    """A logit of -inf, as of a word that is forbidden, in the first and in a later block."""
    (x, w), target = inputs(3, 4, 5000, device)
    x, w = x.detach().abs(), w.detach()
    w[masked] = -math.inf
    target.fill_(4999)
    assert_rounds_well(*trio(target), [x, w])


def test_large_logits_do_not_overflow(device):
    many, target = inputs(6, 4, 9, device)
    assert_rounds_well(*trio(target), [t * 1000 for t in many])


def test_gradient(device, monkeypatch):
    monkeypatch.setattr(file, "CHUNKS", 2)  # of two rows and of one
    (x, w), target = inputs(3, 2, 3, device)
    target[1] = -100
    gradcheck(lambda x, w: linear_cross_entropy(x, w, target), x, w)


def test_only_what_needs_a_gradient_is_computed(device):
    (x, w), target = inputs(6, 4, 9, device)
    frozen = linear_cross_entropy(x, w.detach(), target)
    (gradient,) = torch.autograd.grad(frozen, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(trio(target)[1](x, w), x)[0])
    with torch.no_grad():
        assert linear_cross_entropy(x, w, target) == frozen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_float32_weights(device, dtype):
    (x, w), target = inputs(20, 4, 9, device)
    with torch.autocast(device, dtype):
        loss = linear_cross_entropy(x.to(dtype), w, target)
        assert torch.equal(loss, linear_cross_entropy(x, w, target))
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert torch.equal(loss, linear_cross_entropy(x.to(dtype), w.to(dtype), target))
    assert loss.dtype is dx.dtype is dw.dtype is torch.float32 and dw.ne(0).any()


def test_one_chunk_of_logits_is_in_memory(device, monkeypatch):
    """What is alive inside the operator; the interpreter, which keeps arguments, is left out."""
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode

    alive, most = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not function.is_view:
                alive.append(weakref.ref(out.untyped_storage()))
                now = [storage for ref in alive if (storage := ref()) and storage.nbytes() >= chunk]
                most.append(sum({storage.data_ptr(): storage.nbytes() for storage in now}.values()))
            return out

    monkeypatch.setattr(file, "launch", lambda *args, **constants: None)
    (x, w), target = inputs(64, 2, 500, device)
    chunk = 64 // file.CHUNKS * 500 * x.element_size()
    with Watch():
        file._linear_cross_entropy._init_fn(x.detach(), w.detach(), target, -100, True, True)
    assert max(most) == chunk


def test_composes(device):
    many, target = inputs(8, 4, 9, device)
    function = lambda x, w: linear_cross_entropy(x, w, target)  # noqa: E731
    composes(file._linear_cross_entropy, function, (*many, target, -100, True, True), many)


def test_errors(device):
    (x, w), target = inputs(6, 4, 9, device)
    with pytest.raises(ValueError, match=r"and \[V, D\], got \[6, 4\] and \[9, 3\]"):
        linear_cross_entropy(x, w[:, :3], target)
    with pytest.raises(ValueError, match=r"target: expected int64 \[6\] on .*, got torch.int32"):
        linear_cross_entropy(x, w, target.int())
