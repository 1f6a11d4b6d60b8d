"""Chapter 05: what workers buy, what starting them costs, and which copies overlap.

Three kinds of samples, in batches of 16:

    light    a tensor that lies in memory, turned into float32
    heavy    a 256 x 256 JPEG in memory: decode, random crop and resize, flip, color jitter
    remote   3 ms of waiting, as for a disk or a network, with the core idle

For each kind and 0 to 8 workers: images per second of the loader alone; the stall, the share of
time that training loses against steps that never wait, measured and predicted by
`loading.period`; the first batch of epoch 2 with fresh and with persistent workers. The step is
an accelerator's and keeps no core busy; in one kind more, `heavy + cpu`, it takes a core.

On a CUDA device something else is measured, since workers are a matter of the CPU: rows "copy: …"
time a step on batches that come from pageable memory, from pinned memory, with non_blocking, and
on a stream of their own (`loading.Prefetcher`).
"""

import copy
import io
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

from helpers import environment, loading, timing
from helpers.page import records

WORKERS = (0, 1, 2, 4, 8)
BATCH, REPEATS = 16, 4
STEP = 0.010  # seconds
COPY_BATCH = (128, 3, 224, 224)  # 77 MB of float32


def photo(seed: int = 0) -> bytes:
    """A smooth random image as the bytes of a JPEG file."""
    coarse = torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(seed))
    image = F.interpolate(coarse, (256, 256), mode="bicubic")[0].clamp(0, 1)
    file = io.BytesIO()
    to_pil_image(image).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(data: bytes) -> Image.Image:
    """What `ImageFolder` does with a file."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def kinds(n: int) -> dict[str, loading.ListDataset]:
    """The three datasets, of `n` samples each."""
    to_float = v2.ToDtype(torch.float32, scale=True)
    heavy = [
        decode,
        v2.PILToTensor(),
        v2.RandomResizedCrop(128, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.2, 0.2, 0.2),
        to_float,
    ]
    small = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    return {
        "light": loading.ListDataset([small] * n, to_float),
        "heavy": loading.ListDataset([photo()] * n, v2.Compose(heavy)),
        "remote": loading.ListDataset([0.003] * n, loading.sleep_for),
    }


def batches(workers: int) -> int:
    """How many batches an epoch has: the queues need half of them to settle."""
    return 16 + 20 * workers


def part(dataset: loading.ListDataset, n: int) -> loading.ListDataset:
    """The first `n` batches."""
    return loading.ListDataset(dataset.items[: n * BATCH], dataset.load)


def busy(seconds: float, _batch: Any = None) -> None:
    """A step on the CPU: arithmetic until this thread has had the core for so long."""
    end, x = time.thread_time() + seconds, torch.ones(64, 64)
    while time.thread_time() < end:
        x @ x


def idle(seconds: float, _batch: Any = None) -> None:
    """A step on an accelerator, as the CPU sees it: time passes, the core is free."""
    time.sleep(seconds)


def no_step(_batch: Any) -> None:
    """Take the batch and go on: the loader alone."""


def cost_of(dataset: loading.ListDataset, step: float, step_cpu: float) -> loading.Cost:
    """Measure what the prediction needs: in this process, and with one worker."""
    n = batches(1)
    inline, shares = [], []
    for _ in range(REPEATS):
        cpu_before = time.process_time()
        waits, _ = loading.measure_epoch(DataLoader(part(dataset, n), BATCH), no_step)
        inline.append(sum(waits) / n)
        shares.append((time.process_time() - cpu_before) / sum(waits))
    in_main = median(inline)
    idle_share = max(0.0, 1 - median(shares))
    load = median(steady(part(dataset, n), 1, no_step)[0] for _ in range(REPEATS))
    ready = loading.ListDataset([dataset[0]] * (n * BATCH), copy.copy)  # the same bytes, no work
    handover = median(steady(ready, 1, partial(idle, step))[1] for _ in range(REPEATS))
    return loading.Cost(in_main, load, in_main * idle_share, handover, step, step_cpu)


def steady(
    dataset: loading.ListDataset, workers: int, step: Callable[[Any], object]
) -> tuple[float, float]:
    """Return the seconds from batch to batch and those waited for one, in the second half."""
    loader = DataLoader(dataset, BATCH, num_workers=workers)
    waits, steps = loading.measure_epoch(loader, step)
    half = len(waits) // 2
    settled = waits[half:]
    return (sum(settled) + sum(steps[half:])) / len(settled), median(settled)


def second_epoch(dataset: loading.ListDataset, workers: int, *, kept: bool) -> float:
    """Return the milliseconds to the first batch of epoch 2."""
    few = part(dataset, 2 * max(1, workers))
    loader = DataLoader(few, BATCH, num_workers=workers, persistent_workers=kept and workers > 0)
    for _ in loader:
        pass
    waits, _ = loading.measure_epoch(loader, no_step)
    return waits[0] * 1e3


def row(
    name: str, dataset: loading.ListDataset, workers: int, cost: loading.Cost, cores: int
) -> dict[str, Any]:
    """One line of the sweep; quantiles over REPEATS epochs."""
    used = part(dataset, batches(workers))
    use = partial(busy if cost.step_cpu else idle, cost.step)
    alone = [BATCH / steady(used, workers, no_step)[0] for _ in range(REPEATS)]
    _, steps = loading.measure_epoch([None] * 20, use)
    bare = median(steps)  # the step, with nothing beside it
    stalls = [max(0.0, 1 - bare / steady(used, workers, use)[0]) for _ in range(REPEATS)]
    fresh, kept = (
        [second_epoch(dataset, workers, kept=kept) for _ in range(REPEATS)]
        for kept in (False, True)
    )
    return {
        "samples": name,
        "workers": workers,
        "images": timing.quantiles(alone),
        "stall": timing.quantiles(stalls),
        "predicted": round(1 - cost.step / loading.period(cost, workers, cores), 3),
        "epoch_2": timing.quantiles(fresh),
        "epoch_2_kept": timing.quantiles(kept),
    }


def to_device(
    batches: Iterable[Sequence[Tensor]], device: torch.device, *, non_blocking: bool
) -> Iterator[list[Tensor]]:
    """What a training loop does at the top of a step."""
    for batch in batches:
        yield [t.to(device, non_blocking=non_blocking) for t in batch]


def copies(
    device: torch.device, shape: Sequence[int] = COPY_BATCH, n: int = 24
) -> list[dict[str, Any]]:
    """Time a step on batches that are copied in four ways; the step is tuned to last as a copy.

    step: ms from one step to the next, the device waited for at the end. copy, compute: each
    alone. overlap: the share of the shorter one that is hidden behind the longer one.
    """
    pageable = [[torch.rand(*shape)] for _ in range(4)]
    pinned = [[t.pin_memory() for t in b] if device.type == "cuda" else b for b in pageable]
    x = torch.rand(2048, 2048, device=device) if device.type == "cuda" else torch.rand(64, 64)
    copy = _alone_ms(lambda: pinned[0][0].to(device, non_blocking=True), device)
    product = _alone_ms(lambda: x @ x, device)
    times = max(1, round(copy / product))

    def compute(_batch: Any = None) -> None:
        for _ in range(times):
            x @ x

    alone = _alone_ms(compute, device)
    ways = {
        "pageable": lambda: to_device(pageable * (n // 4), device, non_blocking=False),
        "pinned": lambda: to_device(pinned * (n // 4), device, non_blocking=False),
        "pinned, non_blocking": lambda: to_device(pinned * (n // 4), device, non_blocking=True),
        "pinned, side stream": lambda: loading.Prefetcher(pinned * (n // 4), device),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):  # the first is warm-up; in turn, so that all share bad moments
        for name, way in ways.items():
            found[name].append(per_step(way(), compute, device))

    rows = []
    for name, ms in found.items():
        step = timing.quantiles(ms[1:])
        times = {"step": step, "copy": copy, "compute": alone}
        rows.append(
            {"samples": f"copy: {name}"} | times | {"overlap": overlap(step[1], copy, alone)}
        )
    return rows


def _alone_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the ms of one call, by the clock that `per_step` reads: the two are compared."""
    return timing.time_ms(call, device, by_host=True).median


def per_step(batches: Iterable[Any], compute: Callable[[Any], None], device: torch.device) -> float:
    """Return the ms a step takes, over all batches; nothing in the loop waits for the device."""
    n = 0
    timing.wait_for(device)
    start = time.perf_counter()
    for batch in batches:
        compute(batch)
        n += 1
    timing.wait_for(device)
    return (time.perf_counter() - start) / n * 1e3


def overlap(step: float, copy: float, compute: float) -> float:
    """1: the shorter of copy and compute is hidden; 0: they follow each other."""
    hidden = (copy + compute - step) / min(copy, compute)
    return round(min(1.0, max(0.0, hidden)), 3)


UNITS = {
    "samples": "name",
    "workers": "count",
    "images": "1/s",
    "stall": "fraction",
    "predicted": "fraction",
    "epoch_2": "ms",
    "epoch_2_kept": "ms",
}
COPY_UNITS = {"samples": "name", "step": "ms", "copy": "ms", "compute": "ms", "overlap": "fraction"}


def measure(device: torch.device) -> records.Record:
    return measure_copies(device) if device.type == "cuda" else measure_workers(device)


def measure_copies(device: torch.device) -> records.Record:
    clock = "perf_counter, from one step to the next, the device waited for at the end"
    provenance = records.provenance(environment.versions(device), repeats=REPEATS, clock=clock)
    return records.Record("data", provenance, COPY_UNITS, copies(device))


def measure_workers(device: torch.device) -> records.Record:
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: the point
    torch.set_num_threads(1)  # as in a worker: the prediction starts from one process's time
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    clock = f"perf_counter, steady part of an epoch, batch {BATCH}, step {STEP * 1e3:g} ms"
    here = environment.versions(device) | {"cores": str(cores)}
    provenance = records.provenance(here, repeats=REPEATS, clock=clock)
    rows = []
    datasets = kinds(BATCH * batches(max(WORKERS)))
    cases = [(name, name, 0.0) for name in datasets] + [("heavy + cpu", "heavy", STEP)]
    for name, kind, step_cpu in cases:
        cost = cost_of(datasets[kind], STEP, step_cpu)
        print(name, {k: f"{1e3 * v:.3g} ms" for k, v in cost._asdict().items()}, flush=True)
        for workers in WORKERS:
            rows.append(row(name, datasets[kind], workers, cost, cores))
            print(rows[-1], flush=True)
    return records.Record("data", provenance, UNITS, rows)
