"""Chapter 19, exercises: recall@k, weights that can be loaded, the population stability index."""

import math
import random

import torch
from torch import Tensor

from helpers import embeddings
from helpers.exercises.harness import Exercise

# ---- 1: how good is a search?


def recall(scores: Tensor, right: Tensor, k: int) -> float:
    """Count the queries whose right document is among the k best."""
    return embeddings.recall_at(scores, right, min(k, scores.shape[1]))


def _searches() -> list[tuple[Tensor, Tensor, int]]:
    fixed = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.8, 0.4], [0.3, 0.6, 0.7], [0.1, 0.2, 0.3]])
    cases = [(fixed, torch.tensor([2, 1, 0, 0]), k) for k in (1, 2, 3, 5)]
    for queries, documents, k in ((5, 7, 1), (8, 20, 5), (6, 4, 4), (3, 9, 2)):
        scores = torch.rand(queries, documents) - 0.5  # negative ones, too
        cases.append((scores, torch.randint(documents, (queries,)), k))
    wide = torch.rand(12, 6).t()  # not contiguous
    return [*cases, (wide, torch.randint(12, (6,)), 3), (wide.double() * 1e6, torch.arange(6), 4)]


# ---- 2: which weights can be loaded?

Shapes = dict[str, tuple[int, ...]]


def loadable(saved: Shapes, model: Shapes) -> tuple[list[str], list[str]]:
    """Compare names, without one prefix of DDP, and shapes."""
    bare = {name.removeprefix("module."): shape for name, shape in saved.items()}
    fits = [name for name, shape in model.items() if bare.get(name) == shape]
    return fits, [name for name in model if name not in fits]


def _states() -> list[tuple[Shapes, Shapes]]:
    model = {"body.weight": (64, 784), "body.bias": (64,), "fc.weight": (10, 64), "fc.bias": (10,)}
    ddp = {f"module.{name}": shape for name, shape in model.items()}
    fewer = {**model, "fc.weight": (5, 64), "fc.bias": (5,)}
    turned = {**model, "body.weight": (784, 64)}
    inner = {"module.conv.weight": (8, 1, 3, 3), "other.module.bias": (8,)}
    saved_inner = {f"module.{name}": shape for name, shape in inner.items()}
    return [
        (model, model),
        (ddp, model),
        (fewer, model),
        ({f"module.{name}": shape for name, shape in fewer.items()}, model),
        (turned, model),
        (saved_inner, inner | {"module.conv.weight": (8, 1, 5, 5)}),
        ({"module.head.bias": (3,), "extra": (2,)}, {"head.bias": (3,), "new": (2,)}),
        (dict(reversed(list(ddp.items()))), model),
        ({"my_module.fc.bias": (10,)}, {"fc.bias": (10,), "my_fc.bias": (10,)}),
        ({}, model),
        (model, {}),
    ]


# ---- 3: the population stability index


def psi(expected: list[int], actual: list[int]) -> float:
    """Sum (a - e) ln(a / e) over the shares of the counts plus one."""
    e_total, a_total = sum(expected) + len(expected), sum(actual) + len(actual)
    pairs = [((e + 1) / e_total, (a + 1) / a_total) for e, a in zip(expected, actual, strict=True)]
    return sum((a - e) * math.log(a / e) for e, a in pairs)


def _counts() -> list[tuple[list[int], list[int]]]:
    fixed = [
        ([10, 20, 30], [10, 20, 30]),
        ([10, 20, 30], [30, 20, 10]),
        ([100, 200, 300], [1, 2, 3]),
        ([0, 5, 0], [5, 0, 0]),
        ([7], [3]),
        ([10**12, 3], [2, 10**12]),
    ]
    drawn = []
    for bins in (2, 5, 10):
        first = [random.randint(0, 50) for _ in range(bins)]
        drawn.append((first, [random.randint(0, 500) for _ in range(bins)]))
    return fixed + drawn


EXERCISES = {
    "recall": Exercise(reference=recall, cases=_searches),
    "loadable": Exercise(reference=loadable, cases=_states),
    "psi": Exercise(reference=psi, cases=_counts),
}
