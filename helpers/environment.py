"""Chapter 01: where a result comes from — device, seeds, determinism, versions."""

import os
import platform
import random
import subprocess

import numpy as np
import torch


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

    deterministic: also refuse operations that have no deterministic implementation
        (https://docs.pytorch.org/docs/stable/notes/randomness.html). cuBLAS needs its workspace
        fixed before the first CUDA call, hence the RuntimeError when that moment has passed.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), the range NumPy accepts; got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices
    if deterministic:
        if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise RuntimeError(
                "CUBLAS_WORKSPACE_CONFIG must be set before CUDA starts; "
                "call seed_everything before the first CUDA operation"
            )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False  # a search by timing may pick another kernel
    torch.use_deterministic_algorithms(deterministic)
    return torch.Generator().manual_seed(seed)


def seed_worker(worker_id: int) -> None:
    """`DataLoader(worker_init_fn=seed_worker)`: seed NumPy and `random` from the worker's own seed.

    PyTorch gives each worker its own torch seed; NumPy and `random` would repeat in all of them.
    """
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def device_name(device: torch.device) -> str:
    """Return the marketing name of the device's chip, e.g. ``NVIDIA H200``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()} {device.type}"
    try:
        with open("/proc/cpuinfo") as info:
            models = [line for line in info if line.startswith("model name")]
    except FileNotFoundError:  # not Linux
        models = []
    if models:
        return models[0].split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """Return what a reader needs to judge a number taken on `device`: chip, driver, versions."""
    info = {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        info |= {"driver": answer.split()[0], "cuda": str(torch.version.cuda)}
    else:
        info |= {
            "threads": str(torch.get_num_threads()),
            "isa": torch.backends.cpu.get_cpu_capability(),
        }
    return info
