"""Chapter 02: strides, broadcasting step by step, which operation copies, and timing one call."""

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from helpers import records


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Say whether both read one storage; `a.data_ptr()` alone misses views such as `a[1:]`."""
    pointer = a.untyped_storage().data_ptr()
    return pointer != 0 and pointer == b.untyped_storage().data_ptr()  # 0: nothing is stored


def element_offset(index: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Return where element `index` lies in the storage, counted in elements."""
    if len(index) != len(stride):
        raise ValueError(f"expected {len(stride)} indices, one for each stride, got {list(index)}")
    return offset + sum(i * s for i, s in zip(index, stride, strict=True))


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """Return the common shape, as `torch.broadcast_shapes`: align right, equal or 1 in each place.

    Raises ValueError naming the first place, from the right, where two sizes disagree.
    """
    result = []
    for place, sizes in enumerate(zip_longest(*map(reversed, shapes), fillvalue=1), 1):
        wanted = set(sizes) - {1}
        if len(wanted) > 1 or min(sizes) < 0:
            got = ", ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"dimension -{place}: expected equal sizes or 1, got {sizes} in {got}")
        result.append(wanted.pop() if wanted else 1)
    return torch.Size(reversed(result))


def wait_for(device: torch.device) -> None:
    """Block until all work queued on `device` is done; a CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_ms(call: Callable[[], object], device: torch.device, repeats: int = 15) -> list[float]:
    """Return [p20, p50, p80] in ms of one `call()`: warmed up, the device waited for.

    Short calls run back to back until a reading lasts 0.2 ms, so that the clock's step is small.
    """

    def reading(inner: int) -> float:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(inner):
            call()
        wait_for(device)
        return (time.perf_counter() - start) / inner * 1e3

    reading(3)  # warm-up
    inner = max(1, round(0.2 / max(reading(1), 1e-5)))
    return records.quantiles([reading(inner) for _ in range(repeats)])
