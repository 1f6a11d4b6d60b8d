"""For all tests: a fixed seed, nothing left in global state, and in CI no unexpected skip."""

import importlib.util
import os
import random
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before any test imports triton, see helpers/kernels/__init__.py
    os.environ.setdefault("TRITON_INTERPRET", "1")


def own_caches() -> None:
    """Give compilers caches that no other instruction set shares, where HOME need not be writable.

    Inductor would take code for AVX-512 from its cache under ATEN_CPU_CAPABILITY=avx2. Set before
    anything compiles; processes that a test starts inherit it.
    """
    key = f"{torch.__version__}-python{sys.version_info.major}.{sys.version_info.minor}"
    key += (
        f"-{torch.backends.cpu.get_cpu_capability()}-{os.environ.get('ONEDNN_MAX_CPU_ISA', 'any')}"
    )
    folder = Path(tempfile.gettempdir(), f"pytorch-book-tests-{os.getuid()}", key)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(name, str(folder / name.lower()))


own_caches()


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread():
    """Sums in one order, as the ranks of a job compute them; small steps take less time, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def load_benchmark():
    """`load_benchmark("tensors")` is the module benchmarks/tensors.py, which no package holds."""

    def load(name: str):
        path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def pytest_collection_modifyitems(config, items):
    """Long and GPU tests run only when asked for by name: `-m slow`, `-m gpu`."""
    asked = config.getoption("markexpr")
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="minutes long: run with -m slow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


EXPECTED_SKIPS = ("minutes long", "needs a CUDA device")


def pytest_sessionfinish(session, exitstatus):
    """In CI everything that can run there must run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or reporter is None:
        return
    reasons = {str(r.longrepr[2]) if r.longrepr else "?" for r in reporter.stats.get("skipped", [])}
    unexpected = [r for r in reasons if not any(e in r for e in EXPECTED_SKIPS)]
    if unexpected and exitstatus == 0:
        reporter.write_line(f"unexpected skips in CI: {unexpected}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
