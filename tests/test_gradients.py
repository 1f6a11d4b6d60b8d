import gc
import math
import weakref
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck

from helpers import models
from helpers.exercises.gradients import log1mexp
from helpers.gradients import (
    GradientMonitor,
    OnDisk,
    add_noise,
    attached,
    clip_each,
    compressed,
    custom_gradients,
    fgsm,
    gradient_penalty,
    on_gradients,
    quantize,
    reverse_gradient,
    softplus,
    step_in_backward,
)
from helpers.kernels import INTERPRETED
from helpers.kernels.attention import attention
from helpers.kernels.dropout import dropout
from helpers.kernels.gelu import gelu
from helpers.kernels.linear_cross_entropy import linear_cross_entropy
from helpers.kernels.matmul import matmul
from helpers.kernels.norms import layer_norm
from helpers.kernels.softmax import softmax
from helpers.kernels.vector_add import vector_add
from helpers.memory import SavedTensors

DEVICE = "cpu" if INTERPRETED else "cuda"


def randn(*shape, device="cpu", scale=1.0):
    return (scale * torch.randn(shape, dtype=torch.float64, device=device)).requires_grad_()


def net(*sizes):
    return models.MLP(*sizes).double()


def hooks_of(model):
    """How many hooks the modules and parameters of `model` hold, of every kind used here."""
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._backward_hooks)
    for p in model.parameters():
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
            count += len(hooks) if hooks else 0
    return count


# ---- hooks


def test_a_hook_is_gone_after_the_block_and_after_an_error():
    x = torch.ones(2, requires_grad=True)
    seen = []
    with attached([x.register_hook(seen.append)]):
        x.sum().backward()
    with pytest.raises(KeyError), attached([x.register_hook(seen.append)]):
        raise KeyError
    x.sum().backward()
    assert len(seen) == 1


def test_registering_that_fails_half_way_leaves_nothing_behind():
    x, seen = torch.ones(2, requires_grad=True), []

    def handles():
        yield x.register_hook(seen.append)
        yield torch.ones(2).register_hook(seen.append)  # needs no gradient: an error of PyTorch

    with pytest.raises(RuntimeError, match="doesn't require gradient"), attached(handles()):
        pass
    x.sum().backward()
    assert not seen


def test_on_gradients_replaces_and_names_each_parameter_once():
    model = net(3, 4, 2)
    model[0].bias.requires_grad_(False)
    x = randn(5, 3)
    model(x).sum().backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    seen = []

    def double(name, gradient):
        seen.append(name)
        return 2 * gradient if name.endswith("weight") else None

    with on_gradients(model, double):
        (model(x).sum() / 2 + model(x).sum() / 2).backward()  # twice used, once called
    wanted = [name for name, g in plain.items() if g is not None]
    assert sorted(seen) == sorted(wanted)
    for name, p in model.named_parameters():
        if plain[name] is not None:
            factor = 2 if name.endswith("weight") else 1
            torch.testing.assert_close(p.grad, factor * plain[name], rtol=1e-14, atol=0)
    assert hooks_of(model) == 0


def test_clip_each_is_clip_grad_norm_of_each():
    model = net(6, 8, 3)
    x, y = randn(16, 6), torch.arange(16) % 3

    def grads(clip):
        model.zero_grad()
        with clip:
            F.cross_entropy(model(x), y).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = grads(clip_each(model, 1e9))
    bound = torch.stack([g.norm() for g in plain]).median().item()
    clipped = grads(clip_each(model, bound))
    assert any(g.norm() > bound for g in plain) and any(g.norm() < bound for g in plain)
    for g, ours in zip(plain, clipped, strict=True):
        other = nn.Parameter(torch.zeros_like(g))
        other.grad = g.clone()
        nn.utils.clip_grad_norm_([other], bound)
        # PyTorch adds 1e-6 to the norm before dividing
        torch.testing.assert_close(ours, other.grad, rtol=2e-6 / bound, atol=0)
        assert ours.norm() <= bound * (1 + 1e-12)


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="expected a positive max_norm"):
        clip_each(nn.Linear(2, 1), 0.0)


def test_a_zero_gradient_is_clipped_to_zero():
    model = nn.Linear(2, 1)
    with clip_each(model, 1.0):
        (model(torch.ones(1, 2)) * 0).sum().backward()
    assert model.weight.grad.count_nonzero() == 0


def test_noise_has_the_spread_asked_for_and_its_generator_repeats_it():
    model = nn.Linear(200, 200, bias=False)

    def grad(seed):
        model.zero_grad()
        with add_noise(model, 0.5, torch.Generator().manual_seed(seed)):
            (model.weight * 0).sum().backward()
        return model.weight.grad

    first = grad(1)
    assert torch.equal(first, grad(1)) and not torch.equal(first, grad(2))
    spread = 0.5 / math.sqrt(2 * first.numel())  # of the sample's standard deviation
    assert abs(first.std().item() - 0.5) < 5 * spread


def test_steps_in_backward_give_the_same_weights_and_hold_one_gradient():
    torch.manual_seed(1)
    plain, lean = net(4, 8, 8, 2), net(4, 8, 8, 2)
    lean.load_state_dict(plain.state_dict())
    x, y = randn(10, 4), torch.arange(10) % 2
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    held = []

    def count(_p):
        held.append(sum(p.grad is not None for p in lean.parameters()))

    with (
        attached(p.register_post_accumulate_grad_hook(count) for p in lean.parameters()),
        step_in_backward(lean, lambda ps: torch.optim.AdamW(ps, lr=0.01)) as optimizers,
    ):
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
            F.cross_entropy(lean(x), y).backward()
    assert len(optimizers) == 6 and len(held) == 18 and max(held) == 1
    assert all(p.grad is None for p in lean.parameters())
    for a, b in zip(plain.parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert hooks_of(lean) == 0


def test_hooks_leave_nothing_alive():
    """After the contexts, neither model nor monitor is held by a hook: weak references die."""
    model = net(3, 4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientMonitor(model, optimizer) as monitor, clip_each(model, 1.0):
        with step_in_backward(model, lambda ps: torch.optim.SGD(ps, lr=0.1)):
            model(randn(5, 3)).sum().backward()
    assert hooks_of(model) == 0
    left = [weakref.ref(thing) for thing in (model, monitor, next(model.parameters()))]
    del model, monitor, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None] * 3


# ---- the monitor


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Twist(nn.Module):
    """At 0 the gradient is 0 * inf."""

    def forward(self, x):
        return x / (x.square().sqrt() + 1)


def train_once(model, x, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with GradientMonitor(model, optimizer, **options) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return monitor


def test_nothing_to_report():
    monitor = train_once(net(3, 5, 1), randn(4, 3))
    assert monitor.findings == [] and monitor.step == 2
    assert set(monitor.history) == {
        *("0.weight", "0.bias", "2.weight", "2.bias"),
        *("output of 0", "output of 1", "output of 2"),
    }
    assert list(monitor.history)[0] == "output of 2"  # the order of the backward pass
    assert all(len(values) == 2 for values in monitor.history.values())


def test_history_holds_the_largest_element():
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    x = torch.tensor([[1.0, -7.0, 2.0]], dtype=torch.float64)
    assert train_once(model, x).history["0.weight"] == deque([7.0, 7.0])


def test_a_long_run_does_not_grow_the_monitor():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model[1].weight)  # so that the first layer's gradient is 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientMonitor(model, optimizer, keep=3) as monitor:
        for step in range(1, 6):
            optimizer.zero_grad()
            (step * model(torch.ones(1, 2))).sum().backward()
            optimizer.step()
    assert monitor.step == 5 and {len(kept) for kept in monitor.history.values()} == {3}
    assert list(monitor.history["output of 1"]) == [3.0, 4.0, 5.0]
    assert [(f.step, f.kind, f.place) for f in monitor.findings] == [(0, "vanishing", "0.weight")]


def test_a_fault_that_comes_back_is_reported_again():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientMonitor(model, optimizer) as monitor:
        for size in [1e4, 1e4, 1.0, 1e4]:
            optimizer.zero_grad()
            (size * model(torch.ones(1, 1))).sum().backward()
            optimizer.step()
    assert [(f.step, f.kind) for f in monitor.findings] == [(0, "exploding"), (3, "exploding")]


def test_after_a_module_that_works_in_place_the_user_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), Twist(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[0].bias.zero_()
    first = train_once(model, torch.ones(1, 2)).findings[0]
    assert str(first) == "step 0: NaN in output of 1, used by 2"


def test_the_output_of_a_container_keeps_the_name_of_the_module_inside():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    model = nn.Sequential(inner, Twist(), nn.Linear(2, 1))
    with torch.no_grad():
        inner[0].weight.fill_(-1.0)
        inner[0].bias.zero_()
    first = train_once(model, torch.ones(1, 2)).findings[0]
    assert str(first) == "step 0: NaN in output of 0.1, used by 1"


def test_the_birthplace_of_a_nan_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Root(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[0].bias.zero_()
        model[3].weight.zero_()
    monitor = train_once(model, torch.ones(1, 2))
    first = monitor.findings[0]
    assert (first.step, first.kind, first.place) == (0, "NaN", "output of 1")
    assert first.used_by == ("2",) and len(monitor.findings) == 1  # it lasts
    assert str(first) == "step 0: NaN in output of 1, used by 2"


@pytest.mark.parametrize("norm_first", [True, False])
def test_with_branches_every_module_that_used_the_bad_tensor_is_named(norm_first):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp, self.attention = Root(), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            if norm_first:
                return self.mlp(self.norm(x)) + self.attention(x)
            return self.attention(x) + self.mlp(self.norm(x))

    model = nn.Sequential(nn.Linear(2, 2, bias=False), Branches(), nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[1].mlp.weight)
    first = train_once(model, torch.ones(1, 2)).findings[0]
    assert first.place == "output of 0" and set(first.used_by) == {"1.norm", "1.attention", "1"}


def test_an_infinity_is_told_from_a_nan_and_stops_before_the_weights_are_spoiled():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Root(), nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)  # the derivative of the root is infinite at 0
    with pytest.raises(FloatingPointError, match="gradient is not finite: step 0: Inf in output"):
        train_once(model, torch.ones(1, 2), stop=True)
    assert all(p.isfinite().all() for p in model.parameters()) and hooks_of(model) == 0
    assert not all(p.grad.isfinite().all() for p in model.parameters())


def test_exploding_and_vanishing_are_named_by_parameter():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e6)
        model[1].weight.fill_(1e-9)
    monitor = train_once(model, torch.ones(1, 2), large=1e3, small=1e-8)
    kinds = {(f.step, f.kind, f.place) for f in monitor.findings}
    assert kinds >= {(0, "exploding", "1.weight"), (0, "vanishing", "0.weight")}


def test_a_layer_used_twice_and_a_tuple_are_watched():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(2, 2)

        def forward(self, x):
            return self.rnn(self.rnn(x)[0])[0]

    monitor = train_once(Twice(), torch.randn(3, 1, 2))
    assert "output of rnn" in monitor.history and not monitor.findings


def test_empty_sparse_and_missing_gradients_do_not_confuse_it():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    model.extra = nn.Parameter(torch.ones(2))  # never used
    model.empty = nn.Parameter(torch.ones(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientMonitor(model, optimizer) as monitor:
        (model[1](model[0](torch.tensor([1, 1]))).sum() + model.empty.sum()).backward()
        optimizer.step()
    assert "0.weight" in monitor.history and "extra" not in monitor.history


def test_without_gradients_nothing_is_noted():
    model = net(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientMonitor(model, optimizer) as monitor, torch.no_grad():
        model(randn(1, 3))
        optimizer.step()
    assert monitor.history == {} and monitor.step == 1


def test_bounds_of_the_monitor_must_make_sense():
    model = net(2, 1)
    with pytest.raises(ValueError, match="expected 0 <= small < 1 and large > 0"):
        GradientMonitor(model, torch.optim.SGD(model.parameters(), lr=1.0), large=0.0)


# ---- custom gradients

POINTS = torch.tensor([-900.0, -100, -20, -1e-3, 0, 1e-3, 1, 20, 88, 89, 100, 900, 1e30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_softplus_is_right_everywhere(dtype):
    x = POINTS.clamp(max=6e4).to(dtype).requires_grad_()
    y = softplus(x)
    y.sum().backward()
    wide = x.detach().double()
    want = torch.logaddexp(wide, torch.zeros_like(wide))
    eps = torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal
    # exp, log1p and the sum: a few units in the last place of the result
    assert ((y.double() - want).abs() <= 8 * eps * want + tiny).all()
    slope = torch.sigmoid(wide)
    assert ((x.grad.double() - slope).abs() <= 8 * eps * slope + tiny).all()
    assert x.grad[4] == 0.5


def test_the_naive_formula_really_fails():
    x = torch.tensor([89.0, 0.0], requires_grad=True)
    torch.log(1 + torch.exp(x)).sum().backward()
    assert x.grad[0].isnan() and x.grad[1] == 0.5
    x.grad = None
    (torch.relu(x) + torch.log1p(torch.exp(-x.abs()))).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]  # no NaN, but 0 where 0.5 is right


def test_softplus_agrees_with_pytorch_s():
    x = randn(50, scale=5.0)
    torch.testing.assert_close(softplus(x), F.softplus(x, threshold=700), rtol=1e-14, atol=1e-300)


def test_the_gradient_of_softplus_at_0():
    assert gradcheck(softplus, (torch.zeros(2, dtype=torch.float64, requires_grad=True),))


def test_reversed_gradients():
    x = randn(4)
    y = reverse_gradient(x, 0.5)
    assert torch.equal(y, x) and y is not x
    (g,) = torch.autograd.grad((y**2).sum(), x)
    assert torch.equal(g, -0.5 * 2 * x.detach())


def test_quantize_rounds_to_the_grid():
    x = torch.tensor([-9.0, -1.0, -0.3, 0.24, 0.26, 0.7, 9.0])
    assert quantize(x, 0.5, bits=2).tolist() == [-1.0, -1.0, -0.5, 0.0, 0.5, 0.5, 0.5]
    x = randn(1000, scale=3.0)
    levels = quantize(x, 0.25, bits=3).unique()
    assert len(levels) == 8 and levels.min() == -1 and levels.max() == 0.75
    inside = (x >= -1) & (x <= 0.75)
    assert ((quantize(x, 0.25, bits=3) - x).abs()[inside] <= 0.125).all()


def test_the_gradient_of_quantize_is_the_surrogate_s():
    """What is meant: the gradient of clamping, while differences of the staircase are 0."""
    x = randn(200, scale=3.0)
    with torch.no_grad():
        x[:2] = torch.tensor([-1.0, 0.75])  # the ends of the range
    weight = torch.randn(200, dtype=torch.float64)
    (ours,) = torch.autograd.grad((weight * quantize(x, 0.25, bits=3)).sum(), x)
    (surrogate,) = torch.autograd.grad((weight * x.clamp(-1, 0.75)).sum(), x)
    assert torch.equal(ours, surrogate) and ours.count_nonzero() not in (0, 200)
    inside = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="Jacobian mismatch for output 0"):
        gradcheck(lambda t: quantize(t, 0.25, bits=3), (inside,))


def test_rounding_alone_learns_nothing():
    x = randn(10)
    (g,) = torch.autograd.grad(torch.round(x / 0.25).sum(), x)
    assert g.count_nonzero() == 0


@pytest.mark.parametrize(("scale", "bits"), [(0.0, 2), (1.0, 0), (float("nan"), 2)])
def test_quantize_needs_a_grid(scale, bits):
    with pytest.raises(ValueError, match="expected at least 1 bit and a positive scale"):
        quantize(torch.ones(1), scale, bits)


class Planted(Function):
    """Softplus with a mistake in its gradient: it saves the output instead of the input."""

    @staticmethod
    def forward(x):
        return F.softplus(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.sigmoid(x)


def test_gradcheck_finds_a_planted_mistake():
    with pytest.raises(RuntimeError, match="Jacobian mismatch for output 0"):
        gradcheck(Planted.apply, (randn(3),))


# ---- every gradient that the package defines


def every_case():
    """Name of the gradient -> the function that uses it, its inputs, and: twice?"""

    def on(*shape):
        return randn(*shape, device=DEVICE)

    target = torch.tensor([0, 3, -100], device=DEVICE)
    heads = tuple(on(1, 1, 2, 16) for _ in range(3))

    def reversed_twice(x):  # reversing is no derivative, but twice by -1 is the identity
        return reverse_gradient(reverse_gradient(x))

    return {
        "exercises.gradients._Log1mexp": (lambda x: log1mexp(x * x), (on(3),), True),
        "gradients.ReverseGradient": (reversed_twice, (on(3),), True),
        "gradients.Softplus": (softplus, (on(3),), True),
        "kernels.attention._attention": (attention, heads, False),
        "kernels.dropout._dropout": (lambda x: dropout(x, 0.3, 5), (on(2, 3),), True),
        "kernels.gelu._gelu": (gelu, (on(2, 3), on(3)), False),
        "kernels.linear_cross_entropy._linear_cross_entropy": (
            lambda x, w: linear_cross_entropy(x, w, target),
            (on(3, 2), on(4, 2)),
            False,
        ),
        "kernels.matmul._matmul": (matmul, (on(2, 3), on(3, 2)), True),
        "kernels.norms._norm": (layer_norm, (on(2, 5), on(5), on(5)), False),
        "kernels.softmax._softmax": (softmax, (on(2, 4),), False),
        "kernels.vector_add._vector_add": (vector_add, (on(3), on(3)), True),
    }


def test_every_custom_gradient_of_the_package_is_checked_somewhere():
    """The list is made from the source; what is missing below fails here."""
    elsewhere = {
        "gradients.Quantize",  # by intention no derivative: its surrogate is tested above
        "kernels.extension.load",  # compiled from C++ on demand: tests/kernels/test_extension.py
    }
    found = {name.removeprefix("helpers.") for name in custom_gradients()}
    assert found == set(every_case()) | elsewhere


def nodes(fn):
    """The names of all nodes of a graph."""
    found, waiting = set(), [fn]
    while waiting:
        fn = waiting.pop()
        if fn is not None and fn not in found:
            found.add(fn)
            waiting += [parent for parent, _ in fn.next_functions]
    return {fn.name() for fn in found}


@pytest.mark.parametrize("name", every_case())
def test_gradcheck(name):
    function, inputs, twice = every_case()[name]
    word = name.rsplit(".", 1)[1].lstrip("_")
    assert any(word in node for node in nodes(function(*inputs).grad_fn)), "another gradient"
    assert gradcheck(function, inputs)
    if twice:
        assert gradgradcheck(function, inputs)


def test_own_gradients_are_found_wherever_they_hide(tmp_path, monkeypatch):
    package = tmp_path / "planted"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    source = (
        "import torch\nclass A(torch.autograd.Function): pass\nclass B(A): pass\n"
        "op.register_autograd(f)\ndef later():\n    library.register_autograd('x::y', f)\n"
    )
    (package / "deep" / "file.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = custom_gradients("planted")
    assert found == [f"planted.deep.file.{name}" for name in ("A", "op", "later")]
    with pytest.raises(ValueError, match="expected the name of a package"):
        custom_gradients("json.decoder")


# ---- with respect to the input


def test_fgsm_moves_every_element_by_epsilon_and_the_loss_goes_up():
    model = net(6, 8, 3)
    x = torch.rand(5, 6, dtype=torch.float64) * 0.5 + 0.25
    y = torch.arange(5) % 3
    moved = fgsm(model, x, y, 0.1)
    torch.testing.assert_close((moved - x).abs(), torch.full_like(x, 0.1), rtol=1e-12, atol=0)
    assert F.cross_entropy(model(moved), y) > F.cross_entropy(model(x), y)
    assert all(p.grad is None for p in model.parameters()) and not moved.requires_grad


def test_fgsm_of_a_linear_model_is_the_worst_case():
    """For a linear loss the sign of the gradient is the best of all corners of the box."""
    model = nn.Linear(4, 1, bias=False).double()

    def loss(out, _target):
        return out.sum()

    x = torch.full((1, 4), 0.5, dtype=torch.float64)
    corners = torch.cartesian_prod(*[torch.tensor([-0.2, 0.2], dtype=torch.float64)] * 4)
    worst = max(model(x + corner).item() for corner in corners)
    moved = fgsm(model, x, None, 0.2, loss_fn=loss)
    assert model(moved).item() == pytest.approx(worst)


def test_fgsm_stays_in_bounds_under_no_grad_and_changes_nothing_for_0():
    model, y = net(3, 2), torch.tensor([0])
    x = torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float64)
    with torch.no_grad():
        moved = fgsm(model, x, y, 0.3)
    assert moved.min() >= 0 and moved.max() <= 1
    assert torch.equal(fgsm(model, x, y, 0.0), x) and not x.requires_grad


def test_the_penalty_is_the_formula_and_its_gradient_the_second_derivative():
    w = randn(3)

    def bowl(x):
        return (w * x**2).sum(1)  # slope 2 w x

    x = torch.randn(4, 3, dtype=torch.float64)
    value = gradient_penalty(bowl, x)
    torch.testing.assert_close(value, (2 * w * x).square().sum(1).mean(), rtol=1e-14, atol=0)
    (g,) = torch.autograd.grad(value, w)
    torch.testing.assert_close(g, (8 * w * x**2).mean(0), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        again = gradient_penalty(bowl, x, target=1.0)
    want = ((2 * w * x).norm(dim=1) - 1).square().mean()
    torch.testing.assert_close(again, want, rtol=1e-12, atol=0)


def test_the_penalty_passes_gradcheck_through_a_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(2, 2, dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]

    def penalty(*values):
        def call(inputs):
            return torch.func.functional_call(model, dict(zip(names, values, strict=True)), inputs)

        return gradient_penalty(call, x, target=1.0)

    assert gradcheck(penalty, tuple(p.detach().requires_grad_() for p in model.parameters()))


def test_a_flat_function_has_no_penalty_and_no_nan():
    w = randn(2)
    value = gradient_penalty(lambda x: (0 * w * x).sum(1), torch.ones(3, 2, dtype=torch.float64))
    value.backward()
    assert value == 0 and w.grad.isfinite().all()


# ---- what is saved


def test_compressing_halves_the_bytes_and_rounds_once():
    layer = nn.Linear(30, 20, bias=False)
    x = torch.randn(50, 30)
    (plain,) = torch.autograd.grad((layer(x) * (g := torch.randn(50, 20))).sum(), layer.weight)

    with SavedTensors(exclude=layer.parameters()) as outer:
        y = layer(x)
    with compressed(exclude=layer.parameters()):
        z = layer(x)
    assert torch.equal(y, z) and outer.bytes == x.nbytes
    (ours,) = torch.autograd.grad((z * g).sum(), layer.weight)
    # each element of x is rounded once, by at most 2^-8 of itself; then float32 adds 50 terms
    bound = (2.0**-8 + 60 * 2.0**-24) * (g.abs().T @ x.abs())
    assert not torch.equal(ours, plain) and ((ours - plain).abs() <= bound).all()


def test_compressing_leaves_integers_masks_narrow_floats_and_parameters_alone():
    table = nn.Embedding(5, 3)
    weight = torch.randn(4, requires_grad=True)
    x = torch.randn(4, requires_grad=True)
    with compressed(torch.float16, exclude=[weight]):
        out = table(torch.tensor([4, 1])).sum() + (x * weight).sum()
        half = (x.half() * x.half()).sum()
    (gx,) = torch.autograd.grad(out + half.float(), x)
    want = weight + 2 * x.half().float()
    torch.testing.assert_close(gx, want, rtol=2.0**-10, atol=0)
    with compressed(exclude=[weight]):
        y = (x.detach() * weight).sum() + (x * weight.detach()).sum()
    (gx,) = torch.autograd.grad(y, x)
    assert torch.equal(gx, weight.detach())  # kept as it is


def test_on_disk_gives_the_same_bits_and_deletes_its_files(tmp_path):
    model = net(6, 8, 3)
    x = torch.randn(5, 6, dtype=torch.float64)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with OnDisk(tmp_path, exclude=model.parameters()) as disk:
        loss = model(x).sum()
    assert disk.bytes == 8 * 5 * (6 + 8 + 8)  # ReLU and the last layer each write its output
    assert len(list(tmp_path.glob("*/*.pt"))) == 3
    loss.backward()
    for p, g in zip(model.parameters(), plain, strict=True):
        assert torch.equal(p.grad, g)
    del loss
    gc.collect()
    assert disk.bytes == 0 and not list(tmp_path.glob("*/*.pt"))


def test_two_on_disk_in_one_folder_do_not_mix_their_files(tmp_path):
    x = torch.tensor([2.0], requires_grad=True)
    with OnDisk(tmp_path):
        first = x.exp()
    with OnDisk(tmp_path):
        second = (2 * x).exp()
    (g,) = torch.autograd.grad(first, x)
    assert g == first.detach()
    (g,) = torch.autograd.grad(second, x)
    assert g == 2 * second.detach()


def test_a_view_is_written_without_its_storage():
    x = torch.ones(1000, requires_grad=True)
    with OnDisk() as disk:
        y = x[:10].exp()
    assert disk.bytes == 40
    folder = disk._folder
    del y, disk
    gc.collect()
    assert not folder.exists()
