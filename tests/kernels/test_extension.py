import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from helpers.kernels import extension
from tests.kernels import arithmetic
from tests.kernels.numerics import assert_rounds_well, gradcheck, randn, run

ROUNDINGS = partial(arithmetic.gelu, tanh=False)
SHAPES = [(5, 7), (1, 1), (0, 4), (3, 0), (300, 129)]


@pytest.fixture(scope="module")
def bias_gelu():
    return extension.load()


def eager(x, b):
    return F.gelu(x + b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding(bias_gelu, shape, dtype):
    many = [randn(*shape, device="cpu", dtype=dtype), randn(shape[1], device="cpu", dtype=dtype)]
    if dtype is torch.float32:
        assert_rounds_well(bias_gelu, eager, ROUNDINGS, many)
    else:  # float64 is the oracle itself
        for got, want in zip(run(bias_gelu, many), run(eager, many), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_not_contiguous(bias_gelu):
    x, b = randn(6, 10, device="cpu"), randn(12, device="cpu")
    assert_rounds_well(bias_gelu, eager, ROUNDINGS, [x.T, b[::2]])
    assert_rounds_well(bias_gelu, eager, ROUNDINGS, [x[:, ::2], b[:5]])


def test_gradient(bias_gelu):
    gradcheck(bias_gelu, randn(3, 4, device="cpu"), randn(4, device="cpu"))


def test_composes(bias_gelu):
    x, b = randn(3, 4, device="cpu"), randn(4, device="cpu")
    torch.library.opcheck(bias_gelu, (x, b))
    torch.compiler.reset()
    graph = torch.compile(lambda x, b: bias_gelu(x * 2, b) + 1, backend="aot_eager", fullgraph=True)
    for got, want in zip(
        run(graph, [x, b]), run(lambda x, b: eager(x * 2, b) + 1, [x, b]), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_errors(bias_gelu):
    x = torch.zeros(3, 4)
    with pytest.raises(
        ValueError, match=r"bias \[D\] of one dtype, got float \[3, 4\] and float \[3\]"
    ):
        bias_gelu(x, torch.zeros(3))
    with pytest.raises(ValueError, match="one dtype, got float .* and double"):
        bias_gelu(x, torch.zeros(4).double())
    with pytest.raises(NotImplementedError, match="bias_gelu.*Half"):
        bias_gelu(x.half(), torch.zeros(4).half())


def test_a_home_that_cannot_be_written(tmp_path):
    """A file in the place of the folder stops even root."""
    (tmp_path / "home").touch()
    code = (
        "import torch; from helpers.kernels import extension;"
        "print(extension.load()(torch.zeros(1, 1), torch.zeros(1)).item())"
    )
    left_out = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "0.0\n", done.stderr
    assert list(tmp_path.glob("torch_extensions_*/*.so"))


def test_compiled_once(bias_gelu):
    assert extension.load() is bias_gelu
