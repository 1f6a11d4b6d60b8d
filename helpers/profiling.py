"""Chapter 11: time a call, read its profile as rows, and know how fast it could be."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from helpers import timing
from helpers.page import records

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each start and stop is noted on stderr


def time_ms(call: Callable[[], object], device: torch.device, seconds: float = 0.2) -> list[float]:
    """Return [p20, p50, p80] in ms of one `call()`, warmed up, by the clock that suits `device`.

    CUDA: events, the L2 cache flushed before each call. CPU: all threads PyTorch uses now.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return timing.quantiles(do_bench(call, rep=seconds * 1e3, return_mode="all"))
    if device.type != "cpu":
        return timing.time_ms(call, device)
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times = list(timer.blocked_autorange(min_run_time=seconds).times)
    times += [timer.timeit(1).mean for _ in range(3 - len(times))]  # a call longer than `seconds`
    return timing.quantiles([t * 1e3 for t in times])


def trace(call: Callable[[], object], steps: int = 1, **options: Any) -> profile:
    """Profile `steps` calls on the CPU and a GPU that is there; `options` go to the profiler."""
    cuda = torch.cuda.is_available()
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both[: 1 + cuda], **options) as prof:
        for _ in range(steps):
            call()
        if cuda:
            torch.cuda.synchronize()  # kernels still in the queue would be missing
    return prof


def rows(prof: profile, *, shapes: bool = False) -> list[dict[str, Any]]:
    """Return one dict an operation (and shape), the most time of its own first; times in µs."""
    table = [
        {"name": e.key, "calls": e.count, "self": e.self_cpu_time_total, "total": e.cpu_time_total}
        | {"device": e.self_device_time_total, "bytes": e.self_cpu_memory_usage}
        | {"shapes": e.input_shapes}
        for e in prof.key_averages(group_by_input_shape=shapes)
    ]
    return sorted(table, key=lambda row: -row["self"])


def stages(prof: profile) -> dict[str, dict[str, float]]:
    """Return for each named range, in order, its µs and the number of `aten` calls inside.

    A range within a range counts for the outer one. A `DataLoader` brings its own: ``data``.
    """
    found: dict[str, dict[str, float]] = {}
    for event in sorted(prof.events(), key=lambda e: e.time_range.start):
        outer, above = None, event
        while above:
            outer, above = (above if above.is_user_annotation else outer), above.cpu_parent
        if outer and event.device_type.name == "CPU":
            name = "data" if "DataLoader" in outer.name else outer.name
            stage = found.setdefault(name, {"us": 0.0, "calls": 0})
            stage["us"] += event.time_range.elapsed_us() * (event is outer)
            stage["calls"] += event.name.startswith("aten::")
    return found


def busy(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the share of the time in which some span runs, and the longest gap between them."""
    spans = sorted(spans)
    if not spans or spans[0][0] >= max(end for _, end in spans):
        raise ValueError(f"expected spans (start, end) that last, got {spans[:3]}")
    reached, work, gap = spans[0][0], 0.0, 0.0
    for start, end in spans:
        gap = max(gap, start - reached)
        work += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return work / (reached - spans[0][0]), gap


class _Traffic(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        out = func(*args, **(kwargs := kwargs or {}))
        if not func.is_view:  # a view moves nothing
            used = tree_leaves((args, {**kwargs, "out": None}, out))
            self.bytes += sum(t.nbytes for t in used if isinstance(t, Tensor))
        return out


def count(call: Callable[[], object]) -> tuple[int, int]:
    """Return exact (FLOPs, bytes) of `call()`, on any device, even ``meta``.

    FLOPs: of products, convolutions and attention; the rest counts 0. Bytes: in eager mode, each
    operation reads its operands and writes its result once.
    """
    with FlopCounterMode(display=False) as counter, _Traffic() as traffic:
        call()
    return counter.get_total_flops(), traffic.bytes


def on_gpu(kind: str) -> str | None:
    """Return by how much the rows of `kind` in a GPU's record exceed their partners, in words.

    Rows come in pairs: ``planted`` and cured, under the ``profiler`` and bare. None: no record.
    """
    record = records.on_gpu("profiling")
    if record is None:
        return None
    rows = [row for row in record.rows if row["kind"] == kind]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    ratios = [f"{a['name']} {a['time'][1] / b['time'][1]:.2f}×" for a, b in pairs]
    return f"{record.provenance['device']}: " + "; ".join(ratios)


@dataclass(frozen=True)
class Roofline:
    """The peaks of one device: `bandwidth` in bytes/s, `rate` in FLOP/s (Williams et al., 2009)."""

    bandwidth: float
    rate: float

    @classmethod
    def measure(cls, device: torch.device, n: int = 1024, mib: int = 256, **kind: Any) -> Any:
        """Measure an [n, n] product and, over `mib` MiB, the faster of copy and in-place sweep."""
        # a CPU reads the target of a copy before it writes it: more is moved than counted
        a, x = torch.rand(n, n, device=device).to(**kind), torch.ones(mib * 2**18, device=device)
        y = torch.zeros_like(x)
        calls = (lambda: y.copy_(x), lambda: x.neg_(), lambda: a @ a)
        copy, sweep, product = (time_ms(call, device)[0] for call in calls)
        return cls(2 * x.nbytes / min(copy, sweep) * 1e3, 2 * n**3 / product * 1e3)

    def bound(self, flops: float, bytes: float) -> tuple[str, float]:
        """Return the lower roof, ``memory`` or ``compute``, and the least seconds it allows."""
        moving, computing = bytes / self.bandwidth, flops / self.rate
        return ("memory", moving) if moving > computing else ("compute", computing)
