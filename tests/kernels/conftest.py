"""Every kernel test runs twice: interpreted on a CPU, compiled on a GPU with `-m gpu`."""

import pytest

from helpers.kernels import INTERPRETED


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("needs a CUDA device to be absent: kernels are compiled here")
    return request.param
