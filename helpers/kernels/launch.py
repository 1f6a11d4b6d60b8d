"""Chapter 13: what the kernel files share: operators, launching, block sizes, input checks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from helpers.kernels import INTERPRETED


def operator(name: str) -> Callable:
    """Register a function that allocates outputs and launches kernels as operator `book::name`.

    On a GPU it is a `triton_op`: `torch.compile` sees through it and fuses around the kernels.
    Interpreted, it is an opaque `custom_op`. Run on tensors without data, the same function
    tells both of them the outputs' shapes (https://docs.pytorch.org/docs/stable/library.html).
    """

    def register(function: Callable) -> Callable:
        if not INTERPRETED:
            return torch.library.triton_op(f"book::{name}", function, mutates_args=())
        made = torch.library.custom_op(f"book::{name}", function, mutates_args=())
        made.register_fake(function)
        return made

    return register


_noted: list[tuple[Any, tuple, dict]] | None = None


@contextmanager
def note_launches() -> Iterator[list[tuple[Any, tuple, dict]]]:
    """Collect (kernel, arguments, constants) of each launch in this block, and run none of them."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def launch(kernel: Any, grid: tuple | Callable, *args: Any, **constants: Any) -> None:
    """Run `kernel[grid](*args, **constants)`, visible to `torch.compile`; without data, nothing."""
    if _noted is not None:
        _noted.append((kernel, args, constants))
    elif not INTERPRETED:
        torch.library.wrap_triton(kernel)[grid](*args, **constants)
    elif not isinstance(args[0], FakeTensor):
        kernel[grid](*args, **constants)


def autotune(configs: list[triton.Config], key: list[str]) -> Callable:
    """`triton.autotune` on a GPU; interpreted, the first configuration, as there is no clock."""
    return triton.autotune(configs[:1] if INTERPRETED else configs, key=key)


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return what a kernel computes in: float64 for float64, else float32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def operand(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the inputs of `tl.dot`: their own, for the tensor cores.

    The interpreter multiplies bfloat16 wrongly (NumPy has none), so there they become float32.
    """
    if INTERPRETED and dtype is not torch.float64:
        return tl.float32
    names = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}
    return names.get(dtype, tl.float32)


def row_tile(columns: int, most: int) -> dict[str, int]:
    """Return ROWS, BLOCK and num_warps for a program that holds whole rows of `columns` elements.

    Narrow rows share a program, or it would load too little at a time; BLOCK is `most` at most.
    """
    block = min(triton.next_power_of_2(max(columns, 1)), most)
    rows = max(1, 1024 // block)
    warps = 32 if block > 16384 else min(max(rows * block // 512, 4), 16)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def programs(tiles: int, device: torch.device) -> int:
    """Return how many programs share `tiles` when each adds up a partial sum of its own."""
    if device.type != "cuda":
        return min(tiles, 4)
    return min(tiles, 2 * torch.cuda.get_device_properties(device).multi_processor_count)


def require(**tensors: Tensor) -> None:
    """Raise ValueError unless all are floating point, of one dtype, and on one device."""
    (name, first), *others = tensors.items()
    if not first.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {first.dtype}")
    if not INTERPRETED and not first.is_cuda:
        raise ValueError(f"{name}: expected a CUDA tensor, got one on {first.device}")
    for other, tensor in others:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{other} must match {name}: expected {first.dtype} on {first.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )


def require_vectors(x: Tensor, most: int, **vectors: Tensor) -> None:
    """Raise ValueError unless each vector is [D], D the last dimension of x, 1 <= D <= most."""
    for name, vector in vectors.items():
        if vector.shape != x.shape[-1:] or not 0 < len(vector) <= most:
            raise ValueError(
                f"{name}: expected [D] with D the last of x, {list(x.shape)}, "
                f"and 1 to {most}; got {list(vector.shape)}"
            )


def as_rows(x: Tensor) -> Tensor:
    """Return [..., D] as [R, D] whose rows lie in one piece, copied only when they do not."""
    if x.ndim == 0:
        raise ValueError("expected at least one dimension, got a scalar")
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
