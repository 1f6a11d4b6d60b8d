"""Chapter 11: this device's roofs and what lies below, planted bottlenecks, the profiler's cost.

On a GPU also what `nvidia-smi` calls utilization while one tiny kernel after another runs.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from helpers import environment, profiling, timing
from helpers.page import records

SIZES = (16, 64, 256, 1024, 4096)
REPEATS = 15
UNITS = {"kind": "name", "name": "name", "n": "count", "flops": "count", "bytes": "B"}
UNITS |= {"time": "ms", "utilization": "%"}
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


def measure(device: torch.device, sizes: Sequence[int] = SIZES, mib: int = 256) -> records.Record:
    """Rows of five kinds; `time` is p20/p50/p80 of one call, `flops` and `bytes` are exact.

    peak: a copy, a sweep in place, the largest matrix product. op: on float32 [n, n].
    planted: a bottleneck and its cure, n calls each, in turn. profiler: a job under the profiler
    and bare, in turn, on the host's clock. utilization: of a GPU, by nvidia-smi.
    """
    clock = "CUDA events, L2 flushed" if device.type == "cuda" else "the host's clock"
    provenance = records.provenance(
        environment.versions(device), repeats=REPEATS, clock=f"{clock}, by helpers/timing.py"
    )
    rows = [*_peaks(device, max(sizes), mib), *_operations(device, sizes), *_planted(device)]
    rows += _profiler(device)
    if device.type == "cuda":
        rows.append(_utilization(device))
    return records.Record("profiling", provenance, UNITS, rows)


def _row(kind: str, name: str, took: timing.Quantiles, **values: Any) -> dict:
    empty = {"n": 1, "flops": 0, "bytes": 0, "utilization": None}
    return {"kind": kind, "name": name, **empty, **values, "time": took}


def _peaks(device: torch.device, n: int, mib: int) -> Iterator[dict]:
    x, a = torch.ones(mib * 2**18, device=device), torch.rand(n, n, device=device)
    y = torch.zeros_like(x)  # touched: a page that is new costs a fault
    for name, call in {"copy": lambda: y.copy_(x), "sweep": lambda: x.neg_()}.items():
        yield _row("peak", name, _time(call, device), n=mib, bytes=2 * x.nbytes)
    flops, moved = profiling.flops_and_bytes(lambda: a @ a)
    yield _row("peak", "matmul", _time(lambda: a @ a, device), n=n, flops=flops, bytes=moved)


def _time(call: Callable, device: torch.device) -> timing.Quantiles:
    return timing.time_ms(call, device, REPEATS)


def _operations(device: torch.device, sizes: Sequence[int]) -> Iterator[dict]:
    for n in sizes:
        x, y, z = torch.rand(3, n, n, device=device)  # into z: a fresh result costs page faults
        calls = {
            "add": (partial(torch.add, x, y, out=z), n * n),
            # maximum, subtract, exp, sum, divide
            "softmax": (partial(torch.softmax, x, 1, out=z), 5 * n * n),
            "matmul": (partial(torch.mm, x, y, out=z), 2 * n**3),
        }
        for name, (call, flops) in calls.items():
            moved = profiling.flops_and_bytes(call)[1]
            yield _row("op", name, _time(call, device), n=n, flops=flops, bytes=moved)


def _planted(device: torch.device, samples: int = 1024, steps: int = 16) -> Iterator[dict]:
    """The same work twice, slow and cured, in turn."""
    pairs = [_data(samples, steps), _fetches(steps, device), _optimizers(steps, device)]
    for calls in pairs:
        for name, took in timing.interleaved(calls, device, REPEATS).items():
            yield _row("planted", name, took, n=steps)


def _data(samples: int, steps: int) -> dict[str, Callable]:
    data = TensorDataset(torch.rand(samples, 784))
    rows = BatchSampler(range(samples), samples // steps, drop_last=False)
    one_by_one = DataLoader(data, batch_size=samples // steps)
    by_the_batch = DataLoader(data, batch_size=None, sampler=rows)
    return {
        "data, one by one": lambda: list(one_by_one),
        "data, by the batch": lambda: list(by_the_batch),
    }


def _fetches(steps: int, device: torch.device) -> dict[str, Callable]:
    x = torch.rand(256, 256, device=device)

    def each_step() -> float:
        total = 0.0
        for _ in range(steps):
            total += (x @ x).sum().item()  # waits for the product
        return total

    def once() -> float:
        total = torch.zeros((), device=device)
        for _ in range(steps):
            total += (x @ x).sum()
        return total.item()

    return {"item, each step": each_step, "item, once": once}


def _optimizers(layers: int, device: torch.device) -> dict[str, Callable]:
    calls = {}
    for name, kind in {"a loop": {"foreach": False}, "fused": {"fused": True}}.items():
        net = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(layers)))
        net(torch.rand(8, 64, device=device)).sum().backward()
        calls[f"AdamW, {name}"] = torch.optim.AdamW(net.parameters(), **kind).step
    return calls


def _profiler(device: torch.device) -> Iterator[dict]:
    tiny, block = torch.ones(8, device=device), torch.rand(512, 512, device=device)

    def additions() -> None:
        for _ in range(100):
            tiny.add(tiny)

    def product() -> None:
        block @ block

    jobs: list[tuple[str, Callable, dict]] = [
        ("100 tiny additions", additions, {}),
        ("the same with stacks", additions, {"with_stack": True}),
        ("product of 512", product, {}),
    ]
    for name, call, options in jobs:
        _profiled_ms(call, device, options)  # sets the profiler up
        profiled, bare = [], []
        for _ in range(REPEATS):
            profiled.append(_profiled_ms(call, device, options))
            bare.append(timing.host_ms(call, device, times=20))
        yield _row("profiler", f"{name}, profiled", timing.quantiles(profiled), n=20)
        yield _row("profiler", f"{name}, bare", timing.quantiles(bare), n=20)


def _profiled_ms(call: Callable, device: torch.device, options: dict) -> float:
    """Return the ms of one call under the profiler; what it does before and after is left out."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, **options):
        return timing.host_ms(call, device, times=20)


def _utilization(
    device: torch.device,
    query: Sequence[str] = NVIDIA_SMI,
    seconds: float = 2.0,
    n: int = 2**24,
) -> dict:
    """Ask nvidia-smi while additions sweep `n` floats without a pause: one FLOP for 8 bytes.

    NVML looks back over up to a second, so they begin `seconds` earlier, and they go on until
    nvidia-smi has ended: a queue filled beforehand would drain before it looks. Each addition is
    long enough that the next one is launched before it ends; with one element the GPU would wait
    for launches most of the time. The row's n: the additions launched while nvidia-smi ran.
    """
    x = torch.zeros(n, device=device)
    took = _time(lambda: x.add_(1), device)
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        x.add_(1)

    launched = 0
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as asked:
        while asked.poll() is None:
            for _ in range(100):
                x.add_(1)
            launched += 100
        answer, _ = asked.communicate()
    timing.wait_for(device)
    if asked.returncode:
        raise RuntimeError(f"{query[0]} ended with exit code {asked.returncode}")
    row = _row("utilization", "additions while nvidia-smi looks", took)
    row |= {"flops": x.numel(), "bytes": 2 * x.nbytes}
    return row | {"n": launched, "utilization": int(answer.split()[0])}
