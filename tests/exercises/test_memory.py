import pytest
import torch
from torch import nn

from helpers.allocator import CachingAllocator
from helpers.exercises.memory import fixed_bytes, mlp_saved, segment_bytes
from helpers.memory import measure_step

MIB = 2**20


def by_hand(model, states):
    total = 0
    for parameter in model.parameters():
        each = parameter.numel() * parameter.element_size()
        total += each + (1 + states) * each * parameter.requires_grad
    return total


def saved_by_hand(batch, sizes, activation):
    inputs = batch * sum(sizes[:-1])
    if activation is nn.GELU:
        inputs += batch * sum(sizes[1:-1])
    return 4 * inputs


def careful(model, loss_fn, batches):
    losses = []
    for x, y in batches:
        with torch.no_grad():
            losses.append(loss_fn(model(x), y).item())
    return losses


def detached(model, loss_fn, batches):
    losses = []
    for x, y in batches:
        losses.append(loss_fn(model(x), y).item())
    return losses


def rounded(size):
    size = (size + 511) // 512 * 512
    if size <= MIB:
        return 2 * MIB
    if size < 10 * MIB:
        return 20 * MIB
    return (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB


RIGHT = {
    "fixed_bytes": [by_hand],
    "mlp_saved": [saved_by_hand],
    "validation_losses": [careful, detached],
    "segment_bytes": [rounded],
}


def without_frozen(model, states):
    return sum((2 + states) * p.nbytes for p in model.parameters() if p.requires_grad)


WRONG = {
    "fixed_bytes": [
        lambda model, states: (2 + states) * sum(p.nbytes for p in model.parameters()),
        without_frozen,
        lambda model, states: (2 + states) * sum(t.nbytes for t in model.state_dict().values()),
        lambda model, states: by_hand(model, states) + 1,
        lambda model, states: by_hand(model, 2),
        lambda model, states: 4 * sum(p.numel() for p in model.parameters()) * (2 + states),
    ],
    "mlp_saved": [
        lambda batch, sizes, activation: 4 * batch * sum(sizes[:-1]),
        lambda batch, sizes, activation: 4 * batch * sum(sizes),
        lambda batch, sizes, activation: saved_by_hand(batch, sizes, nn.GELU),
        lambda batch, sizes, activation: saved_by_hand(1, sizes, activation),
        lambda batch, sizes, activation: saved_by_hand(batch, sizes, activation) // 4,
        lambda batch, sizes, activation: 2 * 4 * batch * sum(sizes[:-1]),
    ],
    "validation_losses": [
        lambda model, loss_fn, batches: [loss_fn(model(x), y) for x, y in batches],
        lambda model, loss_fn, batches: [loss_fn(model(x), y).detach() for x, y in batches],
        lambda model, loss_fn, batches: sum(careful(model, loss_fn, batches)),
        lambda model, loss_fn, batches: careful(model, loss_fn, batches)[:1],
    ],
    "segment_bytes": [
        lambda size: size,
        lambda size: -(-size // 512) * 512,
        lambda size: max(2 * MIB, -(-size // (2 * MIB)) * 2 * MIB),
        lambda size: 2 * MIB if size <= MIB else 20 * MIB,
        lambda size: rounded(size) if size != 10 * MIB - 1 else 20 * MIB,
        lambda size: rounded(size) if size != 10 * MIB else 20 * MIB,
    ],
}


def test_fixed_bytes_are_what_adam_holds():
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    adam = torch.optim.Adam(model.parameters())
    parts = measure_step(model, adam, lambda m, x: m(x).sum(), torch.ones(2, 6))
    counters = 4 * 4  # one for each parameter
    found = parts.parameters + parts.gradients + parts.optimizer - counters
    assert found == fixed_bytes(model, states=2)


def test_gelu_keeps_its_input_as_well():
    assert mlp_saved(2, [3, 4, 5], nn.ReLU) == 4 * 2 * (3 + 4)
    assert mlp_saved(2, [3, 4, 5], nn.GELU) == 4 * 2 * (3 + 4 + 4)


@pytest.mark.parametrize("size", [1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 33 * MIB + 5])
def test_segments_are_those_of_the_allocator(size):
    device = CachingAllocator(capacity=100 * MIB)
    device.malloc(size)
    assert segment_bytes(size) == device.reserved
