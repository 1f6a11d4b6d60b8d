"""Chapter 13: compile kernels for GPUs that are not there, and read what came out.

A kernel is compiled for the arguments it is launched with: dtypes, alignment, constants. So call
each operator once, note what it would launch instead of running it, and compile just that:

    TRITON_INTERPRET=0 python -m helpers.kernels.ahead_of_time FOLDER 80 90

writes the PTX and the machine code of every kernel of this chapter for compute capabilities 8.0
and 9.0. It needs a process of its own: an interpreted kernel cannot be compiled.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner

from helpers.kernels import (
    INTERPRETED,
    attention,
    can_write,
    dropout,
    gelu,
    linear_cross_entropy,
    matmul,
    norms,
    softmax,
    vector_add,
)
from helpers.kernels.launch import note_launches

# Shared memory a program may use, bytes (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"): the compiler does not check it.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments by name, and how it is compiled."""

    kernel: triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]  # num_warps, num_stages


def launches(calls: Callable[[], None]) -> list[Launch]:
    """Return what `calls()` would launch, in every tuning configuration; nothing runs."""
    with note_launches() as noted:
        calls()

    found = []
    for kernel, args, constants in noted:
        tuned = isinstance(kernel, Autotuner)
        function = kernel.fn if tuned else kernel
        for config in kernel.configs if tuned else [triton.Config({})]:
            named = dict(zip(function.arg_names, args, strict=False)) | constants | config.kwargs
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            for name in options:
                if name in named:
                    options[name] = named.pop(name)
            found.append(Launch(function, named, options))
    return found


def build(launch: Launch, arch: int) -> triton.compiler.CompiledKernel:
    """Compile for compute capability `arch`, e.g. 90; `.asm` has ttir, ttgir, llir, ptx and cubin.

    Raises ValueError when the program would need more shared memory than the GPU has.
    """
    signature, constants, attributes = {}, {}, {}
    for position, (name, value) in enumerate(launch.arguments.items()):
        signature[name] = _type(value, launch.kernel.params[position].is_constexpr)
        if signature[name] == "constexpr":
            constants[name] = value
        elif isinstance(value, Tensor) or value % 16 == 0:  # allocations start at such addresses
            attributes[position,] = [["tt.divisibility", 16]]

    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    if built.metadata.shared > SHARED_LIMIT[arch]:
        raise ValueError(
            f"{launch.kernel.__name__} {launch.options}: expected at most {SHARED_LIMIT[arch]} B "
            f"of shared memory on sm_{arch}, got {built.metadata.shared}"
        )
    return built


def _type(value: Any, constant: bool) -> str:
    if constant or value is None or (type(value) is int and value == 1):  # as Triton does with a 1
        return "constexpr"
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i64" if value >= 2**31 else "i32"


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes of stack a thread uses: where registers that were too few are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


def call_operators(dtype: torch.dtype) -> None:
    """Call each operator of this chapter, forward and backward, at a size that matters."""
    x = torch.empty(64, 4096, dtype=dtype)
    w = torch.empty(4096, dtype=dtype)
    vector_add._vector_add(x, x)
    dropout._dropout(x, 0.1, 3)
    matmul._matmul(x, x.T)

    softmax._softmax(x)
    softmax._softmax_backward(x, x)
    softmax._softmax(torch.empty(2, 40_000, dtype=dtype))  # rows wider than a block

    for bias in (None, w):  # RMSNorm, LayerNorm
        _, stats = norms._norm(x, w, bias, 1e-5, bias is not None)
        norms._norm_backward(x, w, stats, x)
        wide = x.view(16, -1)  # wide rows: the sums by columns
        norms._norm_backward(wide, wide[0], stats[:, :16], wide)

    for tanh in (False, True):
        gelu._gelu(x, w, tanh)
        gelu._gelu_backward(x, w, x, tanh)

    target = torch.zeros(8, dtype=torch.int64)
    for words in (5000, 5008):  # not a multiple of 16, so rows could start anywhere; one
        weight = torch.empty(words, 4096, dtype=dtype)
        linear_cross_entropy._linear_cross_entropy(x[:8], weight, target, -100, True, True)

    q = torch.empty(2, 256, 64, dtype=dtype)
    o, lse = attention._attention(q, q, q, 0.125, True)
    attention._attention_backward(q, q, q, o, lse, o, 0.125, True)


def kernel_name(launch: Launch) -> str:
    """Return module and kernel, e.g. "softmax_forward"."""
    module = launch.kernel.fn.__module__.split(".")[-1]
    return module + launch.kernel.__name__.removesuffix("_kernel")


def write(folder: Path, archs: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Build each kernel for each of `archs`; write FOLDER/NAME.sm_ARCH.ptx and .cubin.

    Of a tuned kernel the second configuration: the first is meant for float32.
    """
    found: dict[str, list[Launch]] = {}
    for launch in launches(lambda: call_operators(dtype)):
        shown = {k: v for k, v in launch.arguments.items() if k in ("V", "CENTER")}
        name = kernel_name(launch) + "".join(f" {k}={v}" for k, v in shown.items())
        found.setdefault(name, []).append(launch)

    for name, variants in found.items():
        launch = variants[1] if len(variants) > 1 else variants[0]
        for arch in archs:
            built = build(launch, arch)
            Path(folder, f"{name}.sm_{arch}.ptx").write_text(built.asm["ptx"], encoding="utf-8")
            Path(folder, f"{name}.sm_{arch}.cubin").write_bytes(built.asm["cubin"])


def _use_a_writable_cache() -> None:
    """Triton keeps what it compiles in the home folder; where that cannot be written, elsewhere."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    if not can_write(folder):
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton_cache_")


if __name__ == "__main__":
    if INTERPRETED:
        sys.exit("expected TRITON_INTERPRET=0: an interpreted kernel cannot be compiled")
    _use_a_writable_cache()
    write(Path(sys.argv[1]), [int(arch) for arch in sys.argv[2:]])
