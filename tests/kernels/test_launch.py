"""What must happen before the first kernel is decorated, in processes of their own."""

import os
import subprocess
import sys

import pytest
import torch
import triton

from helpers.kernels import launch


def python(code: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA device to be absent")
def test_triton_first_is_refused_with_a_way_out():
    done = python("import triton; import helpers.kernels")
    assert done.returncode == 1
    assert "to be imported before triton, got triton first" in done.stderr
    assert python("import helpers.kernels, triton").returncode == 0


def test_triton_takes_the_same_words_for_yes():
    """A kernel that is interpreted while its operator expects a compiled one would be a riddle."""
    code = """
import importlib, os
os.environ["TRITON_INTERPRET"] = "1"
import helpers.kernels
from triton import knobs
for word in ("1", "true", "TRUE", "on", "yes", "y", "Y", "0", "false", "off", "no", "", "2", "t"):
    os.environ["TRITON_INTERPRET"] = word
    found = importlib.reload(helpers.kernels).INTERPRETED
    assert found == knobs.runtime.interpret, word
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_compilers_have_caches_for_this_instruction_set():
    """See tests/conftest.py: AVX-512 code must not be found by a process that may not run it."""
    code = "import os, tests.conftest; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    names = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in names}
    folders = set()
    for capability, onednn in [("default", "SSE41"), ("default", "AVX2"), ("avx2", "AVX2")]:
        own = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": onednn}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env | own, capture_output=True, text=True)
        folders.add(done.stdout)
    assert len(folders) >= 2 and "" not in folders  # avx2 may be missing from this processor


def test_importing_the_package_imports_no_kernel():
    code = "import sys, helpers.kernels; sys.exit('triton' in sys.modules)"
    assert python(code).returncode == 0


CONFIGS = [
    triton.Config({"BM": m, "BN": n, "GROUP": 8}) for m, n in ((32, 32), (64, 128), (128, 64))
]


@pytest.mark.parametrize(
    ("m", "n", "kept"),
    [
        (4096, 4096, [0, 1, 2]),
        (128, 128, [0, 1, 2]),
        (65, 64, [0, 2]),  # 65 rows take a tile of 128
        (64, 64, [0]),
        (33, 65, [0, 1]),
        (1, 4096, [0]),  # none fits: the smallest
    ],
)
def test_no_tile_is_larger_than_the_matrix(m, n, kept):
    assert launch.fitting(CONFIGS, {"BM": m, "BN": n}) == [CONFIGS[i] for i in kept]


@triton.jit
def kernel(c_ptr, M, N, BM, BN, GROUP):
    pass


def test_on_a_gpu_only_fitting_tiles_are_tried(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    tuned = launch.autotune(CONFIGS, key=["M", "N"], tiles={"BM": "M", "BN": "N"})(kernel)
    arguments = {"c_ptr": None, "M": 64, "N": 64}
    assert tuned.early_config_prune(CONFIGS, arguments, ACC="f32") == CONFIGS[:1]
    assert tuned.configs == CONFIGS
    monkeypatch.setattr(launch, "INTERPRETED", True)
    one = launch.autotune(CONFIGS, key=["M", "N"], tiles={"BM": "M", "BN": "N"})(kernel)
    assert one.configs == CONFIGS[:1]
