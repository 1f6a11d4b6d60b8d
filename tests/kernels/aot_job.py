"""Compile every kernel for GPUs that are not there; run by test_aot.py as a process of its own.

python tests/kernels/aot_job.py OUT.json [all]        writes one row for each build
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is decorated

import torch

from helpers.kernels import (
    INTERPRETED,
    aot,
    attention,
    attention_backward,
    dropout,
    gelu,
    linear_cross_entropy,
    matmul,
    norms,
    norms_backward,
    softmax,
    vector_add,
)

MODULES = (
    *(attention, attention_backward, dropout, gelu, linear_cross_entropy),
    *(matmul, norms, norms_backward, softmax, vector_add),
)


def calls(dtype: torch.dtype) -> None:
    """Call each operator at a size that matters; nothing runs, the launches are noted."""
    x, w = torch.empty(64, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    vector_add._vector_add(x, x)
    softmax._softmax(x)
    softmax._softmax_backward(x, x)
    softmax._softmax(torch.empty(2, 40_000, dtype=dtype))  # rows wider than a block
    for bias in (None, w):  # RMSNorm, LayerNorm
        _, stats = norms._norm(x, w, bias, 1e-5)
        norms_backward.norm_backward(x, w, stats, x)
        wide = x.view(16, -1)  # wide rows: the sums by columns
        norms_backward.norm_backward(wide, wide[0], stats[:, :16], wide)
    dropout._dropout(x, 0.1, 3)
    for tanh in (False, True):
        gelu._gelu(x, w, tanh)
        gelu._gelu_backward(x, w, x, tanh)
    matmul._matmul(x, x.T)
    target = torch.zeros(8, dtype=torch.int64)
    for words in (5000, 5008):  # rows that start anywhere; at a multiple of 16 elements
        w = torch.empty(words, 4096, dtype=dtype)
        linear_cross_entropy._linear_cross_entropy(x[:8], w, target, -100, True, True)
    q = torch.empty(2, 256, 64, dtype=dtype)
    o, lse = attention._attention(q, q, q, 0.125, True)
    attention_backward.attention_backward(q, q, q, o, lse, o, 0.125, True)


def write(folder: str, launches: list[aot.Launch], archs: tuple[int, ...]) -> None:
    """Build each kernel once for each of `archs`; write FOLDER/NAME.sm_ARCH.ptx and .cubin."""
    found: dict[tuple, list] = {}
    for launch in launches:
        shown = {k: v for k, v in launch.arguments.items() if k in ("V", "CENTER")}
        words = "".join(f" {k}={v}" for k, v in shown.items())
        found.setdefault((launch.kernel, words), []).append(launch)
    for (kernel, words), (first, *more) in found.items():
        name = kernel.fn.__module__.split(".")[-1] + kernel.__name__.removesuffix("_kernel")
        name = name.replace("backward_backward", "backward") + words
        for arch in archs:  # the second configuration, if there are more
            built = aot.build((more or [first])[0], arch)
            Path(folder, f"{name}.sm_{arch}.ptx").write_text(built.asm["ptx"])
            Path(folder, f"{name}.sm_{arch}.cubin").write_bytes(built.asm["cubin"])


def main(out: str, which: str = "some") -> None:
    assert not INTERPRETED
    rows, seen = [], set()
    for dtype in [torch.bfloat16, torch.float32] if which == "all" else [torch.bfloat16]:
        with aot.record(*MODULES) as launches:
            calls(dtype)
        for launch in launches:
            constants = {
                name: value
                for name, value in launch.arguments.items()
                if not isinstance(value, torch.Tensor)
            }
            key = (launch.kernel, str(constants), str(launch.options), dtype)
            tuned = [known for known in seen if known[0] is launch.kernel and known[3] is dtype]
            tiled = "BT" in constants or "BM" in constants
            if key in seen or (which != "all" and tiled and len(tuned) > 1):
                continue
            seen.add(key)
            rows += [row(launch, arch, dtype) for arch in aot.SHARED_LIMIT]
    Path(out).write_text(json.dumps(rows))


def row(launch: aot.Launch, arch: int, dtype: torch.dtype) -> dict:
    result = {
        "kernel": f"{launch.kernel.fn.__module__.split('.')[-1]}.{launch.kernel.__name__}",
        "arch": arch,
        "dtype": str(dtype),
        "options": launch.options,
    }
    try:
        built = aot.build(launch, arch)
    except ValueError as error:
        return result | {"error": str(error)}
    ptx = built.asm["ptx"]
    return result | {
        "cubin": len(built.asm["cubin"]),
        "shared": built.metadata.shared,
        "stack": aot.stack(built.asm["cubin"]),
        "matrix": next((i for i in ("wgmma", "tcgen05.mma", "mma.sync") if i in ptx), None),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
