"""Compile every kernel for GPUs that are not there; run by test_ahead_of_time.py as a process.

python tests/kernels/aot_job.py OUT.json [all]        writes one row for each build
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is decorated

import torch

from helpers.kernels import INTERPRETED, ahead_of_time


def main(out: str, which: str = "some") -> None:
    assert not INTERPRETED
    rows, seen = [], set()
    for dtype in [torch.bfloat16, torch.float32] if which == "all" else [torch.bfloat16]:
        for launch in ahead_of_time.launches(lambda: ahead_of_time.call_operators(dtype)):  # noqa: B023
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
            rows += [row(launch, arch, dtype) for arch in ahead_of_time.SHARED_LIMIT]
    Path(out).write_text(json.dumps(rows), encoding="utf-8")


def row(launch: ahead_of_time.Launch, arch: int, dtype: torch.dtype) -> dict:
    result = {
        "kernel": ahead_of_time.kernel_name(launch),
        "arch": arch,
        "dtype": str(dtype),
        "options": launch.options,
    }
    try:
        built = ahead_of_time.build(launch, arch)
    except ValueError as error:
        return result | {"error": str(error)}
    ptx = built.asm["ptx"]
    return result | {
        "cubin": len(built.asm["cubin"]),
        "shared": built.metadata.shared,
        "stack": ahead_of_time.spilled_bytes(built.asm["cubin"]),
        "divisions": sorted(set(re.findall(r"div\.\w+\.f32", ptx))),
        "matrix": next((i for i in ("wgmma", "tcgen05.mma", "mma.sync") if i in ptx), None),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
