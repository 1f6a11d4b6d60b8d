"""Chapter 13: compile kernels for GPUs that are not there, and read what came out.

A kernel is compiled for the arguments it is launched with: dtypes, alignment, constants. `record`
notes the launches of a call; `build` compiles one of them for an architecture. Run in a process
with TRITON_INTERPRET=0: an interpreted kernel cannot be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner

# Shared memory a program may use, bytes (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"): the compiler does not check it.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
TYPES |= {torch.float64: "*fp64", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments by name, and how it is compiled."""

    kernel: triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


@contextmanager
def record(*modules: Any) -> Iterator[list[Launch]]:
    """Collect the launches that calls into `modules` make, every tuning configuration; run none."""
    found: list[Launch] = []

    def note(kernel: Any, _grid: Any, *args: Any, **constants: Any) -> None:
        configs = kernel.configs if isinstance(kernel, Autotuner) else [triton.Config({})]
        function = kernel.fn if isinstance(kernel, Autotuner) else kernel
        for config in configs:
            named = dict(zip(function.arg_names, args, strict=False)) | constants | config.kwargs
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            options |= {name: named.pop(name) for name in OPTIONS if name in named}
            found.append(Launch(function, named, options))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", note))
        yield found


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


def stack(cubin: bytes) -> int:
    """Return the bytes of stack a thread uses: where registers that were too few are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


def _type(value: Any, constant: bool) -> str:
    if constant or value is None or (type(value) is int and value == 1):  # as Triton does with a 1
        return "constexpr"
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i64" if value >= 2**31 else "i32"
