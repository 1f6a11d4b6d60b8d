import gc
import weakref
from collections import deque
from pathlib import Path

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
    attached,
    compressed,
    custom_gradients,
    quantize,
    reverse_gradient,
    softplus,
    step_in_backward,
)
from helpers.memory import SavedTensors


def randn(*shape, scale=1.0):
    return (scale * torch.randn(shape, dtype=torch.float64)).requires_grad_()


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
    with GradientMonitor(model, optimizer) as monitor:
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


def below_zero():
    """A layer whose output is negative for positive inputs: the ReLU behind it gives zeros."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(-1.0)
        layer.bias.zero_()
    return layer


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


def test_numbers_of_several_dtypes_are_read_exactly():
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model.narrow = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    model.forward = lambda x: model.wide * 1e200 + model.narrow * 0.375
    history = train_once(model, None).history
    assert {name: list(values) for name, values in history.items()} == {
        "wide": [1e200, 1e200],
        "narrow": [0.375, 0.375],
    }


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
    model = nn.Sequential(below_zero(), nn.ReLU(inplace=True), Twist(), nn.Linear(2, 1))
    first = train_once(model, torch.ones(1, 2)).findings[0]
    assert str(first) == "step 0: NaN in output of 1, used by 2"


def test_the_output_of_a_container_keeps_the_name_of_the_module_inside():
    inner = nn.Sequential(below_zero(), nn.ReLU(inplace=True))
    model = nn.Sequential(inner, Twist(), nn.Linear(2, 1))
    first = train_once(model, torch.ones(1, 2)).findings[0]
    assert str(first) == "step 0: NaN in output of 0.1, used by 1"


def test_the_birthplace_of_a_nan_is_named():
    model = nn.Sequential(below_zero(), nn.ReLU(), Root(), nn.Linear(2, 1))
    with torch.no_grad():
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


def reversed_twice(x):  # reversing is no derivative, but twice by -1 is the identity
    return reverse_gradient(reverse_gradient(x))


CASES = {
    "exercises.gradients._Log1mexp": lambda x: log1mexp(x * x),
    "gradients.ReverseGradient": reversed_twice,
    "gradients.Softplus": softplus,
}


def test_every_custom_gradient_of_the_package_is_checked_somewhere():
    """The list is made from the source: a gradient that no test checks fails here."""
    found = [name.removeprefix("helpers.") for name in custom_gradients()]
    here = {*CASES, "gradients.Quantize"}  # no derivative: its surrogate is tested above
    assert here <= set(found)
    unchecked = []
    for name in found:
        room, module, *_ = name.split(".")
        if room == "kernels":
            source = Path(__file__).with_name("kernels") / f"test_{module}.py"
            checked = source.exists() and "gradcheck(" in source.read_text(encoding="utf-8")
        elif room == "tensor_parallel":  # between processes
            job = Path(__file__).with_name("sharding_job.py").read_text(encoding="utf-8")
            checked = "gradcheck(" in job and f"{room}.ColumnLinear" in job
        elif room == "differentiable_programs":  # of a fixed point, beside its other programs
            source = Path(__file__).with_name(f"test_{room}.py").read_text(encoding="utf-8")
            checked = "gradcheck(" in source and f"{module}.apply(" in source
        else:
            checked = name in here
        if not checked:
            unchecked.append(name)
    assert not unchecked


def nodes(fn):
    """The names of all nodes of a graph."""
    found, waiting = set(), [fn]
    while waiting:
        fn = waiting.pop()
        if fn is not None and fn not in found:
            found.add(fn)
            waiting += [parent for parent, _ in fn.next_functions]
    return {fn.name() for fn in found}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    function, x = CASES[name], randn(3)
    word = name.rsplit(".", 1)[1].lstrip("_")
    assert any(word in node for node in nodes(function(x).grad_fn)), "another gradient"
    assert gradcheck(function, (x,))
    assert gradgradcheck(function, (x,))


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
    _, kept = compressed().pack_hook(x)
    assert 2 * kept.nbytes == x.nbytes
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
