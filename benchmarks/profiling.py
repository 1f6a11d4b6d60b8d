"""Chapter 11: this device's roofs and what lies below, planted bottlenecks, the profiler's cost.

On a GPU also what `nvidia-smi` calls utilization while one tiny kernel after another runs.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from helpers import environment, profiling, timing
from helpers.page import records

SIZES = (16, 64, 256, 1024, 4096)
UNITS = {"kind": "name", "name": "name", "n": "count", "flops": "count", "bytes": "B"}
UNITS |= {"time": "ms", "utilization": "%"}


def measure(device: torch.device, sizes: Sequence[int] = SIZES, mib: int = 256) -> records.Record:
    """Rows of five kinds; `time` is p20/p50/p80 of one call, `flops` and `bytes` are exact.

    peak: a copy, a sweep in place, the largest matrix product. op: on float32 [n, n].
    planted: a bottleneck and its cure, n calls each. profiler: a job under the profiler, then
    bare, in turn, on the host's clock. utilization: of a GPU, by nvidia-smi.
    """
    clock = "CUDA events, L2 flushed" if device.type == "cuda" else "torch.utils.benchmark.Timer"
    provenance = records.provenance(
        environment.versions(device), repeats=3, clock=f"{clock}, at least 3 readings"
    )
    rows = [*_peaks(device, max(sizes), mib), *_operations(device, sizes), *_planted(device)]
    rows += _profiler(device)
    if device.type == "cuda":
        rows.append(_utilization(device))
    return records.Record("profiling", provenance, UNITS, rows)


def _row(kind: str, name: str, call: Callable, device: torch.device, **values: Any) -> dict:
    empty = {"n": 1, "flops": 0, "bytes": 0, "utilization": None}
    time = profiling.time_ms(call, device)
    return {"kind": kind, "name": name, **empty, **values, "time": time}


def _peaks(device: torch.device, n: int, mib: int) -> Iterator[dict]:
    x, a = torch.ones(mib * 2**18, device=device), torch.rand(n, n, device=device)
    y = torch.zeros_like(x)  # touched: a page that is new costs a fault
    for name, call in {"copy": lambda: y.copy_(x), "sweep": lambda: x.neg_()}.items():
        yield _row("peak", name, call, device, n=mib, bytes=2 * x.nbytes)
    flops, moved = profiling.count(lambda: a @ a)
    yield _row("peak", "matmul", lambda: a @ a, device, n=n, flops=flops, bytes=moved)


def _operations(device: torch.device, sizes: Sequence[int]) -> Iterator[dict]:
    for n in sizes:
        x, y, z = torch.rand(3, n, n, device=device)  # into z: a fresh result costs page faults
        calls = {
            "add": (partial(torch.add, x, y, out=z), n * n),
            "softmax": (
                partial(torch.softmax, x, 1, out=z),
                5 * n * n,
            ),  # max, subtract, exp, sum, divide
            "matmul": (partial(torch.mm, x, y, out=z), 2 * n**3),
        }
        for name, (call, flops) in calls.items():
            moved = profiling.count(call)[1]
            yield _row("op", name, call, device, n=n, flops=flops, bytes=moved)


def _planted(device: torch.device, samples: int = 1024, steps: int = 16) -> Iterator[dict]:
    """The same work twice, first slow, then cured."""
    data = TensorDataset(torch.rand(samples, 784))
    rows = BatchSampler(range(samples), samples // steps, drop_last=False)
    loaders = {
        "data, one by one": DataLoader(data, batch_size=samples // steps),
        "data, by the batch": DataLoader(data, batch_size=None, sampler=rows),
    }
    for name, loader in loaders.items():
        yield _row("planted", name, lambda loader=loader: [b for b in loader], device, n=steps)
    x, ones = torch.rand(256, 256, device=device), torch.ones((), device=device)

    def sums(read: Callable[[Tensor], Any]) -> float:
        total = sum(read((x @ x).sum() * ones) for _ in range(steps))
        return float(total)

    for name, read in {"item, each step": Tensor.item, "item, once": lambda t: t}.items():
        yield _row("planted", name, lambda read=read: sums(read), device, n=steps)
    for name, kind in {
        "AdamW, a loop": {"foreach": False},
        "AdamW, fused": {"fused": True},
    }.items():
        layers = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(steps)))
        layers(torch.rand(8, 64, device=device)).sum().backward()
        step = torch.optim.AdamW(layers.parameters(), **kind).step
        yield _row("planted", name, step, device, n=len(list(layers.parameters())))


def _profiler(device: torch.device, repeats: int = 15) -> Iterator[dict]:
    tiny, block = torch.ones(8, device=device), torch.rand(512, 512, device=device)
    adds, product = lambda: [tiny.add(tiny) for _ in range(100)], lambda: block @ block
    jobs: dict[str, tuple[Callable, dict]] = {
        "100 tiny additions": (adds, {}),
        "the same with stacks": (adds, {"with_stack": True}),
        "product of 512": (product, {}),
    }
    for name, (call, options) in jobs.items():
        pairs = [
            (_clock(call, device, options), _clock(call, device, None)) for _ in range(repeats + 1)
        ]  # the first one sets the profiler up
        for how, times in zip(("profiled", "bare"), zip(*pairs[1:], strict=True), strict=True):
            row = {"kind": "profiler", "name": f"{name}, {how}", "n": 20, "flops": 0, "bytes": 0}
            yield row | {"time": timing.quantiles(list(times)), "utilization": None}


def _clock(call: Callable, device: torch.device, options: dict | None, calls: int = 20) -> float:
    """Return the ms of one call; under the profiler unless `options` is None."""
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (device.type == "cuda")]
    bare = options is None
    with contextlib.nullcontext() if bare else profile(activities=kinds, **options):
        timing.wait_for(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        timing.wait_for(device)
        return (time.perf_counter() - start) / calls * 1e3


def _utilization(device: torch.device, calls: int = 300_000) -> dict:
    """Ask nvidia-smi while a queue of one-element additions drains: one FLOP each."""
    x = torch.zeros(1, device=device)
    row = _row("utilization", "x.add_(1), one element", lambda: x.add_(1), device, flops=1, bytes=8)
    for _ in range(calls):
        x.add_(1)
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    timing.wait_for(device)
    return row | {"utilization": int(answer.split()[0])}
