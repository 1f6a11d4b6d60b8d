"""Chapter 13: what the kernel files share: operators, launching, block sizes, input checks.

Names in the kernels, and those of Triton's tutorials and of the FlashAttention papers:

    at, row, col, t, s     offs, offs_m, offs_n          offsets of a tile's elements
    inside                 mask                          what lies within the tensor
    top                    m_i                           maximum so far
    total                  l_i                           sum of exponentials so far
    lse                    L, or m + log l               log of the sum of exponentials
    BT, BS, BM, BN, BK     BLOCK_M, BLOCK_N, BLOCK_K     sides of a tile

Numbers such as p, eps and scale are `tl.constexpr`: compiled into the kernel, at the price of one
compilation for each value (a model has one or two). As arguments they would be float32 in eager
mode but float64 inside torch.compile, and a float64 would promote all it meets, silently.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from helpers.kernels import INTERPRETED

HALF = (torch.float16, torch.bfloat16)


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
    elif has_data(args[0]):
        kernel[grid](*args, **constants)


def has_data(tensor: Tensor) -> bool:
    """Return False for the stand-ins that tell `torch.compile` and `opcheck` the shapes alone."""
    return not isinstance(tensor, FakeTensor)


def autotune(configs: list[triton.Config], key: list[str], tiles: dict[str, str]) -> Callable:
    """`triton.autotune` on a GPU; interpreted, the first configuration, as there is no clock.

    tiles: side of a tile -> the argument that it divides. Each configuration takes a second to
    compile, so those whose tiles are larger than the matrix are not tried.
    """
    if INTERPRETED:
        return triton.autotune(configs[:1], key=key)

    def prune(configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list:
        return fitting(configs, {tile: arguments[name] for tile, name in tiles.items()})

    return triton.autotune(configs, key=key, prune_configs_by={"early_config_prune": prune})


def fitting(configs: list[triton.Config], sizes: dict[str, int]) -> list[triton.Config]:
    """Return the configurations whose tiles are at most `sizes`, rounded up to a power of 2.

    The first one, the smallest, where none fits.
    """
    most = {tile: triton.next_power_of_2(size) for tile, size in sizes.items()}
    kept = [c for c in configs if all(c.kwargs[tile] <= most[tile] for tile in most)]
    return kept or configs[:1]


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return what a kernel computes in: float64 for float64, else float32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


# The interpreter multiplies bfloat16 wrongly (NumPy has none), so there they become float32.
OPERANDS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def operand(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the inputs of `tl.dot`: their own, for the tensor cores."""
    return OPERANDS[dtype]


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to autocast's dtype inside `torch.autocast`, as it does for PyTorch's own products.

    float64 is left alone, as there.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    to = torch.get_autocast_dtype(kind)
    return [t.to(to) if t.dtype in (*HALF, torch.float32) else t for t in tensors]


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
    if first.dtype not in OPERANDS:
        raise ValueError(
            f"{name}: expected float16, bfloat16, float32 or float64, got {first.dtype}"
        )
    if not INTERPRETED and not first.is_cuda:
        raise ValueError(f"{name}: expected a CUDA tensor, got one on {first.device}")
    for other, tensor in others:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{other} must match {name}: expected {first.dtype} on {first.device}, "
                f"got {tensor.dtype} on {tensor.device}; convert one of them, or use torch.autocast"
            )


def require_vectors(x: Tensor, most: int | None = None, **vectors: Tensor | None) -> None:
    """Raise ValueError unless each vector is None or [D], D the last of x, 1 <= D <= most.

    It has the dtype of x, or is float32 beside x in half precision, as weights under autocast are.
    """
    require(x=x)
    if most is not None and x.ndim and not 0 < x.shape[-1] <= most:
        raise ValueError(f"x: expected [..., D] with D from 1 to {most}, got {list(x.shape)}")
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: expected [D] with D the last of x, {list(x.shape)}; "
                f"got {list(vector.shape)}"
            )
        wide = x.dtype in HALF and vector.dtype is torch.float32
        if vector.device != x.device or not (wide or vector.dtype is x.dtype):
            raise ValueError(
                f"{name}: expected {x.dtype}, or float32 beside half precision, on {x.device}; "
                f"got {vector.dtype} on {vector.device}"
            )


def as_rows(x: Tensor) -> Tensor:
    """Return [..., D] as [R, D] whose rows lie in one piece, copied only when they do not."""
    if x.ndim == 0:
        raise ValueError("expected at least one dimension, got a scalar")
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
