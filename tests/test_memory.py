import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from helpers import models
from helpers.memory import PeakMemory, SavedTensors, breakdown, measure_step

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


# ---- breakdown: the prediction is what a real step takes


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


def checkpointed(model):
    for block in getattr(model, "blocks", model):
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", [loss_fn, loss_under_autocast])
@pytest.mark.parametrize("make", [mlp, convnet, gpt])
@pytest.mark.parametrize("change", [lambda model: model, checkpointed])
def test_the_prediction_equals_a_real_step(make, change, loss, optimizer):
    torch.manual_seed(0)
    model, batch = make()
    model = change(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    predicted = breakdown(model, optimizer, loss, batch)
    measured = measure_step(model, optimizer, loss, batch)
    assert predicted == measured
    assert predicted.memory.timeline == measured.memory.timeline


def test_a_model_without_memory_or_shape_of_its_own_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="is on the meta device"):
        breakdown(model, torch.optim.SGD(model.parameters()), loss_fn, None)
