import gc
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from helpers import models
from helpers.allocator import round_size
from helpers.memory import PeakMemory, SavedTensors, breakdown, dry_run, measure_step

N = 600  # elements of x and y


def make():
    return [torch.full((20, 30), 0.5, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x, y: x + y, 0),
        (lambda x, y: x * 3, 0),
        (lambda x, y: x.sum(), 0),
        (lambda x, y: x.view(30, 20), 0),
        (lambda x, y: x * y, 2 * 4 * N),
        (lambda x, y: x * x, 4 * N),  # one storage, saved twice
        (lambda x, y: x * y.detach(), 4 * N),
        (lambda x, y: x.relu(), 4 * N),
        (lambda x, y: x.exp() ** 2, 4 * N),  # exp keeps its result, ** its input: the same
        (lambda x, y: x.exp().relu(), 2 * 4 * N),
        (lambda x, y: x @ y.T, 2 * 4 * N),
        (lambda x, y: x[:1] * 2, 0),
        (lambda x, y: x[:1].exp(), 4 * 30),
        (lambda x, y: x[:1] ** 2, 4 * N),  # a view holds its whole storage
        (lambda x, y: torch.where(x.detach() > 0, x, y), N),
        (lambda x, y: x[:0].exp(), 0),
    ],
)
def test_bytes_of_one_operation(operation, expected):
    with SavedTensors() as saved:
        out = operation(*make())
    assert saved.bytes == expected
    out.sum().backward()
    assert saved.bytes == 0


def test_double_precision_counts_double():
    with SavedTensors() as saved:
        _out = make()[0].double().exp()
    assert saved.bytes == 8 * N


def test_mlp_saves_the_input_of_each_layer_and_parameters_are_left_out():
    sizes, batch = (30, 64, 16, 5), 7
    model = models.MLP(*sizes)
    x = torch.ones(batch, sizes[0])
    with SavedTensors(exclude=model.parameters()) as saved:
        out = model(x)
    assert saved.bytes == 4 * batch * sum(sizes[:-1])  # ReLU's output is the next layer's input
    assert sum(t.numel() for t in saved.tensors) * 4 == saved.bytes
    with SavedTensors(exclude=[*model.parameters(), x]) as without_input:
        again = model(x)
    assert without_input.bytes == 4 * batch * sum(sizes[1:-1])
    assert torch.equal(out, again)


def test_no_grad_and_inference_mode_save_nothing():
    model = models.MLP(4, 8, 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with SavedTensors() as saved, mode():
            model(torch.ones(3, 4))
        assert saved.bytes == 0 and saved.tensors == []


def test_retained_and_dropped_graphs():
    (x, _) = make()
    with SavedTensors() as saved:
        out = x.exp().sum()
    out.backward(retain_graph=True)
    assert saved.bytes == 4 * N
    del out  # a graph that nobody can reach is freed without a backward pass
    gc.collect()
    assert saved.bytes == 0


def test_addresses_that_are_used_again_do_not_confuse_the_count():
    with SavedTensors() as saved:
        for size in (1000, 10, 100):
            out = torch.ones(size, requires_grad=True).exp()
            assert saved.bytes == 4 * size
            del out


def test_gradients_are_those_without_watching():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))
    x, target = torch.randn(4, 5), torch.tensor([0, 2, 1, 1])
    F.cross_entropy(model(x), target).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with SavedTensors(exclude=model.parameters()):
        loss = F.cross_entropy(model(x), target)
    loss.backward()
    for p, g in zip(model.parameters(), plain, strict=True):
        assert torch.equal(p.grad, g)


def test_outside_the_context_nothing_is_seen():
    (x, _) = make()
    with SavedTensors() as saved:
        pass
    _out = x.exp()
    assert saved.bytes == 0


def test_double_backward_through_what_was_packed():
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    with SavedTensors():
        y = ((x * x).exp() * x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    want = torch.func.hessian(lambda t: ((t * t).exp() * t).sum())(x.detach())
    assert torch.allclose(second, want.diagonal())


def test_hooks_switch_the_version_check_off():
    """As the docstring warns; once PyTorch checks under hooks, too, the warning can go."""
    (x, _) = make()
    with SavedTensors():
        y = x.exp()
    y.detach().zero_()
    y.sum().backward()
    assert x.grad.count_nonzero() == 0


def test_sizes_without_data_count_as_well():
    with FakeTensorMode():
        x, y = (torch.empty(1000, requires_grad=True) for _ in range(2))
        with SavedTensors(exclude=[x]) as saved:
            out = (x * y).exp()
        assert saved.bytes == 2 * 4000 and out.requires_grad  # y, and the result of exp


# ---- PeakMemory


def test_live_and_peak_of_a_few_tensors():
    with PeakMemory() as memory:
        x = torch.ones(100)
        assert memory.live == 400
        y = x.view(10, 10)[2:]  # the same storage
        assert memory.live == 400
        z = y + 1  # 8 x 10 numbers of their own
        assert memory.live == 400 + 320
        del x
        assert memory.live == 400 + 320  # y still holds the storage of x
        del y
        assert memory.live == 320
        z.mul_(2)
        assert memory.live == 320
    assert memory.peak == 720
    del z
    assert memory.live == 0
    assert memory.timeline == [
        ("start", 0),
        ("aten.ones", 400),
        ("aten.view", 400),
        ("aten.slice", 400),
        ("aten.add", 720),
        ("aten.mul_", 320),
    ]


def test_what_is_there_counts_from_the_start_if_it_is_named():
    model, x = models.MLP(3, 5, 2), torch.ones(4, 3)
    with PeakMemory(model, [x, x]) as memory:
        assert memory.live == 4 * (3 * 5 + 5 + 5 * 2 + 2) + 4 * 12
    with PeakMemory(model) as memory:
        x.view(3, 4)  # somebody else's memory
        assert memory.live == 4 * 32


def test_one_counter_counts_once():
    memory = PeakMemory()
    with memory:
        pass
    with pytest.raises(RuntimeError, match="make a new one"), memory:
        pass


def test_a_generator_is_refused():
    """Its tensors would not count, and nothing would say so."""
    model = models.MLP(3, 5, 2)
    with pytest.raises(ValueError, match="optimizers, tensors or a list, got a generator"):
        PeakMemory(model, [model.parameters()])
    with PeakMemory(list(model.parameters()), [None, 3, "text"]) as memory:
        assert memory.live == 4 * 32


@pytest.mark.parametrize("at", [-1, 2])
def test_only_positions_of_the_timeline_can_be_asked_for(at):
    with PeakMemory() as memory:
        _x = torch.ones(100)
    with pytest.raises(ValueError, match=f"in a timeline of 2 entries, got {at}"):
        memory.by_category(at)
    with pytest.raises(ValueError, match="in a timeline of 0 entries, got None"):
        PeakMemory().by_category()


def pieces(count, ends):
    """Of a compressed sparse matrix: where rows end, in which columns the numbers stand, these."""
    return torch.arange(ends), torch.zeros(count, dtype=torch.int64), torch.ones(count), (3, 3)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.tensor([1.0, 2.0]), 8),
        (lambda: torch.tensor(np.ones(100)), 800),  # a copy
        (lambda: torch.from_numpy(np.ones(100)), 0),  # NumPy's own memory
        (lambda: torch.as_tensor(np.ones(100)) + 1, 800),
        (lambda: torch.empty(0), 0),
        (lambda: torch.ones(3, 1).expand(3, 1000), 12),
        (lambda: torch.ones(10).half(), 20),
        (lambda: [torch.ones(10).double(), torch.arange(3)], 104),
        (lambda: torch.ones(10).detach().requires_grad_(), 40),
        (lambda: torch.ones(4, 5).to_sparse().coalesce(), 20 * 4 + 20 * 2 * 8),
        (lambda: torch.sparse_csr_tensor(*pieces(3, 4)), 32 + 24 + 12),
        (lambda: torch.sparse_csc_tensor(*pieces(3, 4)), 32 + 24 + 12),
        (lambda: TwoTensor(torch.ones(10), torch.ones(10)) * 2, 80),  # a tensor that wraps two
        (lambda: torch.func.vmap(lambda row: row * 2)(torch.ones(5, 2)), 40),
        (lambda: torch.nn.Parameter(torch.ones(7)), 28),
        (lambda: torch.complex(torch.ones(4), torch.ones(4)), 32),
    ],
)
def test_what_stays_of_an_expression(make, expected):
    with PeakMemory() as memory:
        kept = make()
        assert memory.live == expected
        del kept
        assert memory.live == 0


def test_two_counters_at_once():
    with PeakMemory() as outer:
        first = torch.ones(10)
        with PeakMemory(first) as inner:
            second = torch.ones(5)
        del first
        _third = second + 1
    assert (inner.live, inner.peak, outer.live, outer.peak) == (20, 60, 40, 60)


def test_one_device_of_several():
    """The meta device stands for another one: moving there frees memory here."""
    with PeakMemory(device="cpu") as here, PeakMemory(device="meta") as there:
        x = torch.ones(100)
        x = x.to("meta")
        _y = torch.ones(5, device="meta") + 1
    assert (here.live, here.peak, there.live) == (0, 400, 420)
    with PeakMemory(x, device="cpu:1") as nowhere:
        _z = torch.ones(5)
    assert nowhere.live == nowhere.peak == 0
    model, batch = mlp()
    plan = breakdown(model, torch.optim.SGD(model.parameters()), loss_fn, batch)
    assert plan.inputs == sum(t.nbytes for t in batch)


def test_opaque_tensors_do_not_count():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    with PeakMemory() as memory:
        _packed = torch.ones(64, 64).to_mkldnn()
        assert memory.live == 0


def test_inference_mode_counts_too():
    with PeakMemory() as memory, torch.inference_mode():
        _kept = torch.ones(10) * 2
    assert (memory.live, memory.peak) == (40, 80)


def test_results_written_into_given_memory_and_resized_storages():
    with PeakMemory() as memory:
        x, out = torch.ones(100), torch.empty(0)
        assert memory.live == 400
        torch.add(x, x, out=out)  # grows from nothing
        assert memory.live == 800
        torch.add(x, x, out=out)
        out.resize_(10)  # PyTorch keeps the storage as large as it was
        assert memory.live == 800 == memory.peak
        out.resize_(1000)
        assert memory.live == 400 + 4000
        out.untyped_storage().resize_(0)  # as FSDP does; no operation, so it is seen at the next
        assert memory.live == 4400
        out.view(-1)
        assert memory.live == 400
    assert memory.peak == 4400
    assert sum(memory.by_category().values()) == 4400


def test_a_reference_cycle_keeps_memory_until_it_is_collected():
    with PeakMemory() as memory:
        cycle = [torch.ones(100)]
        cycle.append(cycle)
        del cycle
        assert memory.live == 400
        gc.collect()
        assert memory.live == 0


def test_what_was_there_can_be_freed_inside():
    x, model = torch.ones(100), nn.Linear(10, 10)
    with PeakMemory(x, model) as memory:
        assert memory.live == 400 + 440
        del x
        assert memory.live == 440
        del model
        gc.collect()
        assert memory.live == 0


def test_a_counter_lets_go_of_all_hooks():
    model = models.MLP(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ZeroDivisionError), PeakMemory(model, optimizer):
        raise ZeroDivisionError
    assert not model[0].weight._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_purposes_in_a_step_by_hand():
    """One weight matrix W [30, 20]; x [5, 30]; loss = (x @ W).exp().sum()."""
    model = nn.Linear(20, 30, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight, y, x = 4 * 30 * 20, 4 * 5 * 30, torch.ones(5, 20)
    with PeakMemory(model, optimizer, x) as memory:
        memory.mark("forward")
        loss = model(x).exp().sum()
        after_forward = memory.by_category(len(memory.timeline) - 1)
        memory.mark("backward")
        loss.backward()
        memory.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    assert after_forward == {
        "parameters": weight,
        "buffers": 0,
        "gradients": 0,
        "optimizer": 0,
        "activations": y + 4,  # the result of exp, and the loss
        "other": x.nbytes,
    }
    fixed = weight + x.nbytes + 4  # and the loss
    assert memory.phases() == {
        "forward": fixed - 4 + 2 * y,  # before and after exp
        "backward": fixed + 4 + y + weight,  # gradients of loss, x @ W and W; exp's result is gone
        "step": fixed + 2 * weight,  # gradient and momentum
    }
    assert memory.by_category() == {
        "parameters": weight,
        "buffers": 0,
        "gradients": weight,
        "optimizer": weight,
        "activations": 4,
        "other": x.nbytes,
    }
    assert memory.live == fixed + weight


def test_gradients_add_up_in_place():
    model, x = models.MLP(20, 30, 10), torch.ones(4, 20)
    model(x).sum().backward()
    weights = sum(p.nbytes for p in model.parameters())
    with PeakMemory(model) as memory:
        assert memory.by_category(0)["gradients"] == weights
        for _ in range(3):
            model(x).sum().backward()
            assert memory.live == 2 * weights
        model.zero_grad()
        assert memory.live == weights


def test_what_is_recomputed_and_what_a_policy_keeps():
    """A block of ten layers of 400 bytes each: all kept, recomputed, or one in ten kept."""
    w = torch.ones(100, requires_grad=True)

    def block(x):
        for _ in range(10):
            x = x.sin()
        return x

    def policy(context, operation, *args, **kwargs):
        kept.append(operation is torch.ops.aten.sin.default and len(kept) == 4)
        keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        return keep if kept[-1] else again

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    def run(x, **options):
        return checkpoint(block, x, use_reentrant=False, **options) if options else block(x)

    live = []
    for options in ({}, {"preserve_rng_state": True}, {"context_fn": contexts}):
        kept = []
        with PeakMemory(w) as memory:
            y = run(w, **options)
            live.append(memory.live)
            y.sum().backward()
            gc.collect()
            assert memory.live == 400 + 400 + 400  # w, its gradient, y
        w.grad = None
    assert live == [400 + 10 * 400, 400 + 400, 400 + 2 * 400]


def test_threads_of_autograd_are_seen():
    """Nested deeper than 60, backward goes on in threads of autograd's own, as for a GPU."""
    threads = set()

    class Watched(PeakMemory):
        def __torch_dispatch__(self, *args, **kwargs):
            threads.add(threading.get_ident())
            return super().__torch_dispatch__(*args, **kwargs)

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if ctx.depth:
                with torch.enable_grad():
                    inner = torch.ones(100, requires_grad=True)
                    Deep.apply(inner, ctx.depth - 1).sum().backward()
                kept.append(inner.grad)
            return grad * 2, None

    kept = []
    with Watched() as memory:
        x = torch.ones(100, requires_grad=True)
        Deep.apply(x, 70).sum().backward()
        gc.collect()
        assert memory.live == 400 * (1 + 1 + 70)  # x, its gradient, 70 inner gradients
    assert len(threads) > 1


# ---- against the profiler, which hears of every allocation on the CPU


def mlp():
    return models.MLP(20, 64, 32, 10), (torch.randn(16, 20), torch.randint(10, (16,)))


def convnet():
    return models.ConvNet(width=4), (torch.randn(6, 1, 28, 28), torch.randint(10, (6,)))


def gpt():
    config = models.GPTConfig(vocabulary=50, context=16, layers=2, heads=2, width=16)
    tokens = torch.randint(50, (3, 17))
    return models.GPT(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def loss_under_autocast(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(model, batch)


def checkpointed(model, **options):
    for block in getattr(model, "blocks", model):
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False, **options)
    return model


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
}


MARKER = 10**9  # bytes; the allocator reserves them, nobody writes to them


class Marked(PeakMemory):
    """After each operation, allocate a marker that can be found among the profiler's events."""

    def __init__(self, *existing):
        super().__init__(*existing)
        self.numbers, self.counted = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = zip(func._schema.arguments, args, strict=False)
        self.inside = sum(str(a.type) == "Tensor" and isinstance(v, (int, float)) for a, v in given)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _record(self, operation):
        super()._record(operation)
        self.numbers.append(getattr(self, "inside", 0))
        self.counted.append(self.live)  # with what exists only because of the mode
        torch.empty(MARKER + len(self.timeline), dtype=torch.uint8)


def according_to_the_profiler(run, *existing):
    """Return (ours, the profiler's, the most inside) of the bytes added, after each operation."""
    with profile(use_device=None, profile_memory=True) as profiler:
        with Marked(*existing) as memory:
            run()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    live, found, inside = 0, [], [0]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) < MARKER:
            live += event.nbytes()
            inside[-1] = max(inside[-1], live)
        elif event.nbytes() > 0:
            found.append(live)
            inside.append(live)
    # `x.add_(1)`: while it runs, PyTorch holds the number 1 as a tensor of 8 bytes, unseen by us
    found = [count - 8 * n for count, n in zip(found, memory.numbers, strict=True)]
    ours = [count - memory.counted[0] for count in memory.counted]
    return ours, found, inside[:-1]


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW foreach"])
@pytest.mark.parametrize("loss", [loss_fn, loss_under_autocast])
@pytest.mark.parametrize("make", [mlp, convnet, gpt])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_profiler_agrees_after_every_operation(recompute, make, loss, optimizer):
    torch.manual_seed(0)
    model, batch = make()
    if recompute:  # the state of the random generator, 5,056 bytes a block, would be unseen
        model = checkpointed(model, preserve_rng_state=False)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    measure_step(model, optimizer, loss, batch)  # warm up
    optimizer.zero_grad()

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    ours, theirs, inside = according_to_the_profiler(step, model, optimizer, batch)
    assert ours == theirs
    assert len(ours) > 50
    assert all(count <= most for count, most in zip(ours, inside, strict=True))


def peak_without_a_mode(run):
    """Return (peak, bytes at the end) according to the profiler, with no mode on."""
    with profile(use_device=None, profile_memory=True) as profiler:
        _kept = run()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    live = [0]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live.append(live[-1] + event.nbytes())
    return max(live), live[-1]


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.neg()

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() + grad.roll(1)  # two tensors and their sum


def kept(result, into):
    """Let somebody own the gradient that the operation before `result` returns."""
    result.grad_fn.register_hook(lambda gradients, _: into.append(gradients[0]))
    return result


def hooked(x, hook):
    x.register_hook(hook)
    return x


MEETINGS = {  # (y, list of what stays) -> result; how many tensors too many a mode makes
    "y * y": (lambda y, _: y * y, 1),
    "y @ y": (lambda y, _: y @ y, 1),
    "three operands of one operation": (lambda y, _: torch.addcmul(y, y, y), 1),
    "twice": (lambda y, _: y.neg() + y.roll(1), 1),
    "three times": (lambda y, _: y.neg() + y.roll(1) + y.flip(0), 1),
    "the same gradient twice": (lambda y, _: y + y, 0),
    "the same gradient three times": (lambda y, _: y + y + y, 1),
    "one residual": (lambda y, _: y + y.neg(), 0),
    "a residual stream": (lambda y, _: (y + y.neg()) + (y + y.neg()).roll(1), 1),
    "somebody keeps both": (lambda y, into: kept(y.neg(), into) + kept(y.roll(1), into), 0),
    "somebody keeps the first": (lambda y, into: y.neg() + kept(y.roll(1), into), 0),
    "somebody keeps the second": (lambda y, into: kept(y.neg(), into) + y.roll(1), 1),
    "a view first": (lambda y, _: y.neg() + y.t().neg().t(), 0),
    "a view second": (lambda y, _: y.t().neg().t() + y.neg(), 1),
    "an expanded gradient first": (lambda y, _: y.neg() + y.sum(), 0),
    "an expanded gradient second": (lambda y, _: y.sum() + y.neg(), 1),
    "parts": (lambda y, _: torch.cat([y.neg(), y]).neg(), 0),
    "a function's own sum": (lambda y, _: Negated.apply(y), 0),
    "a hook's sum": (lambda y, _: hooked(y.neg(), lambda g: g.neg() + g.roll(1)), 0),
    "a hook adds": (lambda y, _: hooked(y.neg(), lambda g: g + torch.ones_like(g)).roll(1), 0),
    "a formula's own sum": (lambda y, _: torch.atan2(y, y.neg()), 0),
    "x[i]": (lambda y, _: y[torch.arange(5)], 1),
    "index_select": (lambda y, _: y.index_select(0, torch.arange(5)), 1),
    "take": (lambda y, _: y.take(torch.arange(5)), 1),
    "max": (lambda y, _: y.max(1).values, 1),
    "gather": (lambda y, _: y.gather(1, torch.arange(100).unsqueeze(1)), 1),
}


def meeting(use, **options):
    def run():
        x = torch.full((100, 100), 0.5, requires_grad=True)
        y, held = x.clone(), []
        z = use(y, held)
        torch.autograd.backward(z, torch.ones_like(z), **options)
        return x.grad, held

    return run


def peak_in_here(run):
    with PeakMemory() as memory:
        _kept = run()
        live = memory.live
    for i, (_, bytes_then) in enumerate(memory.timeline):
        assert sum(memory.by_category(i).values()) == bytes_then
    assert memory.peak == max(live for _, live in memory.timeline)
    return memory.peak, live


class Third(PeakMemory):
    """Count what is there while the mode is on."""

    def _hides_in_place(self, *args):
        return False


@pytest.mark.parametrize("name", MEETINGS)
def test_gradients_that_meet_take_what_they_take_without_a_mode(name):
    use, too_many = MEETINGS[name]
    run, size = meeting(use), 4 * 100 * 100
    run()
    expected = peak_without_a_mode(run)
    assert peak_in_here(run) == expected
    with FakeTensorMode():
        assert peak_in_here(run) == expected
    with Third() as third:
        run()
    assert third.peak - expected[0] == pytest.approx(too_many * size, rel=0.1)
    with PeakMemory() as outer, PeakMemory():
        run()
    assert outer.peak == expected[0]


@pytest.mark.parametrize("options", [{"create_graph": True}, {"retain_graph": True}])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_gradients_needs_all_of_them(options):
    run = meeting(lambda y, _: y.neg() + y.roll(1) + y.flip(0), **options)
    run()
    assert peak_in_here(run) == peak_without_a_mode(run)
    tensors = 7 if "create_graph" in options else 6  # x, y, z, dz, and two or three gradients
    assert peak_in_here(run)[0] == tensors * 4 * 100 * 100


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_two_gradients_of_a_matrix_for_input_and_output(autocast, sparse):
    def run():
        matrix = nn.Parameter(torch.ones(2000, 64))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = F.embedding(torch.arange(8), matrix, sparse=sparse)
            loss = F.linear(x, matrix).sum()
        loss.backward()
        return matrix.grad

    run()
    expected, got = peak_without_a_mode(run), peak_in_here(run)
    assert abs(got[0] - expected[0]) <= 8 and got[1] == expected[1]  # a number, 1 / count
    matrices = round(got[0] / (4 * 2000 * 64))
    assert matrices == (3 if (autocast, sparse) != (False, False) else 4), matrices


def test_a_sum_of_gradients_becomes_the_gradient():
    """The sum stands in for the first of the two, so that is what the purpose belongs to."""
    x = torch.ones(100, requires_grad=True)
    with PeakMemory(x) as memory:
        (x.neg() + x.flip(0)).backward(torch.ones(100))
    gradients = [memory.by_category(i)["gradients"] for i in range(len(memory.timeline))]
    made = gradients.index(400)
    assert [name for name, _ in memory.timeline[made:]] == [
        "aten.flip",
        "aten.neg",
        "aten.add",
        "aten.detach",
    ]
    assert set(gradients[made:]) == {400}


def test_the_profiler_sees_the_scratch_memory_that_we_do_not():
    x, weight = torch.ones(2, 8, 16, 16), torch.ones(8, 8, 3, 3)
    odd = torch.ones(64, 64).t()[::2]
    run = {
        "convolution": lambda: F.conv2d(x, weight),  # oneDNN's; depends on the processor
        "contiguous": lambda: odd.softmax(1),  # softmax copies a strided input for itself
    }
    for name, call in run.items():
        call()
        ours, theirs, inside = according_to_the_profiler(call, x, weight, odd)
        assert ours == theirs
        if name == "contiguous":
            assert max(inside) == max(ours) + odd.nbytes


@pytest.mark.gpu
def test_cuda_s_allocator_agrees_after_every_operation():
    """`memory_allocated` counts the same storages, each rounded up to 512 bytes (below 1 MiB)."""
    differences = []

    class Compared(PeakMemory):
        def _record(self, operation):
            super()._record(operation)
            rounded = sum(round_size(b.bytes) for b in self._alive.values() if b.bytes)
            differences.append(torch.cuda.memory_allocated() - rounded)

    torch.manual_seed(0)
    model, (x, y) = mlp()
    model, batch = model.cuda(), (x.cuda(), y.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    measured = measure_step(model, optimizer, loss_fn, batch)  # warm up: workspaces stay allocated
    optimizer.zero_grad()
    with Compared(model, optimizer, batch, device="cuda"):
        loss_fn(model, batch).backward()
        optimizer.step()
    assert len(set(differences)) == 1 and differences[0] >= 0
    assert breakdown(model, optimizer, loss_fn, batch) == measured


# ---- breakdown: the prediction is what a real step takes


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [  # weights and gradients are float32 in both, so one optimizer is enough under autocast
        *((loss_fn, name) for name in OPTIMIZERS),
        (loss_under_autocast, "AdamW foreach"),
    ],
)
@pytest.mark.parametrize("make", [mlp, convnet, gpt])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_prediction_equals_a_real_step(make, recompute, loss, optimizer):
    torch.manual_seed(0)
    model, batch = make()
    if recompute:
        model = checkpointed(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    predicted = breakdown(model, optimizer, loss, batch)
    measured = measure_step(model, optimizer, loss, batch)
    assert predicted == measured
    assert predicted.memory.timeline == measured.memory.timeline


def test_a_prediction_changes_nothing():
    torch.manual_seed(0)
    model, batch = convnet()  # with dropout and batch norm
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn(model, batch).backward()
    optimizer.step()
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    state, rng = optimizer.state, torch.get_rng_state()
    breakdown(model, optimizer, loss_fn, batch)

    def broken(model, batch):
        model(batch[0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breakdown(model, optimizer, broken, batch)
    now = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=False))
    assert optimizer.state is state and all(s["step"] == 1 for s in state.values())
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(map(id, model.parameters()))
    assert torch.equal(rng, torch.get_rng_state())
    loss_fn(model, batch).backward()  # and training goes on
    optimizer.step()


def test_parts_of_a_breakdown_by_formula():
    sizes, batch = (30, 64, 16, 5), 7
    model = models.MLP(*sizes)
    x, y = torch.ones(batch, sizes[0]), torch.zeros(batch, dtype=torch.int64)
    weights = 4 * sum(a * b + b for a, b in zip(sizes, sizes[1:], strict=False))
    got = breakdown(model, torch.optim.Adam(model.parameters()), loss_fn, (x, y))
    assert (got.parameters, got.gradients, got.buffers) == (weights, weights, 0)
    assert got.optimizer == 2 * weights + 4 * 6  # and a counter for each of six tensors
    assert got.inputs == 4 * batch * 30 + 8 * batch
    # results of ReLU, log-softmax, the loss and its total weight; the batch counts as inputs
    assert got.activations == 4 * batch * (64 + 16 + 5) + 4 + 4
    assert got.total == 4 * weights + 4 * 6 + got.inputs + got.activations
    frozen = models.MLP(*sizes).requires_grad_(False)
    frozen[-1].requires_grad_()
    some = breakdown(frozen, torch.optim.Adam(frozen[-1].parameters()), loss_fn, (x, y))
    assert (some.parameters, some.gradients) == (weights, 4 * (16 * 5 + 5))


def test_the_activations_are_what_autograd_saves():
    model, batch = gpt()
    with SavedTensors(exclude=[*model.parameters(), *batch]) as saved:
        loss = loss_fn(model, batch)
    got = breakdown(model, torch.optim.SGD(model.parameters()), loss_fn, batch)
    assert got.activations == saved.bytes + loss.nbytes


def test_a_model_of_a_size_that_fits_nowhere():
    with FakeTensorMode():
        config = models.GPTConfig(vocabulary=50_304, context=2048, layers=2, heads=96, width=12_288)
        model = models.GPT(config)
        tokens = torch.zeros(512, 2049, dtype=torch.int64)
    batch = tokens[:, :-1], tokens[:, 1:]
    got = breakdown(model, torch.optim.AdamW(model.parameters()), loss_fn, batch)
    count = models.count_parameters(model)
    tensors = len(list(model.parameters()))
    assert got.parameters == got.gradients == 4 * count > 17e9
    assert got.optimizer == 2 * got.parameters + 4 * tensors
    assert got.peak > 2**40


def accumulated(model, optimizer, batch):
    for x, y in zip(*(t.chunk(4) for t in batch), strict=True):
        (loss_fn(model, (x, y)) / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_any_step_can_be_predicted():
    torch.manual_seed(0)
    model, batch = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = dry_run(accumulated, model, optimizer, batch)
    accumulated(model, optimizer, batch)
    with PeakMemory(model, optimizer, batch) as measured:
        accumulated(model, optimizer, batch)
    assert predicted.timeline == measured.timeline and predicted.peak == measured.peak
    assert predicted.by_category() == measured.by_category()


def test_looking_at_values_is_refused_by_pytorch():
    model, batch = mlp()

    def looks(model, batch):
        loss = loss_fn(model, batch)
        return loss if loss > 1 else 2 * loss

    with pytest.raises(Exception, match="_local_scalar_dense"):
        breakdown(model, torch.optim.SGD(model.parameters()), looks, batch)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        breakdown(model, torch.optim.Adafactor(model.parameters()), loss_fn, batch)


def test_compiled_code_is_counted_as_if_it_were_not():
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    plain = breakdown(model, optimizer, loss_fn, batch)
    compiled = breakdown(torch.compile(model), optimizer, loss_fn, batch)
    assert compiled == plain and compiled.memory.timeline == plain.memory.timeline


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="is on the meta device"):
        breakdown(model, torch.optim.SGD(model.parameters()), loss_fn, None)


def test_a_model_without_parameters_is_refused():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with pytest.raises(ValueError, match="a model with parameters, got ReLU"):
        breakdown(nn.ReLU(), optimizer, loss_fn, None)
    with pytest.raises(ValueError, match="a model with parameters, got ReLU"):
        dry_run(accumulated, nn.ReLU(), optimizer, None)
