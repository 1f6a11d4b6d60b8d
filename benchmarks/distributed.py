"""Chapter 14: ring and tree all-reduce from send and receive, beside the one of PyTorch's backend.

For 2 ranks on this machine and messages of 64 KiB to 64 MiB: milliseconds of each, in turns, and
within each turn how fast the ring is beside the backend's (1: as fast; 0.5: twice the time). The
network of two ranks on one machine is its memory: the times say little about a cluster, the ratio
says what the plain ring leaves out. `fitted` are the milliseconds of `collectives.ring_seconds`
with the latency and bandwidth that fit the ring's medians.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from helpers import collectives, distributed, environment, timing
from helpers.page import records

RANKS = 2
SIZES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes
REPEATS = 21
WARM_UP = 3


def turns(sizes: tuple[int, ...], repeats: int) -> dict[int, dict[str, list[float]]]:
    """Run by every rank: the milliseconds of each call, A, B, C, A, B, C, … for each size."""
    with distributed.process_group(timeout=300) as place:
        return {size: _turns(size, repeats, place.device) for size in sizes}


def _turns(size: int, repeats: int, device: torch.device) -> dict[str, list[float]]:
    tensor = torch.ones(size // 4, device=device)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "ring": collectives.ring_all_reduce,
        "tree": collectives.tree_all_reduce,
        "backend": dist.all_reduce,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + repeats):
        for name, way in ways.items():
            tensor.fill_(1)
            timing.wait_for(device)
            dist.barrier()  # all begin together
            start = time.perf_counter()
            way(tensor)
            timing.wait_for(device)
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: ms[WARM_UP:] for name, ms in taken.items()}


def row(size: int, ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """One line of the record. A turn lasts as long as its slowest rank."""
    slowest = {
        name: [max(ms) for ms in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]
    }
    ratios = [b / r for b, r in zip(slowest["backend"], slowest["ring"], strict=True)]
    times = {name: timing.quantiles(ms) for name, ms in slowest.items()}
    return {"bytes": size, **times, "ring_speed": timing.quantiles(ratios)}


UNITS = {
    "bytes": "bytes",
    "ring": "ms",
    "tree": "ms",
    "backend": "ms",
    "ring_speed": "ratio",
    "fitted": "ms",
}


def measure(device: torch.device) -> records.Record:
    ranks = RANKS if device.type == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        raise RuntimeError(f"an all-reduce needs two devices or more, {device} is one")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = environment.versions(device) | {"cores": str(cores), "ranks": str(ranks)}
    clock = "perf_counter of the slowest rank, all begin after a barrier"
    provenance = records.provenance(here, repeats=REPEATS, clock=clock)

    taken = distributed.spawn(turns, SIZES, REPEATS, ranks=ranks, timeout=1200)
    rows = [row(size, [rank[size] for rank in taken]) for size in SIZES]
    latency, bandwidth = collectives.fit_network(
        ranks, SIZES, [r["ring"].median / 1e3 for r in rows]
    )
    print(f"latency {latency * 1e6:.0f} µs, bandwidth {bandwidth / 1e9:.2f} GB/s", flush=True)
    for line in rows:
        seconds = collectives.ring_seconds(ranks, line["bytes"], latency, bandwidth)
        line["fitted"] = float(f"{seconds * 1e3:.4g}")
        print(line, flush=True)
    return records.Record("distributed", provenance, UNITS, rows)
