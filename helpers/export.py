"""Chapter 17: an export that refuses the usual mistakes, parity, ONNX graphs as rows, latency."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from helpers import timing

# ---- exporting


def export_for_inference(
    model: nn.Module, example: tuple[Any, ...], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Return `torch.export.export(model, example, dynamic_shapes=…)`, or say what would be wrong.

    example: the positional inputs, every tensor of them with the samples along dimension 0.
    dynamic_shapes: as `torch.export` has it, a tuple with one entry for each input, or a dict with
    one for each name; each entry maps a dimension to a `Dim`. Raises ValueError for a model of
    which a part is in training mode (batch norm and dropout would be exported as they act in
    training), for a tensor whose first dimension is fixed in the exported program, whether because
    no `Dim` was given or because `Dim.AUTO` was given and the model fixed it, and for an example
    with fewer than 2 samples (`torch.export` takes 0 and 1 for constants).
    """
    training = [
        name if name else "the model itself" for name, m in model.named_modules() if m.training
    ]
    if training:
        shown = ", ".join(training[:3])
        raise ValueError(f"expected a model in evaluation mode, got training mode in: {shown}")
    shapes = [None] * len(example) if dynamic_shapes is None else dynamic_shapes
    entries = shapes.values() if isinstance(shapes, dict) else shapes
    for place, (value, dims) in enumerate(zip(example, entries, strict=True)):
        if isinstance(value, Tensor) and value.ndim > 0:
            _check_samples(place, value, dims)
    program = torch.export.export(model, example, dynamic_shapes=dynamic_shapes)
    _check_program(program)
    return program


def _check_samples(place: int, value: Tensor, dims: Any) -> None:
    """Raise ValueError when `value`, input number `place`, is asked to have a fixed batch size."""
    found = dict(enumerate(dims)) if isinstance(dims, (tuple, list)) else dims
    first = None if found is None else found.get(0)
    if first in (None, torch.export.Dim.STATIC) or isinstance(first, int):
        raise ValueError(_fixed(place, value.shape[0]))
    if value.shape[0] < 2:
        raise ValueError(
            f"input {place}: expected an example of at least 2 in the dynamic dimension 0, "
            f"got {value.shape[0]}"
        )


def _check_program(program: torch.export.ExportedProgram) -> None:
    """Raise ValueError when an input's first dimension is one number, and not a free symbol."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for place, name in enumerate(program.graph_signature.user_inputs):
        value = values.get(name) if isinstance(name, str) else None  # else a number
        if isinstance(value, Tensor) and value.ndim > 0 and is_concrete_int(value.shape[0]):
            raise ValueError(_fixed(place, value.shape[0]))


def _fixed(place: int, size: int) -> str:
    return (
        f"input {place}: expected a Dim for dimension 0, got none or one that the model fixes; "
        f"the program would take batches of {size} only"
    )


def refusal(model: nn.Module, example: tuple[Any, ...]) -> str:
    """Export, and return the type of the error and the first line of its message.

    `torch.export` also prints the graph that it has so far to stderr; this is dropped. Raises
    ValueError where the export succeeds.
    """
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            torch.export.export(model, example)
        except Exception as error:  # whatever the model or the export raises is the answer
            return f"{type(error).__name__}\n{str(error).splitlines()[0]}"
    raise ValueError("the export succeeded: expected a model that is refused")


# ---- parity: does the exported model compute the same?


@dataclass(frozen=True)
class Parity:
    """How far one output of a candidate is from the reference, on one set of inputs.

    max_abs: the largest difference of two elements. relative: for each sample (row of the first
    dimension) the length of the difference over the length of the reference's row; the largest.
    Both are `inf` where one side has a NaN or infinity and the other one has not.
    """

    output: int
    shape: tuple[int, ...]
    max_abs: float
    relative: float


def parity(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    inputs: Sequence[tuple[Tensor, ...]],
) -> list[Parity]:
    """Run both on each tuple of `inputs` and return a `Parity` for each output of each of them.

    Each side returns a tensor or a sequence of tensors. Differences are taken in float64. Raises
    ValueError when the two sides differ in the number of outputs, or in shape or dtype; the
    reference may have float64 where the candidate has fewer bits. An empty list of inputs is
    refused, too: it would show nothing.
    """
    if not inputs:
        raise ValueError("expected at least one tuple of inputs, got none")
    found = []
    for arguments in inputs:
        with torch.no_grad():
            want, got = _outputs(reference(*arguments)), _outputs(candidate(*arguments))
        if len(want) != len(got):
            raise ValueError(f"expected {len(want)} outputs, got {len(got)}")
        for number, (a, b) in enumerate(zip(want, got, strict=True)):
            found.append(_compare(number, a, b))
    return found


def _outputs(value: Any) -> list[Tensor]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]


def _compare(number: int, want: Tensor, got: Tensor) -> Parity:
    if want.shape != got.shape:
        raise ValueError(
            f"output {number}: expected shape {list(want.shape)}, got {list(got.shape)}"
        )
    if want.dtype not in (got.dtype, torch.float64):
        raise ValueError(f"output {number}: expected dtype {want.dtype}, got {got.dtype}")
    a, b = want.double(), got.double()
    same_kind = (a.isnan() == b.isnan()) & ((a.isinf() | b.isinf()) == (a == b) & a.isinf())
    if not same_kind.all():
        return Parity(number, tuple(want.shape), float("inf"), float("inf"))
    a, b = torch.where(a.isfinite(), a, 0.0), torch.where(b.isfinite(), b, 0.0)
    # [samples, numbers]; a vector has one number a sample, and a single number is a sample
    a, b = (t.flatten(1) if t.ndim > 1 else t.reshape(-1, 1) for t in (a, b))
    gaps, lengths = a - b, a.norm(dim=1)
    # a row of zeros that stays one is right; where it does not, the ratio is infinite
    ratios = torch.where((gaps == 0).all(1), 0.0, gaps.norm(dim=1) / lengths)
    return Parity(number, tuple(want.shape), _largest(gaps.abs()), _largest(ratios))


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


# ---- ONNX


def onnx_session(path: str | Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open an ONNX file in ONNX Runtime on the CPU, with as many threads as stated."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_call(session: onnxruntime.InferenceSession) -> Callable[..., list[Tensor]]:
    """Return a function from tensors, in the order of the graph's inputs, to the outputs."""
    names = [value.name for value in session.get_inputs()]

    def call(*tensors: Tensor) -> list[Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return call


@dataclass(frozen=True)
class GraphNode:
    """One operation of an ONNX graph.

    operator: its type, such as ``Conv``. inputs: names of the values it reads that other nodes or
    the caller compute. weights: name -> shape of the stored tensors it reads. outputs: name ->
    shape; a dynamic dimension has its name, an unknown one is ``?``.
    """

    operator: str
    inputs: tuple[str, ...]
    weights: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int | str, ...]]


def graph_nodes(model: onnx.ModelProto) -> list[GraphNode]:
    """Return the operations of the main graph in the order in which they are stored."""
    graph = model.graph
    stored = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    shapes = {value.name: tuple(_dimensions(value)) for value in (*graph.value_info, *graph.output)}
    rows = []
    for node in graph.node:
        given = [name for name in node.input if name]  # "" is an optional input left out
        rows.append(
            GraphNode(
                node.op_type,
                tuple(name for name in given if name not in stored),
                {name: stored[name] for name in given if name in stored},
                {name: shapes.get(name, ("?",)) for name in node.output if name},
            )
        )
    return rows


def _dimensions(value: onnx.ValueInfoProto) -> Iterator[int | str]:
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            yield dim.dim_value
        else:
            yield dim.dim_param if dim.dim_param else "?"


# ---- latency


@dataclass(frozen=True)
class Latency:
    """Of single calls, in ms: the median and the 99th percentile, each over several blocks.

    A block has its own p50 and p99; p20, median and p80 of these say how well they repeat.
    """

    p50: timing.Quantiles
    p99: timing.Quantiles


def latency(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    blocks: int = 5,
    calls_per_block: int = 200,
) -> dict[str, Latency]:
    """Time single calls of each of `calls` in turns, A, B, A, B, …, and return their percentiles.

    Raises ValueError for fewer than 100 calls in a block: one of a hundred decides the 99th
    percentile then.
    """
    if calls_per_block < 100:
        raise ValueError(f"p99 needs at least 100 calls in a block, got {calls_per_block}")
    p50: dict[str, list[float]] = {name: [] for name in calls}
    p99: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        # shortest_ms=0: one call a reading, because a mean of several calls has no slow ones
        taken = timing.readings(calls, device, calls_per_block, shortest_ms=0.0)
        for name, values in taken.items():
            p50[name].append(float(np.percentile(values, 50)))
            p99[name].append(float(np.percentile(values, 99)))
    return {
        name: Latency(timing.quantiles(p50[name]), timing.quantiles(p99[name])) for name in calls
    }
