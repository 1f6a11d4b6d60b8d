"""Chapter 09, exercises: bytes that stay, bytes that backward needs, the peak, segments."""

from collections.abc import Sequence

import torch
from torch import nn

from helpers.exercises.harness import Exercise
from helpers.memory import SavedTensors

# ---- 1: what does not depend on the batch


def fixed_bytes(model: nn.Module, states: int) -> int:
    """Return the bytes of parameters, gradients and `states` tensors of state a parameter."""
    total = 0
    for parameter in model.parameters():
        copies = 2 + states if parameter.requires_grad else 1
        total += copies * parameter.nbytes
    return total


class _Described(nn.Sequential):
    """A model whose name fits into one line of a verdict."""

    def __init__(self, description: str, *layers: nn.Module):
        super().__init__(*layers)
        self._description = description

    def __repr__(self) -> str:
        return self._description


def _models() -> list[tuple[nn.Module, int]]:
    plain = _Described("two layers", nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    frozen = _Described("first layer frozen", nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    frozen[0].requires_grad_(False)
    tied = _Described("tied weights", nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    tied[1].weight = tied[0].weight
    half = _Described("a layer in bfloat16", nn.Linear(8, 8).to(torch.bfloat16))
    mixed = _Described("float32 and float64", nn.Linear(3, 3), nn.Linear(3, 3).double())
    buffers = _Described("batch normalization", nn.Linear(6, 4), nn.BatchNorm1d(4))
    cases = [(plain, 0), (plain, 2), (frozen, 1), (frozen, 2), (tied, 2), (half, 2), (mixed, 1)]
    return [*cases, (buffers, 2)]


# ---- 2: what backward needs


def mlp_saved(batch: int, sizes: Sequence[int], activation: type[nn.Module]) -> int:
    """Return the bytes that autograd saves, without the parameters, as PyTorch does it."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    model = nn.Sequential(*layers[:-1])
    with SavedTensors(exclude=model.parameters()) as saved:
        _out = model(torch.zeros(batch, sizes[0]))
    return saved.bytes


def _mlps() -> list[tuple[int, list[int], type[nn.Module]]]:
    return [
        (2, [3, 4, 5], nn.ReLU),
        (2, [3, 4, 5], nn.GELU),
        (1, [8, 8, 8, 8], nn.ReLU),
        (7, [6, 16, 9, 2], nn.GELU),
        (5, [10, 3], nn.ReLU),
        (5, [10, 3], nn.GELU),
    ]


# ---- 3: the peak


def mlp_peak(batch: int, depth: int, width: int, optimizer: str) -> tuple[str, int]:
    """Return the moment of the peak and its bytes; optimizer is "SGD" or "Adam" (foreach)."""
    parameters = 4 * (depth * width * (width + 1) + 10 * (width + 1))
    states, temporary = {"SGD": (0, 0), "Adam": (2, 1)}[optimizer]
    activation = 4 * batch * width
    always = (1 + states) * parameters + activation + 8 * batch
    moments = {
        "begins": always + depth * activation + 2 * activation,
        "ends": always + parameters + activation,
        "update": always + parameters + temporary * parameters,
    }
    return max(moments.items(), key=lambda item: item[1])


def _steps() -> list[tuple[int, int, int, str]]:
    return [
        (64, 6, 512, "Adam"),
        (2048, 6, 512, "Adam"),
        (64, 6, 512, "SGD"),
        (1024, 6, 512, "SGD"),
        (700, 6, 512, "Adam"),
        (900, 6, 512, "Adam"),
        (32, 2, 256, "Adam"),
        (1, 1, 128, "SGD"),
    ]


# ---- 4: segments


def segment_bytes(size: int) -> int:
    """Return how many bytes PyTorch's allocator gets from CUDA for a first tensor of `size`."""
    mib = 2**20
    rounded = -(-size // 512) * 512
    if rounded <= mib:
        return 2 * mib
    if rounded < 10 * mib:
        return 20 * mib
    return -(-rounded // (2 * mib)) * 2 * mib


def _sizes() -> list[tuple[int]]:
    mib = 2**20
    sizes = [1, 512, 513, mib, mib + 1, 3 * mib, 10 * mib - 1, 10 * mib, 10 * mib + 1]
    return [(size,) for size in [*sizes, 12 * mib, 20 * mib + 512, 1_000_000_000]]


EXERCISES = {
    "fixed_bytes": Exercise(reference=fixed_bytes, cases=_models),
    "mlp_saved": Exercise(reference=mlp_saved, cases=_mlps),
    "mlp_peak": Exercise(reference=mlp_peak, cases=_steps),
    "segment_bytes": Exercise(reference=segment_bytes, cases=_sizes),
}
