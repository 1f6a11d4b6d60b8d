"""Every kernel compiles for three architectures on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from helpers.kernels import aot

ROOT = Path(__file__).parents[2]
KERNELS = {
    *("attention._forward_kernel", "attention_backward._backward_q_kernel"),
    *("attention_backward._backward_kv_kernel", "dropout._kernel", "gelu._forward_kernel"),
    *("gelu._backward_kernel", "linear_cross_entropy._kernel", "matmul._kernel"),
    *(
        "norms._forward_kernel",
        "norms_backward._backward_kernel",
        "norms_backward._sums_kernel",
        "softmax._forward_kernel",
    ),
    *("softmax._backward_kernel", "vector_add._kernel"),
}


def build(folder: Path, *words: str) -> list[dict]:
    out = folder / "builds.json"
    command = [sys.executable, str(Path(__file__).with_name("aot_job.py")), str(out), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, env=env, check=True)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return build(tmp_path_factory.mktemp("aot"))


def test_each_kernel_has_machine_code_for_each_architecture(builds):
    assert {row["kernel"] for row in builds} == KERNELS
    for kernel in KERNELS:
        for arch in aot.SHARED_LIMIT:
            some = [row for row in builds if (row["kernel"], row["arch"]) == (kernel, arch)]
            fits = [row for row in some if "error" not in row]
            assert fits, some
            assert all(row["cubin"] > 1000 for row in fits)
            assert all(row["shared"] <= aot.SHARED_LIMIT[arch] for row in fits)


@pytest.mark.parametrize(
    ("arch", "wanted"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")]
)
def test_matrix_products_use_the_tensor_cores_of_the_architecture(builds, arch, wanted):
    for kernel in ("matmul._kernel", "attention._forward_kernel"):
        used = {row["matrix"] for row in builds if (row["kernel"], row["arch"]) == (kernel, arch)}
        assert wanted in used


def test_registers_suffice_on_sm_90(builds):
    """Each kernel has a configuration that spills none to memory, wide rows included."""
    for kernel in KERNELS:
        stacks = [row["stack"] for row in builds if (row["kernel"], row["arch"]) == (kernel, 90)]
        assert min(stacks) == 0, kernel
    norms = [row for row in builds if "norms" in row["kernel"] and row["arch"] == 90]
    most = 64 if triton.__version__.startswith("3.6.") else 0  # 3.6 spills 40 bytes of the widest
    assert len(norms) >= 8 and all(row["stack"] <= most for row in norms)


@pytest.mark.slow
def test_every_configuration_and_float32(tmp_path):
    rows = build(tmp_path, "all")
    too_large = [row for row in rows if "error" in row]
    assert all("of shared memory" in row["error"] for row in too_large)  # the tuner leaves them out
    assert len(too_large) < len(rows) / 4
