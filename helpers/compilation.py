"""Chapter 12: graphs, graph breaks, recompiles and kernels counted; what a compile costs."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.page import records

# A call in the code that Inductor wrote: a kernel of its own, or one of a library.
KERNEL = r"\b((?:cpp|triton)_\w*fused\w*|(?:extern_kernels|torch\.ops)\.[\w.]+?)(?:\.run)?\("
IDLE = ("empty", "_unsafe_view", "detach")  # operations without a kernel, besides the views


class _Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not op.is_view and not op.__name__.startswith(IDLE):
            self.names.append(op.__name__.split(".")[0])
        return op(*args, **(kwargs or {}))


def launches(call: Callable, *args: Any) -> list[str]:
    """Return the ATen operations that `call(*args)` runs in eager mode, views left out.

    Each is a kernel or more: inputs are read from memory, the result is written there.
    """
    with _Launches() as mode:
        call(*args)
    return mode.names


def generated(call: Callable, *args: Any) -> list[str]:
    """Return the modules that Inductor writes while `call(*args)` compiles, backward included.

    What was compiled before is forgotten first: a cached frame would write nothing.
    """
    torch.compiler.reset()
    return run_and_get_code(call, *args)[1]


def kernels(call: Callable, *args: Any) -> list[str]:
    """Return the names of the kernels that the compiled `call(*args)` launches, in order."""
    modules = [code[code.index("def call(") :] for code in generated(call, *args)]
    return [name for body in modules for name in re.findall(KERNEL, body.split("\ndef ")[0])]


def breaks(function: Callable, *args: Any) -> tuple[int, list[str]]:
    """Return the number of graphs of one call, and the source lines at which one was cut off.

    A break that no operation precedes cuts nothing off; only ``fullgraph=True`` sees it.
    """
    torch.compiler.reset()
    report = torch._dynamo.explain(function)(*args)
    return report.graph_count, [r.user_stack[-1].line.strip() for r in report.break_reasons]


def compiles(function: Callable, calls: Iterable[tuple], **options: Any) -> list[int]:
    """Return how many graphs are compiled so far after each of `calls`, tuples of arguments.

    options: of `torch.compile`, e.g. ``dynamic=False``. Nothing is lowered: counting is cheap.
    """
    torch.compiler.reset()
    counter, counts = CompileCounter(), []
    compiled = torch.compile(function, backend=counter, **options)
    for args in calls:
        compiled(*args)
        counts.append(counter.frame_count)
    return counts


def stages(
    function: Callable, *args: Any, partition: Callable = min_cut_rematerialization_partition
) -> dict[str, GraphModule]:
    """Return the graphs on the way of `function(*args)`, a scalar whose backward runs, too.

    Keys: dynamo (torch calls), joint (ATen, both directions), forward, backward.
    partition: how joint is cut in two; by default as Inductor does.
    """
    torch.compiler.reset()
    graphs: dict[str, GraphModule] = {}

    def keep(name: str, graph: GraphModule) -> Callable:
        graphs[name] = graph
        return make_boxed_func(graph.forward)

    def split(joint: GraphModule, inputs: list, **options: Any) -> tuple:
        for node in joint.graph.nodes:
            if node.target is torch.ops.aten.detach.default:  # an alias: it moves nothing
                node.replace_all_uses_with(node.args[0])
        joint.graph.eliminate_dead_code()
        keep("joint", joint)
        return partition(joint, inputs, **options)

    def backend(graph: GraphModule, inputs: list) -> Callable:
        keep("dynamo", graph)
        names = {"fw_compiler": "forward", "bw_compiler": "backward"}
        lower = {key: lambda g, _, name=name: keep(name, g) for key, name in names.items()}
        return aot_autograd(**lower, partition_fn=split)(graph, inputs)

    torch.compile(function, backend=backend, fullgraph=True)(*args).backward()
    return graphs


def on_gpu(column: str) -> str | None:
    """Return the range of `column` over a GPU's record, mode by mode, in words; None: no record."""
    record = records.on_gpu("compilation")
    if record is None:
        return None
    found: dict[str, list[float]] = {}
    for row in record.rows:
        value = row[column]
        found.setdefault(row["mode"], []).append(value[1] if isinstance(value, list) else value)
    ranges = [f"{mode} {min(some):.3g}–{max(some):.3g}" for mode, some in found.items()]
    return f"{record.provenance['device']}: " + ", ".join(ranges)


def break_even(compile_s: float, eager_ms: float, compiled_ms: float) -> float:
    """Return the number of calls from which compiling has paid, infinite when it never does."""
    times = compile_s, eager_ms, compiled_ms
    if min(times) < 0:
        raise ValueError(f"expected three times that are not negative, got {times}")
    gain = eager_ms - compiled_ms
    return math.ceil(compile_s * 1e3 / gain) if gain > 0 else math.inf
