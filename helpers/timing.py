"""Every chapter: the only clock — wait for the device, read several times, compare in turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

SHORTEST_MS = 0.2  # a reading lasts at least this long, so that the clock's own step is small


class Quantiles(NamedTuple):
    """Of many readings: one fifth lies below `p20`, half below `median`, one fifth above `p80`.

        low, middle, high = time_ms(call, device)
        time_ms(call, device).median

    JSON has it as a list of three, and so does `print`; the names are in its `repr`.
    """

    p20: float
    median: float
    p80: float

    def __str__(self) -> str:
        return str(list(self))


def wait_for(device: torch.device) -> None:
    """Block until all work queued on `device` is done; a CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return p20, median and p80 of at least three values, to 4 significant digits.

    Between two values they are interpolated. Raises ValueError for fewer than three.
    """
    if len(values) < 3:
        raise ValueError(f"quantiles need at least 3 values, got {len(values)}")
    q = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p = torch.quantile(torch.tensor(values, dtype=torch.float64), q)
    return Quantiles(*(float(f"{v:.4g}") for v in p))


def host_ms(call: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the ms of one `call()` by the host's clock, over `times` of them back to back.

    One reading, and no warm-up: the right clock for a first call, which sets things up, and for
    what the host itself does. Everything else is for `time_ms`.
    """
    wait_for(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / times * 1e3


def time_ms(
    call: Callable[[], object], device: torch.device, repeats: int = 15, *, by_host: bool = False
) -> Quantiles:
    """Return p20, median and p80 in ms of one `call()`: warmed up, the device waited for.

    CUDA: events on the device, the L2 cache flushed before each call. Elsewhere, and `by_host`:
    the host's clock; short calls run back to back until a reading lasts 0.2 ms.
    """
    return interleaved({"call": call}, device, repeats, by_host=by_host)["call"]


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int = 15,
    *,
    by_host: bool = False,
) -> dict[str, Quantiles]:
    """Return p20, median and p80 in ms for each of `calls`, read in turns: A, B, A, B, …

    A machine that becomes slower or faster meanwhile does so for all of them alike.
    """
    taken = readings(calls, device, repeats, by_host=by_host)
    return {name: quantiles(values) for name, values in taken.items()}


def readings(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int = 15,
    *,
    by_host: bool = False,
    shortest_ms: float = SHORTEST_MS,
) -> dict[str, list[float]]:
    """Return the `repeats` readings in ms behind `interleaved`, for ratios within each turn.

    by_host: the host's clock on CUDA, too: for what is compared with a time on the host, such as
    the same call on the CPU, and for launches that follow each other, as they do in a program.
    """
    take = {}
    for name, call in calls.items():
        if device.type == "cuda" and not by_host:
            take[name] = _cuda_reader(call)
        else:
            take[name] = _host_reader(call, device, shortest_ms)

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in calls:
            taken[name].append(take[name]())
    return taken


def _host_reader(
    call: Callable[[], object], device: torch.device, shortest_ms: float
) -> Callable[[], float]:
    """Warm `call` up, choose how often it runs in one reading, and return what takes a reading."""
    for _ in range(3):
        call()  # warm-up: first calls allocate, choose kernels, fill caches

    # the least of three, or one interruption would make every later reading a short one
    once = min(host_ms(call, device) for _ in range(3))
    times = max(1, round(shortest_ms / max(once, 1e-5)))
    return lambda: host_ms(call, device, times)


def _cuda_reader(call: Callable[[], object]) -> Callable[[], float]:
    """Return what takes one reading with CUDA events; Triton's `do_bench` flushes the L2 cache."""
    from triton.testing import do_bench  # only here: a machine without CUDA may have no Triton

    call()
    return lambda: do_bench(call, warmup=1, rep=1, return_mode="median")
