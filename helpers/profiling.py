"""Chapter 11: read a profile as rows and a trace as slices, and know how fast a call could be."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from helpers import timing

# The profile


def trace(call: Callable[[], object], steps: int = 1, **options: Any) -> profile:
    """Profile `steps` calls on the CPU and a GPU that is there; `options` go to the profiler."""
    # Kineto, the library behind the profiler, notes each start and stop on stderr. It reads how
    # much to say when the first profiler of the process starts; 6 is above its gravest message.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    with profile(activities=activities, **options) as prof:
        for _ in range(steps):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels still in the queue would be missing
    return prof


def operations(prof: profile, *, by_shape: bool = False) -> list[dict[str, Any]]:
    """Return one dict an operation, the most time of its own first.

    Keys: name; calls; self, its own time, total, with what it called, device, on a GPU, all in µs;
    bytes it allocated; shapes of its arguments, one dict for each where `by_shape`.
    """
    table = []
    for event in prof.key_averages(group_by_input_shape=by_shape):
        row = {
            "name": event.key,
            "calls": event.count,
            "self": event.self_cpu_time_total,
            "total": event.cpu_time_total,
            "device": event.self_device_time_total,
            "bytes": event.self_cpu_memory_usage,
            "shapes": event.input_shapes,
        }
        table.append(row)
    return sorted(table, key=lambda row: -row["self"])


def by_range(prof: profile) -> dict[str, dict[str, float]]:
    """Return for each named range, in order, its µs and the number of `aten` calls inside.

    A range within a range counts for the outer one. A `DataLoader` brings its own: ``data``.
    """
    ranges: dict[str, dict[str, float]] = {}
    for event in sorted(prof.events(), key=lambda e: e.time_range.start):
        outer = _outermost_range(event)
        if outer is None or event.device_type.name != "CPU":
            continue
        name = "data" if "DataLoader" in outer.name else outer.name
        found = ranges.setdefault(name, {"us": 0.0, "calls": 0})
        if event is outer:  # its time holds that of all events inside
            found["us"] += event.time_range.elapsed_us()
        if event.name.startswith("aten::"):
            found["calls"] += 1
    return ranges


def _outermost_range(event: FunctionEvent) -> FunctionEvent | None:
    outermost = None
    while event is not None:
        if event.is_user_annotation:
            outermost = event
        event = event.cpu_parent
    return outermost


# The trace


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """Read a Chrome trace into slices: name, kind, start and end in µs, depth of nesting.

    kind: ``cpu_op``, ``user_annotation`` (a named range), ``kernel`` (on a GPU).
    """
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    events = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation", "kernel")]
    events.sort(key=lambda e: (e["ts"], -e["dur"]))  # of two that start together, the outer first

    slices = []
    open_ends: dict[Any, list[float]] = {}  # thread -> when each slice ends that is still open
    for event in events:
        start = event["ts"] - events[0]["ts"]
        end = start + event["dur"]
        above = [other for other in open_ends.get(event["tid"], []) if other > start]
        open_ends[event["tid"]] = [*above, end]
        one = {"name": event["name"], "kind": event["cat"], "start": start, "end": end}
        slices.append({**one, "depth": len(above)})
    return slices


def busy_share(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the share of the time in which some span runs, and the longest gap between them.

    spans: (start, end) in any order; they may overlap. The time is from the first start to the
    last end. Raises ValueError when that is no time at all.
    """
    spans = sorted(spans)
    if not spans or spans[0][0] >= max(end for _, end in spans):
        raise ValueError(f"expected spans (start, end) that last, got {spans[:3]}")
    first = reached = spans[0][0]  # reached: the latest end so far
    busy = longest_gap = 0.0
    for start, end in spans:
        longest_gap = max(longest_gap, start - reached)
        busy += max(0.0, end - max(start, reached))  # what ran before counts once
        reached = max(reached, end)
    return busy / (reached - first), longest_gap


# The roofline


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of the operands and results of all operations below it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view:  # a view moves nothing
            # `out=` is written, as `out` is already counted, and never read
            read = tree_leaves((args, {**kwargs, "out": None}))
            written = tree_leaves(out)
            self.bytes += sum(t.nbytes for t in [*read, *written] if isinstance(t, Tensor))
        return out


def flops_and_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Return exact (FLOPs, bytes) of `call()`, on any device, even ``meta``.

    FLOPs: of products, convolutions and attention; the rest counts 0. Bytes: in eager mode, each
    operation reads its operands and writes its result once.
    """
    with FlopCounterMode(display=False) as counter, _Traffic() as traffic:
        call()
    return counter.get_total_flops(), traffic.bytes


@dataclass(frozen=True)
class Roofline:
    """The peaks of one device: `bandwidth` in bytes/s, `peak_flops` in FLOP/s.

    Williams, Waterman and Patterson, 2009: https://doi.org/10.1145/1498765.1498785
    """

    bandwidth: float
    peak_flops: float

    @classmethod
    def measure(
        cls,
        device: torch.device,
        n: int = 1024,
        mib: int = 256,
        dtype: torch.dtype = torch.float32,
    ) -> "Roofline":
        """Measure an [n, n] product and, over `mib` MiB, the faster of copy and in-place sweep."""
        a = torch.rand(n, n, device=device).to(dtype)
        x = torch.ones(mib * 2**18, device=device)
        y = torch.zeros_like(x)

        # a CPU reads the target of a copy before it writes it: more is moved than counted
        copy = timing.time_ms(lambda: y.copy_(x), device)
        sweep = timing.time_ms(lambda: x.neg_(), device)
        product = timing.time_ms(lambda: a @ a, device)

        # the fastest fifth: a peak is what the device can do, not what it does on average
        moving_s = min(copy.p20, sweep.p20) / 1e3
        return cls(2 * x.nbytes / moving_s, 2 * n**3 / (product.p20 / 1e3))

    def bound(self, flops: float, bytes: float) -> tuple[str, float]:
        """Return the lower roof, ``memory`` or ``compute``, and the least seconds it allows."""
        moving, computing = bytes / self.bandwidth, flops / self.peak_flops
        return ("memory", moving) if moving > computing else ("compute", computing)
