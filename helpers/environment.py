"""Chapter 01: where a result comes from — device, seeds, determinism, versions."""

import os
import platform
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils.data import TensorDataset, get_worker_info

_CUDA = yaml.safe_load(Path(__file__).with_name("cuda.yml").read_text(encoding="utf-8"))

TOOLKIT_DRIVER: dict[str, int] = _CUDA["toolkit_driver"]["branches"]
"""CUDA toolkit -> the Linux driver branch that was released with it; source in ``cuda.yml``."""

OLDEST_DRIVER: dict[int, int] = _CUDA["oldest_driver"]["branches"]
"""CUDA major version -> the oldest branch that starts its programs; source in ``cuda.yml``."""


def newest_cuda(driver: str) -> str | None:
    """Return the CUDA version that `driver` ("580.65.06") came with, as `nvidia-smi` shows it.

    None for a driver older than the table.
    """
    newest = None
    for cuda, branch in TOOLKIT_DRIVER.items():  # oldest first
        if branch <= _branch(driver):
            newest = cuda
    return newest


def driver_starts(driver: str, cuda: str) -> bool:
    """Say whether `driver` ("580.65.06") starts a wheel built for `cuda` ("13.2").

    The major version decides: within it, NVIDIA promises minor-version compatibility.
    Raises ValueError for a major version that the table does not have.
    """
    major = int(cuda.split(".")[0])
    if major not in OLDEST_DRIVER:
        known = list(OLDEST_DRIVER)
        raise ValueError(f"expected CUDA with a major version in {known}, got {cuda}")
    return _branch(driver) >= OLDEST_DRIVER[major]


def _branch(driver: str) -> int:
    """Return the branch of a driver, the number before the first dot."""
    return int(driver.split(".")[0])


def pick_device(name: str | None = None) -> torch.device:
    """Return the device called `name`, else the accelerator that is there, else the CPU.

    Prints the choice: a silent CPU turns a benchmark into a wrong number.
    Raises ValueError when `name` asks for an accelerator that this machine does not have.
    """
    # `current_accelerator` answers for the build, `is_available` for the machine: ask both.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is not None:
        device = torch.device(name)
    elif found is not None:
        device = found
    else:
        device = torch.device("cpu")

    if device.type not in ("cpu", "meta") and (found is None or found.type != device.type):
        raise ValueError(f"device {name!r} asked for, but this machine offers {found or 'cpu'}")
    print(f"device: {device.type}" + (" (chosen automatically)" if name is None else ""))
    return device


def seed_everything(seed: int, *, deterministic: bool = True) -> torch.Generator:
    """Seed Python, NumPy and PyTorch on all devices; return a generator for a `DataLoader`.

    deterministic: also refuse what has no deterministic implementation (PyTorch's note on
        reproducibility), for the rest of the process. The way back is to call this function with
        ``deterministic=False``, or ``torch.use_deterministic_algorithms(False)`` alone.
    Raises ValueError for a seed that NumPy does not take, RuntimeError when CUDA has started
    without cuBLAS's workspace fixed.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), the range NumPy accepts; got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices

    if deterministic:
        if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise RuntimeError("CUBLAS_WORKSPACE_CONFIG must be set before CUDA: seed first")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False  # a search by timing may pick another kernel

    torch.use_deterministic_algorithms(deterministic)
    return torch.Generator().manual_seed(seed)


def seed_worker(worker_id: int) -> None:
    """`DataLoader(worker_init_fn=seed_worker)`: give the dataset's own `rng` the worker's seed.

    PyTorch seeds torch, `random` and NumPy's global generator in each worker; a generator that the
    dataset keeps in its attribute `rng` is only copied, and would draw the same in all of them.
    """
    info = get_worker_info()
    dataset = info.dataset
    while hasattr(dataset, "dataset"):  # a Subset, or another wrapper
        dataset = dataset.dataset

    if getattr(dataset, "rng", None) is not None:
        dataset.rng = np.random.default_rng(info.seed)


class Noisy(TensorDataset):
    """Samples [N, …] float64 and labels [N]; each visit adds fresh noise, as augmentation does.

    rng: the dataset's own generator; None draws from NumPy's global one.
    """

    def __init__(self, x: Tensor, y: Tensor, rng: np.random.Generator | None = None):
        super().__init__(x, y)
        self.rng = rng

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        source = np.random if self.rng is None else self.rng
        return x + torch.as_tensor(source.normal(size=x.shape)), y


def device_name(device: torch.device) -> str:
    """Return the marketing name of the device's chip, e.g. ``NVIDIA H200``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()} {device.type}"

    if platform.system() == "Linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    name = platform.processor()
    return name if name else platform.machine()


def _driver() -> str | None:
    """Return NVIDIA's driver version, or None where `nvidia-smi` is missing or finds no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.split()[0] if done.returncode == 0 else None


def versions(device: torch.device) -> dict[str, str]:
    """Return what a reader needs to judge a number taken on `device`: chip, driver, versions."""
    info = {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        driver = _driver()
        info["driver"] = "unknown" if driver is None else driver
        info["cuda"] = str(torch.version.cuda)
    else:
        info["threads"] = str(torch.get_num_threads())
        info["isa"] = torch.backends.cpu.get_cpu_capability()
    return info


def report() -> dict[str, str]:
    """Return what decides how fast and how exactly this machine computes; "none" for a lack."""
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built_for = ", ".join(f"{name} {version}" for name, version in built.items() if version)
    blas = torch.__config__.show().partition("BLAS_INFO=")[2].partition(",")[0]
    cudnn = torch.backends.cudnn.version()
    driver = _driver()
    chips = _accelerators()
    return versions(torch.device("cpu")) | {
        "cores": str(os.cpu_count()),
        "blas": blas if blas else "none",
        "built for": built_for if built_for else "CPU",
        "cudnn": "none" if cudnn is None else str(cudnn),
        "driver": "none" if driver is None else driver,
        "accelerators": "; ".join(chips) if chips else "none",
    }


def _accelerators() -> list[str]:
    """Return name and memory of each accelerator."""
    chips = []
    for kind in (torch.cuda, torch.xpu):  # torch.cuda also speaks for AMD
        for index in range(kind.device_count()):
            chip = kind.get_device_properties(index)
            chips.append(f"{chip.name}, {chip.total_memory / 2**30:.1f} GiB")
    if torch.backends.mps.is_available():
        memory = torch.mps.recommended_max_memory() / 2**30
        chips.append(f"Apple GPU, {memory:.1f} GiB to use")
    return chips
