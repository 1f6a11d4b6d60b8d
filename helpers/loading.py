"""Chapter 05: DataLoader workers — datasets they can import, a model of the wait, copies ahead."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# Workers that are started by spawn or forkserver find a dataset's class by module and name, so the
# chapter's datasets stand here and not in its notebook.


class ListDataset(Dataset):
    """Map-style: sample i is `load(items[i])`. Both must pickle, so `load` is no lambda."""

    def __init__(self, items: Sequence[Any], load: Callable[[Any], Any]):
        self.items, self.load = items, load

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.load(self.items[i])


def sleep_for(seconds: float) -> float:
    """Wait, and return how long: a sample from a slow disk or network, the core left idle."""
    time.sleep(seconds)
    return seconds


def worker_and_process(_item: Any) -> tuple[int, int]:
    """Return the number of the worker that loads the sample (-1: none) and its process id."""
    info = get_worker_info()
    worker = -1 if info is None else info.id
    return worker, os.getpid()


class NumberStream(IterableDataset):
    """Iterable: 0 … n - 1. Each worker has a copy of it; `split` gives each its own share."""

    def __init__(self, n: int, *, split: bool = False):
        self.n, self.split = n, split

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if self.split and info is not None:
            return iter(range(info.id, self.n, info.num_workers))
        return iter(range(self.n))


class RandomNumbers(Dataset):
    """Sample i is one random integer, as an augmentation draws it; `source` says from where.

    "global": `np.random`. "own": `rng`, a generator made once, here; `environment.seed_worker`
    gives each worker another. "index": a new generator for each (epoch, i).
    """

    def __init__(self, n: int, source: str):
        if source not in ("global", "own", "index"):
            raise ValueError(f"expected source global, own or index, got {source!r}")
        self.n, self.source = n, source
        self.rng = np.random.default_rng(0)
        # shared memory: a plain attribute would not reach workers that persist
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        if self.source == "global":
            return int(np.random.randint(2**31))
        if self.source == "own":
            return int(self.rng.integers(2**31))
        return int(np.random.default_rng((int(self.epoch), i)).integers(2**31))


class Cost(NamedTuple):
    """What a batch costs, in seconds; all of it can be measured with at most one worker."""

    inline: float  # loading it in the main process
    load: float  # loading it in a worker, copying it to shared memory
    wait: float  # the part of `load` that leaves the core idle: a disk, a network
    handover: float  # taking a batch that lies ready out of the queue
    step: float
    step_cpu: float = 0.0  # the part of `step` that needs a core: 0 on an accelerator


def period(cost: Cost, workers: int, cores: float) -> float:
    """Predict the seconds from batch to batch; the stall is what the step leaves of them."""
    if workers < 0 or cores <= 0:
        raise ValueError(f"expected workers >= 0 and cores > 0, got {workers} and {cores}")
    if workers == 0:
        return cost.inline + cost.step
    by_main = cost.step + cost.handover
    by_workers = cost.load / workers
    busy = cost.load - cost.wait + cost.handover + cost.step_cpu  # what needs a core
    return max(by_main, by_workers, busy / cores)  # the slowest decides


def measure_epoch(
    loader: Iterable, step: Callable[[Any], object]
) -> tuple[list[float], list[float]]:
    """Run `step(batch)` over an epoch: the seconds waited for each batch, and each step's own.

    The first wait holds the start of the workers; the queues settle only after a while.
    """
    waits, steps = [], []
    before = time.perf_counter()
    for batch in loader:
        arrived = time.perf_counter()
        step(batch)
        after = time.perf_counter()
        waits.append(arrived - before)
        steps.append(after - arrived)
        before = after
    return waits, steps


class Span(NamedTuple):
    """One stretch of work on `batch`: where (`lane`), what (`kind`), from `start` to `end`."""

    lane: int
    batch: int
    start: float
    end: float
    kind: str  # load, step, copy, wait


MAIN = -1  # the lane of the main process; 0, 1, … are the workers


def simulate_workers(
    loads: Sequence[float], step: float, workers: int, prefetch: int = 2
) -> list[Span]:
    """Play the DataLoader's protocol with a core for each worker; return what happens when.

    loads: the time to load each batch. Batch b is the job of worker b % workers. At most
    prefetch * workers batches are on order or waiting; to take one is to order one more. Batches
    are taken in order. Without workers, loading and steps take turns in the main process.
    """
    spans: list[Span] = []
    taken: list[float] = []  # when the main process took each batch
    worker_free = [0.0] * workers
    main_free = 0.0
    ahead = prefetch * workers

    for b, load in enumerate(loads):
        if workers == 0:
            lane, start = MAIN, main_free
        else:
            lane = b % workers
            ordered = taken[b - ahead] if b >= ahead else 0.0
            start = max(ordered, worker_free[lane])
            worker_free[lane] = start + load
        ready = start + load
        taken.append(max(main_free, ready))
        main_free = taken[b] + step
        spans.append(Span(lane, b, start, ready, "load"))
        spans.append(Span(MAIN, b, taken[b], main_free, "step"))
    return spans


CPU, COPY_ENGINE, COMPUTE_ENGINE = 0, 1, 2  # lanes
WAYS_TO_COPY = ("pageable", "pinned", "non_blocking", "side stream")


def simulate_copies(way: str, prepare: float, copy: float, step: float, n: int = 4) -> list[Span]:
    """Say when the CPU, the GPU's copy engine and its compute engine are busy, for n batches.

    Work on one stream runs in order. Without `non_blocking` the CPU waits for its copy. From
    pageable memory a copy takes twice as long: through a buffer of the driver's.
    """
    if way not in WAYS_TO_COPY:
        raise ValueError(f"expected one of {WAYS_TO_COPY}, got {way!r}")
    cpu_waits = way in ("pageable", "pinned")
    if way == "pageable":
        copy = 2 * copy

    spans = []
    cpu_free = copied = computed = 0.0
    for b in range(n):
        prepared = cpu_free + prepare
        spans.append(Span(CPU, b, cpu_free, prepared, "load"))

        # on a stream of its own a copy follows the last copy, else the last step
        stream_free = copied if way == "side stream" else computed
        start = max(prepared, stream_free)
        copied = start + copy
        spans.append(Span(COPY_ENGINE, b, start, copied, "copy"))

        cpu_free = prepared
        if cpu_waits:
            spans.append(Span(CPU, b, prepared, copied, "wait"))
            cpu_free = copied

        start = max(copied, computed)
        computed = start + step
        spans.append(Span(COMPUTE_ENGINE, b, start, computed, "step"))
    return spans


class Prefetcher:
    """Yield a loader's batches on `device`, copying the next one while this one is used.

    CUDA: copies run on a stream of their own, and overlap if the loader has `pin_memory=True`.
    """

    def __init__(self, loader: Iterable[Sequence[Tensor]], device: torch.device):
        self.loader, self.device = loader, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[list[Tensor]]:
        batches = iter(self.loader)
        first = next(batches, None)
        if first is None:  # an empty loader
            return
        copying = self._start_copy(first)
        for batch in batches:
            # wait before the next copy is queued: afterwards this would wait for both
            ready = self._wait_for(copying)
            copying = self._start_copy(batch)
            yield ready
        yield self._wait_for(copying)

    def _start_copy(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Queue the copies of a batch; from pinned memory the call returns at once."""
        if self.stream is None:
            return [t.to(self.device) for t in batch]
        with torch.cuda.stream(self.stream):
            return [t.to(self.device, non_blocking=True) for t in batch]

    def _wait_for(self, batch: list[Tensor]) -> list[Tensor]:
        """Make the stream of the steps wait for the copies queued so far; the CPU goes on."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for t in batch:
                t.record_stream(current)  # else the allocator may reuse it while it is read
        return batch
