"""Chapter 05: DataLoader workers — datasets they can import, a model of the wait, copies ahead."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Items(Dataset):
    """Map-style: sample i is `load(items[i])`. Both must pickle, so no lambda."""

    def __init__(self, items: Sequence[Any], load: Callable[[Any], Any]):
        self.items, self.load = items, load

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.load(self.items[i])


def nap(seconds: float) -> float:
    """Wait, and return how long: a sample from a slow disk or network, the core left idle."""
    time.sleep(seconds)
    return seconds


def who(_item: Any) -> tuple[int, int]:
    """Return the number of the worker that loads the sample (-1: none) and its process id."""
    info = get_worker_info()
    return (info.id if info else -1), os.getpid()


class Numbers(IterableDataset):
    """Iterable: 0 … n - 1. Each worker has a copy of it; `split` gives each its own share."""

    def __init__(self, n: int, *, split: bool = False):
        self.n, self.split = n, split

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.split else None
        return iter(range(info.id, self.n, info.num_workers) if info else range(self.n))


class Draws(Dataset):
    """Sample i is one random integer, as an augmentation draws it; `source` says from where.

    "global": `np.random`. "own": a generator made once, here. "index": one for each (epoch, i).
    """

    def __init__(self, n: int, source: str):
        if source not in ("global", "own", "index"):
            raise ValueError(f"expected source global, own or index, got {source!r}")
        self.n, self.source, self.epoch = n, source, torch.zeros((), dtype=torch.int64)
        self.own = np.random.default_rng(0)
        self.epoch.share_memory_()  # a plain attribute would not reach workers that persist

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        if self.source == "global":
            return int(np.random.randint(2**31))
        rng = self.own if self.source == "own" else np.random.default_rng((int(self.epoch), i))
        return int(rng.integers(2**31))


def reseed_own(_worker_id: int) -> None:
    """`worker_init_fn`: give this worker's copy of the dataset a generator of its own."""
    info = get_worker_info()
    info.dataset.own = np.random.default_rng(info.seed)


class Cost(NamedTuple):
    """What a batch costs, in seconds; all of it can be measured with at most one worker."""

    inline: float  # loading it in the main process
    load: float  # loading it in a worker, copying it to shared memory
    wait: float  # the part of `load` that leaves the core idle: a disk, a network
    take: float  # taking a batch that lies ready out of the queue
    step: float
    step_cpu: float = 0.0  # the part of `step` that needs a core: 0 on an accelerator


def period(cost: Cost, workers: int, cores: float) -> float:
    """Predict the seconds from batch to batch; the stall is what the step leaves of them."""
    if workers < 0 or cores <= 0:
        raise ValueError(f"expected workers >= 0 and cores > 0, got {workers} and {cores}")
    if workers == 0:
        return cost.inline + cost.step
    busy = cost.load - cost.wait + cost.take + cost.step_cpu  # what needs a core
    return max(cost.step + cost.take, cost.load / workers, busy / cores)  # the slowest decides


def timed(loader: Iterable, step: Callable[[Any], object]) -> tuple[list[float], float]:
    """Run an epoch of `step(batch)`: seconds waited for each batch (1st: start-up), and in all."""
    waits, begin = [], time.perf_counter()
    before = begin
    for batch in loader:
        waits.append(time.perf_counter() - before)
        step(batch)
        before = time.perf_counter()
    return waits, before - begin


class Prefetcher:
    """Yield a loader's batches on `device`, copying the next one while this one is used.

    CUDA: copies run on a stream of their own, and overlap if the loader has `pin_memory=True`.
    """

    def __init__(self, loader: Iterable[Sequence[Tensor]], device: torch.device):
        self.loader, self.device = loader, device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[list[Tensor]]:
        ahead: list[Tensor] = []
        for batch in chain(self.loader, [()]):  # one round more: to hand out the last batch
            ready = ahead
            if ready and self.side is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self.side)  # for this batch: the next is not queued yet
                for t in ready:
                    t.record_stream(current)  # else the allocator may reuse it while it is read
            with torch.cuda.stream(self.side):  # None: no stream, nothing changes
                ahead = [t.to(self.device, non_blocking=True) for t in batch]
            if ready:
                yield ready
