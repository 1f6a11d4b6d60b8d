"""Chapter 12: reference and cases of its exercises."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from helpers import compilation
from helpers.exercises.harness import Exercise

# graphs: the four functions as they stand in the chapter


def _unrolled(x: Tensor) -> Tensor:
    total = torch.zeros(3)
    for i in range(4):
        if i % 2 == 1:
            total = total + x.sin()
    return total


def _printed_twice(x: Tensor) -> Tensor:
    y = x.sin()
    print(end="")
    y = y.cos()
    print(end="")
    return y + 1


def _looked_at(x: Tensor) -> Tensor:
    if x.mean() > 0:
        y = x * 2
    else:
        y = x / 2
    return y + 1


def _printed_first(x: Tensor) -> Tensor:
    print(end="")
    return x.sin() + x.shape[0]


FUNCTIONS = {"a": _unrolled, "b": _printed_twice, "c": _looked_at, "d": _printed_first}


def _number_of_graphs(name: str) -> int:
    return compilation.breaks(FUNCTIONS[name], torch.ones(3))[0]


def _looked_up(answer: dict[str, int] | Callable) -> Callable[[str], int]:
    """The answer is a dictionary, the reference a function."""
    return answer.get if isinstance(answer, dict) else answer


# calls


def _times() -> list[tuple]:
    return [
        (12, 8, 3),
        (0.002, 2, 1),  # as many ms as s × 1000
        (1, 3, 3),  # never: as fast
        (1, 2, 5),  # never: slower
        (0, 2, 1),  # at once
        (0.01, 7, 4),  # 10 / 3: not before the fourth
        (0.5, 3.0, 1.0),
        (0.25, 9.0, 8.5),
        (0.75, 0.5, 0.375),  # faster by less than a ms
        (0, 1, 2),  # never, though compiling cost nothing
    ]


# clipped


def _clip(v: Tensor, limit: float) -> Tensor:
    norm = v.norm()
    return torch.where(norm > limit, v * (limit / norm), v)


def _in_one_graph(function: Callable) -> Callable:
    torch.compiler.reset()
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=False)


def _vectors() -> list[tuple]:
    ramp = torch.arange(6.0)
    return [
        (ramp, 2.0),
        (ramp, 20.0),
        (-ramp.double(), 1.0),
        (0 * ramp, 1.0),
        (ramp[:0], 1.0),
        (ramp.view(2, 3).T, 0.5),  # one norm for all, whatever the shape
        (torch.tensor([3.0, 4.0]), 5.0),  # just at the limit
        (torch.tensor([3e-5, -4e-5], dtype=torch.float64), 1e-5),
        (ramp.half(), 2.0),
        (ramp.double()[::2], 2.0),
    ]


# prepare


def _mark_length(v: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(v, 1)
    return v


def _counting(prepare: Callable[[Tensor], Tensor]) -> Callable:
    """The graphs that are compiled so far, after a call with each of the shapes."""

    def count(*shapes: tuple[int, int]) -> list[int]:
        calls = []
        for shape in shapes:
            v = torch.arange(float(shape[0] * shape[1])).view(shape)
            marked = prepare(v)
            if marked is ...:
                return ...
            if not torch.equal(marked, v):
                raise ValueError("prepare must return the tensor that it was given")
            calls.append((marked,))
        return compilation.compiles(lambda v: v.sin() + 1, calls)

    return count


def _shapes() -> list[tuple]:
    return [
        ((4, 7), (4, 9), (4, 30)),
        ((4, 7), (5, 7), (4, 9), (5, 2)),
        ((2, 8), (2, 64), (2, 3), (3, 3)),
    ]


# swap: the forms in which a ReLU meets a backend


def _as_function(v: Tensor) -> Tensor:
    return F.relu(v)


def _as_torch(v: Tensor) -> Tensor:
    return torch.relu(v) + v


def _as_method(v: Tensor) -> Tensor:
    return v.relu() * 2


def _as_module(v: Tensor) -> Tensor:
    return nn.ReLU(inplace=True)(v + 0)


def _twice(v: Tensor) -> Tensor:
    return torch.relu(F.relu(v) - 1) + v.sin()


def _without(v: Tensor) -> Tensor:
    return v.exp() - F.silu(v)


FORMS = [_as_function, _as_torch, _as_method, _as_module, _twice, _without]


def _gelu_for_relu(graph: GraphModule, example_inputs: list) -> Callable:
    for node in graph.graph.nodes:
        if node.target in (torch.relu, F.relu, "relu"):
            node.op, node.target = "call_function", F.gelu
            node.args, node.kwargs = node.args[:1], {}  # no inplace
    graph.recompile()
    return graph.forward


def _compiling_with(backend: Callable) -> Callable:
    def run(function: Callable, v: Tensor) -> Tensor:
        if backend(torch.fx.symbolic_trace(lambda v: v), []) is ...:
            return ...
        torch.compiler.reset()
        return torch.compile(function, backend=backend)(v)

    return run


def _forms() -> list[tuple]:
    ramp = torch.linspace(-3, 3, 7)
    cases = [(form, ramp) for form in FORMS]
    return [*cases, (_twice, torch.randn(2, 3, 4).mT), (_as_method, ramp.double())]


EXERCISES = {
    "graphs": Exercise(
        reference=_number_of_graphs,
        cases=lambda: [(name,) for name in FUNCTIONS],
        through=_looked_up,
    ),
    "calls": Exercise(reference=compilation.break_even, cases=_times),
    "clipped": Exercise(reference=_clip, cases=_vectors, through=_in_one_graph, scale=0.0),
    "prepare": Exercise(reference=_mark_length, cases=_shapes, through=_counting),
    "swap": Exercise(reference=_gelu_for_relu, cases=_forms, through=_compiling_with),
}
