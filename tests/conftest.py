"""Fixtures shared by all tests: a fixed seed and nothing left behind in global state."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(config, items):
    """Long and GPU tests run only when asked for by name: `-m slow`, `-m gpu`."""
    asked = config.getoption("markexpr")
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="minutes long: run with -m slow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
