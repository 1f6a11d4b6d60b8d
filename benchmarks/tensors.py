"""Chapter 02: how long a matrix product takes, on the CPU and on an accelerator beside it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from helpers import environment, timing
from helpers.page import records

SIZES = (64, 128, 256, 512, 1024, 2048)
CPU = torch.device("cpu")


def measure(
    device: torch.device, sizes: Sequence[int] = SIZES, repeats: int = 15
) -> records.Record:
    """Time `x @ y`, float32 [n, n], for each n; with an accelerator, CPU and GPU in turn.

    *_first: the first product of this size in the process; the first row pays for set-up, too.
    cpu, gpu: p20/p50/p80 after warm-up, the device waited for. gpu_launch: the same, not waited
    for. gpu_copies: both operands copied there and the result copied back in each call.
    """
    units = {"n": "count", "cpu_first": "ms", "cpu": "ms"}
    if device.type != "cpu":
        units |= dict.fromkeys(["gpu_first", "gpu", "gpu_launch", "gpu_copies"], "ms")
    clock = "time.perf_counter on the host"
    provenance = records.provenance(environment.versions(device), repeats=repeats, clock=clock)
    provenance |= {"cpu": environment.device_name(CPU), "threads": str(torch.get_num_threads())}
    rows = []
    for n in sizes:
        x, y = torch.rand(n, n), torch.rand(n, n)
        row: dict[str, Any] = {"n": n, **_on_cpu(x, y, repeats)}
        if device.type != "cpu":
            row |= _on_accelerator(x, y, device, repeats)
        rows.append(row)
    return records.Record("tensors", provenance, units, rows)


def _on_cpu(x: Tensor, y: Tensor, repeats: int) -> dict[str, Any]:
    first = _first_ms(lambda: x @ y, CPU)
    return {"cpu_first": first, "cpu": timing.time_ms(lambda: x @ y, CPU, repeats)}


def _on_accelerator(x: Tensor, y: Tensor, device: torch.device, repeats: int) -> dict[str, Any]:
    def there_and_back() -> Tensor:
        return (x.to(device) @ y.to(device)).cpu()

    a, b = x.to(device), y.to(device)
    return {
        "gpu_first": _first_ms(lambda: a @ b, device),
        "gpu": timing.time_ms(lambda: a @ b, device, repeats, by_host=True),
        "gpu_launch": _launch_ms(lambda: a @ b, device, repeats),
        "gpu_copies": timing.time_ms(there_and_back, device, repeats, by_host=True),
    }


def _first_ms(call: Callable[[], object], device: torch.device) -> float:
    return float(f"{timing.host_ms(call, device):.4g}")


def _launch_ms(call: Callable[[], object], device: torch.device, repeats: int) -> timing.Quantiles:
    """Return the ms until `call` returns, its work still unfinished: the wrong clock."""
    readings = []
    for _ in range(repeats):
        timing.wait_for(device)  # an empty queue each time: a full one would hold up the launch
        readings.append(timing.host_ms(call, CPU))  # a CPU's clock: it waits for no device
    timing.wait_for(device)
    return timing.quantiles(readings)
