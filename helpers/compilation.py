"""Chapter 12: graphs, graph breaks, recompiles and kernels counted; what a compile costs."""

import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

# A call in the code that Inductor wrote: a kernel of its own, or one of a library.
KERNEL = r"\b((?:cpp|triton)_\w*fused\w*|(?:extern_kernels|torch\.ops)\.[\w.]+?)(?:\.run)?\("
IDLE = ("empty", "_unsafe_view", "detach")  # operations without a kernel, besides the views


def cache_folder() -> str:
    """Return a folder for Inductor's cache that only this instruction set uses.

    For the variable TORCHINDUCTOR_CACHE_DIR. Inductor finds what it compiled before by the graph,
    its inputs and its options; the instructions of the processor are not among them. After
    ATEN_CPU_CAPABILITY has changed, or on a disk that two machines share, it would run code made
    for the other one: slower, with other last digits, or an illegal instruction.
    """
    # importing Inductor sets the variable where nobody has: to the folder that all share
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    suffix = f"_{torch.backends.cpu.get_cpu_capability().lower()}"
    return folder if folder.endswith(suffix) else folder + suffix


class _Launches(TorchDispatchMode):
    """Notes the name of each operation that launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not op.is_view and not op.__name__.startswith(IDLE):
            self.names.append(op.__name__.split(".")[0])
        kwargs = kwargs or {}
        return op(*args, **kwargs)


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


def kernel_names(call: Callable, *args: Any) -> list[str]:
    """Return the names of the kernels that the compiled `call(*args)` launches, in order."""
    names = []
    for code in generated(call, *args):
        start = code.index("def call(")  # the function that launches; what follows it tests it
        body = code[start:].split("\ndef ")[0]
        names += re.findall(KERNEL, body)
    return names


def breaks(function: Callable, *args: Any) -> tuple[int, list[str]]:
    """Return the number of graphs of one call, and the source lines at which one was cut off.

    A break that no operation precedes cuts nothing off; only ``fullgraph=True`` sees it.
    """
    torch.compiler.reset()
    report = torch._dynamo.explain(function)(*args)
    lines = [reason.user_stack[-1].line.strip() for reason in report.break_reasons]
    return report.graph_count, lines


def compiles(function: Callable, calls: Iterable[tuple], **options: Any) -> list[int]:
    """Return how many graphs are compiled so far after each of `calls`, tuples of arguments.

    options: of `torch.compile`, e.g. ``dynamic=False``. Nothing is lowered: counting is cheap.
    """
    torch.compiler.reset()
    counter = CompileCounter()
    counts = []
    compiled = torch.compile(function, backend=counter, **options)
    for args in calls:
        compiled(*args)
        counts.append(counter.frame_count)
    return counts


class _Recorder:
    """A backend of `torch.compile` that keeps each graph on its way and runs it as it is."""

    def __init__(self, partition: Callable) -> None:
        self.graphs: dict[str, GraphModule] = {}
        self.partition = partition

    def __call__(self, graph: GraphModule, inputs: list) -> Callable:
        """What `torch.compile` calls with Dynamo's graph."""
        self.graphs["dynamo"] = graph
        compile_with_backward = aot_autograd(
            fw_compiler=self.forward, bw_compiler=self.backward, partition_fn=self.split
        )
        return compile_with_backward(graph, inputs)

    def split(self, joint: GraphModule, inputs: list, **options: Any) -> tuple:
        for node in joint.graph.nodes:
            if node.target is torch.ops.aten.detach.default:  # an alias: it moves nothing
                node.replace_all_uses_with(node.args[0])
        joint.graph.eliminate_dead_code()
        self.graphs["joint"] = joint
        return self.partition(joint, inputs, **options)

    def forward(self, graph: GraphModule, inputs: list) -> Callable:
        self.graphs["forward"] = graph
        return make_boxed_func(graph.forward)  # AOTAutograd hands over its arguments in a list

    def backward(self, graph: GraphModule, inputs: list) -> Callable:
        self.graphs["backward"] = graph
        return make_boxed_func(graph.forward)


def graphs(
    function: Callable, *args: Any, partition: Callable = min_cut_rematerialization_partition
) -> dict[str, GraphModule]:
    """Return the graphs on the way of `function(*args)`, a scalar whose backward runs, too.

    Keys: dynamo (torch calls), joint (ATen, both directions), forward, backward.
    partition: how joint is cut in two; by default as Inductor does.
    """
    torch.compiler.reset()
    recorder = _Recorder(partition)
    torch.compile(function, backend=recorder, fullgraph=True)(*args).backward()
    return recorder.graphs


def break_even(compile_s: float, eager_ms: float, compiled_ms: float) -> float:
    """Return the number of calls from which compiling has paid, infinite when it never does."""
    times = compile_s, eager_ms, compiled_ms
    if min(times) < 0:
        raise ValueError(f"expected three times that are not negative, got {times}")
    gain_ms = eager_ms - compiled_ms
    return math.ceil(compile_s * 1e3 / gain_ms) if gain_ms > 0 else math.inf
