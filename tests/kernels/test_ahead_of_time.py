"""Every kernel compiles for three architectures on a machine without a GPU."""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from helpers.kernels import ahead_of_time, vector_add

ROOT = Path(__file__).parents[2]
KERNELS = {
    "attention_forward",
    "attention_backward_q",
    "attention_backward_kv",
    "dropout",
    "gelu_forward",
    "gelu_backward",
    "linear_cross_entropy",
    "matmul",
    "norms_forward",
    "norms_backward",
    "norms_backward_sums",
    "softmax_forward",
    "softmax_backward",
    "vector_add",
}


def build(folder: Path, *words: str) -> list[dict]:
    out = folder / "builds.json"
    command = [sys.executable, str(Path(__file__).with_name("aot_job.py")), str(out), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, env=env, check=True)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return build(tmp_path_factory.mktemp("aot"))


def test_each_kernel_has_machine_code_for_each_architecture(builds):
    assert {row["kernel"] for row in builds} == KERNELS
    for kernel in KERNELS:
        for arch in ahead_of_time.SHARED_LIMIT:
            some = [row for row in builds if (row["kernel"], row["arch"]) == (kernel, arch)]
            fits = [row for row in some if "error" not in row]
            assert fits, some
            assert all(row["cubin"] > 1000 for row in fits)
            assert all(row["shared"] <= ahead_of_time.SHARED_LIMIT[arch] for row in fits)


@pytest.mark.parametrize(
    ("arch", "wanted"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")]
)
def test_matrix_products_use_the_tensor_cores_of_the_architecture(builds, arch, wanted):
    for kernel in ("matmul", "attention_forward"):
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


def test_layer_norm_subtracts_the_mean_that_it_saves(builds):
    """As `div.full`, the division would be fused with the subtraction: on an H100 it was."""
    rows = [r for r in builds if r["kernel"] == "norms_forward" and "div.rn.f32" in r["divisions"]]
    assert {row["arch"] for row in rows} == set(ahead_of_time.SHARED_LIMIT)


def test_the_program_writes_ptx_and_machine_code(tmp_path):
    """What chapter 13 runs; of one kernel only, as the others are built above."""
    job = """
import sys, torch
from pathlib import Path
from helpers.kernels import ahead_of_time, vector_add
x = torch.empty(4096)
ahead_of_time.call_operators = lambda dtype: vector_add._vector_add(x, x)
ahead_of_time.write(Path(sys.argv[1]), [80, 90])
"""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", job, str(tmp_path)], env=env, check=True)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        f"vector_add.sm_{arch}.{kind}" for arch in (80, 90) for kind in ("ptx", "cubin")
    }
    assert ".target sm_90" in (tmp_path / "vector_add.sm_90.ptx").read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA device to be absent")
def test_too_much_shared_memory_is_refused(monkeypatch):
    """An interpreted kernel has the source in it that can be compiled."""
    x = torch.empty(4096)
    (launch,) = ahead_of_time.launches(lambda: vector_add._vector_add(x, x))
    launch = dataclasses.replace(launch, kernel=triton.JITFunction(launch.kernel.fn))
    assert ahead_of_time.build(launch, 90).asm["cubin"]
    monkeypatch.setitem(ahead_of_time.SHARED_LIMIT, 90, -1)
    with pytest.raises(ValueError, match="expected at most -1 B of shared memory on sm_90, got 0"):
        ahead_of_time.build(launch, 90)


def test_the_program_refuses_interpreted_kernels():
    command = [sys.executable, "-m", "helpers.kernels.ahead_of_time", ".", "90"]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "expected TRITON_INTERPRET=0" in done.stderr


@pytest.mark.slow
def test_every_configuration_and_float32(tmp_path):
    rows = build(tmp_path, "all")
    too_large = [row for row in rows if "error" in row]
    assert all("of shared memory" in row["error"] for row in too_large)  # the tuner leaves them out
    assert len(too_large) < len(rows) / 4


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    """A file in the place of the folder stops even root; then Triton keeps its files elsewhere."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "to be removed again")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    ahead_of_time._use_a_writable_cache()
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    ahead_of_time._use_a_writable_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")


def test_no_kernel_returns_early():
    """Triton 3.6 compiles what follows an early `return` of a constant `if` as well."""
    for path in sorted((ROOT / "helpers" / "kernels").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            if "triton.jit" not in [ast.unparse(one) for one in function.decorator_list]:
                continue
            returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
            assert all(node in function.body for node in returns), f"{path.name}: {function.name}"
