"""Wrong answers that chapter 12 must refuse, and right ones, written otherwise, that it takes."""

import ast
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers.exercises import check
from helpers.exercises import compilation as exercises

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "12_compilation.ipynb"


@pytest.fixture
def verdict(capsys):
    def of(name, answer):
        check(f"compilation.{name}", answer)
        return capsys.readouterr().out

    return of


# graphs

GRAPHS = {"a": 1, "b": 3, "c": 2, "d": 1}

GRAPHS_WRONG = {
    "a loop breaks": GRAPHS | {"a": 4},
    "a branch for each turn": GRAPHS | {"a": 2},
    "breaks, not graphs": GRAPHS | {"b": 2},
    "both branches": GRAPHS | {"c": 3},
    "a print before it all": GRAPHS | {"d": 2},
    "a print alone is a graph": GRAPHS | {"d": 0},
    "all one": dict.fromkeys("abcd", 1),
    "one is missing": {"a": 1, "b": 3, "c": 2},
    "text": {name: str(count) for name, count in GRAPHS.items()},
}


# calls


def calls(compile_s, eager_ms, compiled_ms):
    gain = eager_ms - compiled_ms
    return math.ceil(1000 * compile_s / gain) if gain > 0 else math.inf


def by_searching(compile_s, eager_ms, compiled_ms):
    if compiled_ms >= eager_ms:
        return float("inf")
    n = 0
    while compile_s * 1000 + n * compiled_ms > n * eager_ms:
        n += 1
    return n


CALLS_RIGHT = {
    "rounded up": calls,
    "searched": by_searching,
    "in seconds": lambda c, e, k: math.ceil(c / ((e - k) / 1000)) if e > k else math.inf,
    "negated floor": lambda c, e, k: float(-(-c * 1000 // (e - k))) if e > k else math.inf,
}
CALLS_WRONG = {
    "seconds with ms": lambda c, e, k: math.ceil(c / (e - k)) if e > k else math.inf,
    "rounded down": lambda c, e, k: math.floor(1000 * c / (e - k)) if e > k else math.inf,
    "rounded": lambda c, e, k: round(1000 * c / (e - k)) if e > k else math.inf,
    "one more": lambda c, e, k: int(1000 * c / (e - k)) + 1 if e > k else math.inf,
    "not whole": lambda c, e, k: 1000 * c / (e - k) if e > k else math.inf,
    "division by zero": lambda c, e, k: math.ceil(1000 * c / (e - k)),
    "negative calls": lambda c, e, k: math.ceil(1000 * c / (e - k)) if e != k else math.inf,
    "the compiled call alone": lambda c, e, k: math.ceil(1000 * c / k) if e > k else math.inf,
    "the eager call alone": lambda c, e, k: math.ceil(1000 * c / e) if e > k else math.inf,
    "None for never": lambda c, e, k: calls(c, e, k) if e > k else None,
    "microseconds": lambda c, e, k: math.ceil(1e6 * c / (e - k)) if e > k else math.inf,
    "free compiling is free": lambda c, e, k: calls(c, e, k) if c else 0,
}


# clipped


def clipped(v, limit):
    norm = v.norm()
    return torch.where(norm > limit, v * (limit / norm), v)


def with_cond(v, limit):
    norm = v.norm()
    return torch.cond(norm > limit, lambda v, n: v * (limit / n), lambda v, n: v.clone(), (v, norm))


def with_item(v, limit):
    norm = v.norm().item()
    return v * (limit / norm) if norm > limit else v


def in_place(v, limit):
    norm = v.norm()
    return v.mul_(torch.where(norm > limit, limit / norm, 1.0))


@torch.compiler.disable
def left_to_python(v, limit):
    return with_item(v, limit)


CLIPPED_RIGHT = {
    "where": clipped,
    "cond": with_cond,
    "clamped factor": lambda v, limit: v * torch.clamp(limit / v.norm(), max=1.0),
    "clamped divisor": lambda v, limit: v / torch.clamp(v.norm() / limit, min=1.0),
    "vector_norm": lambda v, limit: torch.where(
        torch.linalg.vector_norm(v) > limit, v / torch.linalg.vector_norm(v) * limit, v
    ),
}
CLIPPED_WRONG = {
    "the function itself": with_item,
    "left to Python": left_to_python,
    "always scaled": lambda v, limit: v * (limit / v.norm()),
    "never scaled": lambda v, limit: v,
    "scaled up, too": lambda v, limit: F.normalize(v, dim=0) * limit,
    "a norm for each column": lambda v, limit: torch.where(
        v.norm(dim=0) > limit, v * (limit / v.norm(dim=0)), v
    ),
    "a small number added": lambda v, limit: v * torch.clamp(limit / (v.norm() + 1e-6), max=1.0),
    "sum of absolutes": lambda v, limit: torch.where(
        v.norm(p=1) > limit, v * (limit / v.norm(p=1)), v
    ),
    "each element": lambda v, limit: v.clamp(-limit, limit),
    "in float32": lambda v, limit: clipped(v.float(), limit).to(v.dtype),
    "0 / 0": lambda v, limit: v / v.norm() * torch.clamp(v.norm(), max=limit),
    "in place": in_place,
    "squared": lambda v, limit: torch.where(v.norm() ** 2 > limit, v * (limit / v.norm()), v),
}


# prepare


def prepare(v):
    torch._dynamo.mark_dynamic(v, 1)
    return v


def marked(*dims, back=lambda v: v):
    def answer(v):
        for dim in dims:
            torch._dynamo.mark_dynamic(v, dim)
        return back(v)

    return answer


def on_a_copy(v):
    torch._dynamo.mark_dynamic(v.clone(), 1)
    return v


def padded(v):
    return F.pad(v, (0, 100 - v.shape[1]))


PREPARE_RIGHT = {
    "marked": prepare,
    "a list of dimensions": lambda v: (torch._dynamo.mark_dynamic(v, [1]), v)[1],
    "from 2 on": lambda v: (torch._dynamo.mark_dynamic(v, 1, min=2), v)[1],
    "the batch is static": lambda v: (torch._dynamo.mark_static(v, 0), prepare(v))[1],
}
PREPARE_WRONG = {
    "nothing marked": lambda v: v,
    "the batch": marked(0),
    "both": marked(0, 1),
    "from the back, which PyTorch ignores": marked(-1),
    "a copy marked": on_a_copy,
    "a copy returned": marked(1, back=lambda v: v.clone()),
    "nothing returned": marked(1, back=lambda v: None),
    "padded": padded,
    "static": lambda v: (torch._dynamo.mark_static(v, 1), v)[1],
}


# swap


def swap(graph, example_inputs):
    for node in graph.graph.nodes:
        if node.target in (torch.relu, F.relu, "relu"):
            node.op, node.target = "call_function", F.gelu
            node.args, node.kwargs = node.args[:1], {}
    graph.recompile()
    return graph.forward


def swapping(*targets, gelu=F.gelu, keep=False, method=False):
    def backend(graph, example_inputs):
        for node in graph.graph.nodes:
            if node.target in targets:
                node.target = gelu
                if not method:
                    node.op = "call_function"
                if not keep:
                    node.args, node.kwargs = node.args[:1], {}
        graph.recompile()
        return graph

    return backend


def with_new_nodes(graph, example_inputs):
    for node in list(graph.graph.nodes):
        if node.target in (torch.relu, torch.nn.functional.relu, "relu"):
            with graph.graph.inserting_after(node):
                new = graph.graph.call_function(torch.nn.functional.gelu, (node.args[0],))
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def only_the_first(graph, example_inputs):
    for node in graph.graph.nodes:
        if node.target in (torch.relu, F.relu, "relu"):
            node.op, node.target = "call_function", F.gelu
            node.args, node.kwargs = node.args[:1], {}
            break
    graph.recompile()
    return graph.forward


ALL = (torch.relu, F.relu, "relu")
SWAP_RIGHT = {
    "changed nodes": swap,
    "new nodes": with_new_nodes,
    "a module": swapping(*ALL),
    "another function, same values": swapping(*ALL, gelu=torch.ops.aten.gelu.default),
}
SWAP_WRONG = {
    "as it is": lambda graph, example_inputs: graph.forward,
    "functions only": swapping(torch.relu, F.relu),
    "no F": swapping(torch.relu, "relu"),
    "no torch": swapping(F.relu, "relu"),
    "inplace kept": swapping(*ALL, keep=True),
    "still a method": swapping(*ALL, method=True),
    "only the first": only_the_first,
    "by tanh": swapping(*ALL, gelu=lambda v: F.gelu(v, approximate="tanh")),
    "another function": swapping(*ALL, gelu=F.silu),
    "all silent": swapping(*ALL, F.silu),
    "nothing returned": lambda graph, example_inputs: None,
}

RIGHT = {
    "graphs": {"counted": GRAPHS, "floats": {k: float(v) for k, v in GRAPHS.items()}},
    "calls": CALLS_RIGHT,
    "clipped": CLIPPED_RIGHT,
    "prepare": PREPARE_RIGHT,
    "swap": SWAP_RIGHT,
}
WRONG = {
    "graphs": GRAPHS_WRONG,
    "calls": CALLS_WRONG,
    "clipped": CLIPPED_WRONG,
    "prepare": PREPARE_WRONG,
    "swap": SWAP_WRONG,
}


STUBS = {"graphs": dict.fromkeys("abcd", ...)}


def test_one_count_that_is_left_open(verdict):
    assert "not answered yet" in verdict("graphs", GRAPHS | {"c": ...})


@pytest.mark.parametrize("form", exercises.FORMS, ids=lambda form: form.__name__)
def test_the_reference_of_swap_against_relu_redefined(form, monkeypatch):
    """Another way to the same truth: the same functions, with GELU under the names of ReLU."""
    v = torch.linspace(-3, 3, 7)
    found = exercises._compiling_with(exercises._gelu_for_relu)(form, v)
    for owner, name in [(torch, "relu"), (F, "relu"), (torch.Tensor, "relu")]:
        monkeypatch.setattr(owner, name, lambda v, inplace=False: F.gelu(v))
    torch.testing.assert_close(found, form(v))


def test_clipping_against_pytorch():
    for v, limit in exercises._vectors():
        expected = v * min(1.0, limit / v.norm().item()) if v.numel() and v.any() else v
        torch.testing.assert_close(exercises._clip(v, limit), expected)


def test_the_chapter_shows_the_functions_that_are_counted():
    """They stand in the notebook, to be read, and in the reference: they must be the same."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if "exercise" in tags(cell)]
    (shown,) = [ast.parse(source) for source in sources if "compilation.graphs" in source]
    bodies = {f.name: f.body for f in shown.body if isinstance(f, ast.FunctionDef)}
    for name, function in exercises.FUNCTIONS.items():
        counted = ast.parse(inspect.getsource(function)).body[0]
        assert list(map(ast.dump, bodies[name])) == list(map(ast.dump, counted.body))


def tags(cell):
    return cell["metadata"].get("tags", [])


def test_prepare_may_not_change_its_tensor():
    count = exercises._counting(lambda v: v + 1)
    with pytest.raises(ValueError, match="prepare must return the tensor that it was given"):
        count((4, 7))
