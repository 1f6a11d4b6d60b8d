import pytest
import torch
from torch import nn

from helpers.allocator import CachingAllocator
from helpers.exercises.memory import fixed_bytes, mlp_peak, mlp_saved, segment_bytes
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


def peak_by_hand(batch, depth, width, optimizer):
    parameters = 4 * (depth * (width * width + width) + 10 * width + 10)
    one, data = 4 * batch * width, 4 * batch * width + 8 * batch
    adam = optimizer == "Adam"
    begins = parameters + 2 * adam * parameters + data + (depth + 2) * one
    ends = 2 * parameters + 2 * adam * parameters + data + one
    update = 2 * parameters + 3 * adam * parameters + data
    bytes_, moment = max((begins, "begins"), (ends, "ends"), (update, "update"))
    return moment, bytes_


def with_sgd(batch, depth, width, optimizer):
    return peak_by_hand(batch, depth, width, "SGD")


def only_begins(batch, depth, width, optimizer):
    moment, found = peak_by_hand(10**9, depth, width, optimizer)
    return moment, found * batch // 10**9


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
    "mlp_peak": [peak_by_hand],
    "segment_bytes": [rounded],
}


def without_frozen(model, states):
    return sum((2 + states) * p.nbytes for p in model.parameters() if p.requires_grad)


def with_buffers(model, states):
    return by_hand(model, states) + sum(buffer.nbytes for buffer in model.buffers())


WRONG = {
    "fixed_bytes": [
        with_buffers,
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
    "mlp_peak": [
        with_sgd,
        only_begins,
        lambda *arguments: peak_by_hand(*arguments)[::-1],
        lambda *arguments: peak_by_hand(*arguments)[1],
        lambda batch, *others: peak_by_hand(batch + 1, *others),
        lambda batch, depth, *others: peak_by_hand(batch, depth + 1, *others),
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


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("batch", [64, 512, 2048])
def test_the_three_moments_are_those_of_a_step(batch, name):
    layers = []
    for _ in range(6):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    optimizer = getattr(torch.optim, name)(model.parameters(), foreach=True)
    data = torch.zeros(batch, 128), torch.zeros(batch, dtype=torch.int64)

    def loss_fn(model, data):
        return nn.functional.cross_entropy(model(data[0]), data[1])

    counted = measure_step(model, optimizer, loss_fn, data).peak
    moment, predicted = mlp_peak(batch, 6, 128, name)
    last = 4 * (128 * 10 + 10)  # parameter gradients of the last layer, left out at "begins"
    counters = 4 * 14 if name == "Adam" else 0
    scalars = 16  # the loss, its gradient and the divisor
    assert 0 <= counted - predicted <= last * (moment == "begins") + counters + scalars


def test_gelu_keeps_its_input_as_well():
    assert mlp_saved(2, [3, 4, 5], nn.ReLU) == 4 * 2 * (3 + 4)
    assert mlp_saved(2, [3, 4, 5], nn.GELU) == 4 * 2 * (3 + 4 + 4)


@pytest.mark.parametrize("size", [1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 33 * MIB + 5])
def test_segments_are_those_of_the_allocator(size):
    device = CachingAllocator(capacity=100 * MIB)
    device.malloc(size)
    assert segment_bytes(size) == device.reserved
