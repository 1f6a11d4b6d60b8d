"""Chapter 01: where a result comes from — device, seeds, determinism, versions."""

import os
import platform
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, get_worker_info

# CUDA toolkit: the Linux driver branch that came with it (CUDA release notes). FIRST: the first
# branch that starts anything of a major version (docs.nvidia.com/deploy/cuda-compatibility).
BRANCHES = {"11.8": 520, "12.0": 525, "12.1": 530, "12.2": 535, "12.3": 545, "12.4": 550}
BRANCHES |= {"12.5": 555, "12.6": 560, "12.8": 570, "12.9": 575, "13.0": 580, "13.1": 590}
BRANCHES |= {"13.2": 595, "13.3": 610}
FIRST = {11: 450, 12: 525, 13: 580}


def newest_cuda(driver: str) -> str | None:
    """Return the CUDA version that `driver` ("580.65.06") came with, as `nvidia-smi` shows it."""
    branch = int(driver.split(".")[0])
    return max((c for c in BRANCHES if BRANCHES[c] <= branch), key=BRANCHES.get, default=None)


def runs(driver: str, cuda: str) -> bool:
    """Say whether a wheel for `cuda` ("13.2") starts on `driver`: the major version decides."""
    major = int(cuda.split(".")[0])
    if major not in FIRST:
        raise ValueError(f"expected CUDA with a major version in {list(FIRST)}, got {cuda}")
    return int(driver.split(".")[0]) >= FIRST[major]


def pick_device(name: str | None = None) -> torch.device:
    """Return the device called `name`, else the accelerator that is there, else the CPU.

    Prints the choice: a silent CPU turns a benchmark into a wrong number.
    Raises ValueError when `name` asks for an accelerator that this machine does not have.
    """
    # `current_accelerator` answers for the build, `is_available` for the machine: ask both.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(name) if name else found or torch.device("cpu")
    if device.type not in ("cpu", "meta") and (found is None or found.type != device.type):
        raise ValueError(f"device {name!r} asked for, but this machine offers {found or 'cpu'}")
    print(f"device: {device.type}" + ("" if name else " (chosen automatically)"))
    return device


def seed_everything(seed: int, *, deterministic: bool = True) -> torch.Generator:
    """Seed Python, NumPy and PyTorch on all devices; return a generator for a `DataLoader`.

    deterministic: also refuse what has no deterministic implementation (PyTorch's note on
        reproducibility). RuntimeError when CUDA has started without cuBLAS's workspace fixed.
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

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + torch.as_tensor((self.rng or np.random).normal(size=x.shape)), y


def device_name(device: torch.device) -> str:
    """Return the marketing name of the device's chip, e.g. ``NVIDIA H200``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()} {device.type}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.processor()])[0] or platform.machine()


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
        info |= {"driver": _driver() or "unknown", "cuda": str(torch.version.cuda)}
    else:
        info["threads"] = str(torch.get_num_threads())
        info["isa"] = torch.backends.cpu.get_cpu_capability()
    return info


def report() -> dict[str, str]:
    """Return what decides how fast and how exactly this machine computes; "none" for a lack."""
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    blas = torch.__config__.show().partition("BLAS_INFO=")[2].partition(",")[0]
    chips = [
        f"{chip.name}, {chip.total_memory / 2**30:.1f} GiB"
        for kind in (torch.cuda, torch.xpu)
        for chip in map(kind.get_device_properties, range(kind.device_count()))
    ]
    if torch.backends.mps.is_available():
        chips.append(f"Apple GPU, {torch.mps.recommended_max_memory() / 2**30:.1f} GiB to use")
    return versions(torch.device("cpu")) | {
        "cores": str(os.cpu_count()),
        "blas": blas or "none",
        "built for": ", ".join(f"{name} {v}" for name, v in built.items() if v) or "CPU",
        "cudnn": str(torch.backends.cudnn.version() or "none"),
        "driver": _driver() or "none",
        "accelerators": "; ".join(chips) or "none",
    }
