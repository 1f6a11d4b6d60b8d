"""Every kernel test runs twice: interpreted on a CPU, compiled on a GPU with `-m gpu`."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from helpers.kernels import INTERPRETED, launch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("needs a CUDA device to be absent: kernels are compiled here")
    return request.param


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """What a kernel forgets to write is seen: else it may hold the right result of an earlier run.

    PyTorch fills what `torch.empty` returns as long as deterministic algorithms are asked for
    (`torch.utils.deterministic.fill_uninitialized_memory`).
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch):
    """NumPy has no bfloat16: the interpreter cuts its digits off, and multiplies the bit patterns.

    A GPU rounds to nearest, ties to even, and multiplies exactly; so do the tests.
    """
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(self, source, to):
        kinds = (source.dtype.scalar, to.scalar)
        if kinds != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)

    def product(self, a, b, *rest):
        wide = [cast(self, x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    monkeypatch.setattr(builder, "cast_impl", rounded)
    monkeypatch.setattr(builder, "create_dot", product)
    monkeypatch.setitem(launch.OPERANDS, torch.bfloat16, tl.bfloat16)
