"""What must happen before the first kernel is decorated, in processes of their own."""

import os
import subprocess
import sys

import pytest
import torch


def python(code: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA device to be absent")
def test_triton_first_is_refused_with_a_way_out():
    done = python("import triton; import helpers.kernels")
    assert done.returncode == 1
    assert "to be imported before triton, got triton first" in done.stderr
    assert python("import helpers.kernels, triton").returncode == 0


def test_importing_the_package_imports_no_kernel():
    code = "import sys, helpers.kernels; sys.exit('triton' in sys.modules)"
    assert python(code).returncode == 0
