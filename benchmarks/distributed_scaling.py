"""Chapter 14: a step of DDP on what a machine without a GPU can show: processes, buckets, threads.

    processes  1, 2, 4 processes, with the same batch on each; a small one and a large one
    no_sync    2 processes that compute the same but exchange nothing
    threads    1 and 2 processes with 1, 2, 4 threads each
    buckets    2 processes, with buckets of several sizes

`bytes` are the gradients of the step, for `buckets` the size of a bucket. Settings take turns in
rounds, and what other programs have disturbed is measured again.
"""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import distributed, environment, timing
from helpers.page import records

REPEATS, WARM_UP, ROUNDS = 9, 3, 3
PATIENCE = 3600.0  # seconds, for one setting
PROCESSES = (1, 2, 4)
BATCHES = (32, 256)
BUCKETS = (0.25, 1, 5, 25)  # MiB
THREADS = (1, 2, 4)
LAYERS, WIDTH = 48, 256
UNITS = {"kind": "name", "ranks": "processes", "threads": "threads"}
UNITS |= {"batch": "samples", "bytes": "bytes", "ms": "ms"}


def ddp_steps(
    caps: tuple[float, ...], batch: int, threads: int, repeats: int, exchange: bool = True
) -> dict[float, list[float]]:
    """Run by every rank: the milliseconds of forward and backward, for each size of the buckets."""
    torch.set_num_threads(threads)
    with distributed.process_group("gloo", timeout=300):
        torch.manual_seed(0)
        x = torch.randn(batch, WIDTH)
        models = {}
        for cap in caps:
            layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
            models[cap] = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap)
        taken: dict[float, list[float]] = {cap: [] for cap in caps}
        for _ in range(WARM_UP + repeats):
            for cap, model in models.items():
                dist.barrier()
                start = time.perf_counter()
                with nullcontext() if exchange else model.no_sync():
                    model(x).square().mean().backward()
                taken[cap].append((time.perf_counter() - start) * 1e3)
        return {cap: ms[WARM_UP:] for cap, ms in taken.items()}


def step_rows() -> list[dict[str, Any]]:
    gradients = LAYERS * WIDTH * WIDTH * 4
    settings = [("processes", n, 1, batch) for n in PROCESSES for batch in BATCHES]
    settings += [("no_sync", 2, 1, batch) for batch in BATCHES]
    settings += [("threads", n, threads, 256) for n in (1, 2) for threads in THREADS]
    taken: dict[tuple, list[float]] = {setting: [] for setting in settings}
    for _ in range(ROUNDS):  # so that a slow moment hits all
        for setting in settings:
            kind, ranks, threads, batch = setting
            env = {"OMP_NUM_THREADS": str(threads)}
            arguments = ((25,), batch, threads, REPEATS, kind != "no_sync")
            found = undisturbed(ddp_steps, *arguments, ranks=ranks, env=env, timeout=600)
            taken[setting] += found[0][25]
    rows = [
        row(kind, ms, ranks=ranks, threads=threads, batch=batch, bytes=gradients)
        for (kind, ranks, threads, batch), ms in taken.items()
    ]
    by_cap: dict[float, list[float]] = {cap: [] for cap in BUCKETS}
    for _ in range(ROUNDS):
        found = undisturbed(ddp_steps, BUCKETS, 64, 1, REPEATS, timeout=600)[0]
        for cap, ms in found.items():
            by_cap[cap] += ms
    return rows + [
        row("buckets", ms, ranks=2, batch=64, bytes=int(cap * 2**20)) for cap, ms in by_cap.items()
    ]


def undisturbed(*arguments: Any, **options: Any) -> list[Any]:
    """Call `distributed.spawn` between two quiet moments; repeat what others have disturbed."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if is_quiet():
            found = distributed.spawn(*arguments, **options)
            if is_quiet():
                print(".", end="", flush=True)
                return found
    raise RuntimeError(f"the machine was not quiet once in {PATIENCE:g} s")


def is_quiet(seconds: float = 0.3) -> bool:
    """Whether the processors do next to nothing for so long (where that can be known)."""
    if not Path("/proc/stat").exists():
        return True
    before = _idle_seconds()
    time.sleep(seconds)
    return _idle_seconds() - before > 0.8 * seconds * os.sysconf("SC_NPROCESSORS_ONLN")


def _idle_seconds() -> float:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


def row(kind: str, ms: list[float], **known: Any) -> dict[str, Any]:
    full = {"kind": kind, "threads": 1, **known, "ms": timing.quantiles(ms)}
    print(full, flush=True)
    return {column: full[column] for column in UNITS}


def measure(device: torch.device) -> records.Record:
    if device.type != "cpu":
        raise RuntimeError(f"this measures processes on a CPU, not {device}: use --device cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = environment.versions(device) | {"cores": str(cores)}
    clock = "perf_counter of rank 0, all begin after a barrier"
    provenance = records.provenance(here, repeats=REPEATS * ROUNDS, clock=clock)
    return records.Record("distributed_scaling", provenance, UNITS, step_rows())
