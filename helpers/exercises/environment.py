"""Chapter 01, exercises: read nvidia-smi, choose a wheel, reseed in a worker, stop and go on."""

import itertools
import pickle
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils import worker

from helpers.environment import Noisy, driver_starts
from helpers.exercises.harness import Exercise

# ---- 1: the newest CUDA that the driver supports, from the header of `nvidia-smi`


def cuda_of(header: str) -> str | None:
    """Return the CUDA version in the header of `nvidia-smi`, None where it names none."""
    found = re.search(r"CUDA (?:UMD )?Version: (\d+\.\d+)", header)
    return None if found is None else found[1]


def _headers() -> list[tuple[str]]:
    with_cuda = "NVIDIA-SMI {0}  Driver Version: {0}  CUDA Version: {1}     |"
    cases = [
        with_cuda.format("535.113.01", "12.2"),
        "| NVIDIA-SMI 610.43  KMD Version: 610.43  CUDA UMD Version: 13.3    |",
        "NVIDIA-SMI 418.87  Driver Version: 418.87  CUDA Version: 10.1|",
        "NVIDIA-SMI 470.57  Driver Version: 470.57  CUDA Version: N/A    |",
        "NVIDIA-SMI 390.48              Driver Version: 390.48             |",
        "",
        with_cuda.format("396.82", "9.2"),
        with_cuda.format("580.65.06", "13.0"),
        "NVIDIA-SMI 700.10  KMD Version: 700.10  CUDA UMD Version: 14.12 |",
        "NVIDIA-SMI 610.43  KMD Version: 610.43  CUDA UMD Version: N/A |",
        f"Sat Nov 21 2026\n+-----+\n{with_cuda.format('550.54.15', '12.4')}\n| GPU  Name |",
    ]
    return [(header,) for header in cases]


# ---- 2: the newest wheel that starts on a driver


def wheel(driver: str | None, tags: Sequence[str]) -> str:
    """Return the newest of `tags` that starts on `driver`, "cpu" where none does."""
    best, answer = (0, 0), "cpu"
    for tag in tags:
        if driver is None or tag == "cpu":
            continue
        version = int(tag[2:-1]), int(tag[-1])
        try:
            starts = driver_starts(driver, f"{version[0]}.{version[1]}")
        except ValueError:  # a major version that the table does not have
            continue
        if starts and version > best:
            best, answer = version, tag
    return answer


def _wheels() -> list[tuple]:
    drivers = ["595.58.03", "580.65.06", "579.99", "575.57.08", "525.60.13", "524.99"]
    drivers += ["520.61.05", "450.51", "449.99", "1000.1", None]
    servers = [
        ("cpu", "cu126", "cu130", "cu132"),
        ("cu118", "cpu", "cu92", "cu128"),
        ("cu132", "cu130", "cu126", "cpu"),
        ("cu121", "cu124", "cu118"),
        ("cpu",),
        (),
    ]
    return list(itertools.product(drivers, servers))


# ---- 3: a generator of its own for each worker


def reseed(dataset: Any) -> None:
    """Give the dataset a generator with this worker's seed."""
    dataset.rng = np.random.default_rng(torch.initial_seed())


def _in_workers(answer: Callable[[Any], Any]) -> Callable[[int, int], Any]:
    """Turn `reseed` into what can be compared: facts about workers that have called it."""

    def facts(seed: int, other: int) -> Any:
        first, again, elsewhere = [_as_worker(answer, one) for one in (seed, seed, other)]
        if first is ...:
            return ...
        return {
            "rng is a NumPy Generator": first["kind"] is np.random.Generator,
            "the same seed repeats the noise": first["noise"] == again["noise"],
            "another seed gives other noise": first["noise"] != elsewhere["noise"],
            "another seed gives other torch numbers": first["torch"] != elsewhere["torch"],
        }

    return facts


def _as_worker(answer: Callable[[Any], Any], seed: int) -> Any:
    """Call `answer` as the worker of a `DataLoader` would, in this process."""
    dataset = Noisy(torch.ones(1), torch.ones(1), np.random.default_rng(7))
    # PyTorch's `_worker_loop` does the same: seeds first, then what get_worker_info() returns.
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    before = worker._worker_info
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)
    try:
        if answer(dataset) is ...:
            return ...
        noise, _ = dataset[0]
    finally:
        worker._worker_info = before
    kind = np.random.Generator if isinstance(dataset.rng, np.random.Generator) else None
    return {"kind": kind, "noise": noise.item(), "torch": torch.rand(1).item()}


# ---- 4: stop, and go on


def start(seed: int) -> tuple[Tensor, torch.Generator, random.Random]:
    """Return the weights and two generators, as chapter 01 shows them."""
    return torch.zeros(3), torch.Generator().manual_seed(seed), random.Random(seed)


def walk(w: Tensor, coin: torch.Generator, dice: random.Random, steps: int) -> Tensor:
    """Take `steps` steps; each draws from both generators."""
    for _ in range(steps):
        w = w + dice.random() * torch.randn(3, generator=coin)
    return w


def pause(seed: int, stop: int) -> Any:
    """Walk `stop` steps; return all it takes to go on."""
    w, coin, dice = start(seed)
    return walk(w, coin, dice, stop), coin.get_state(), dice.getstate()


def resume(saved: Any, steps: int) -> Tensor:
    """Walk `steps` more."""
    w, coin_state, dice_state = saved
    coin, dice = torch.Generator().set_state(coin_state), random.Random()
    dice.setstate(dice_state)
    return walk(w, coin, dice, steps)


class _CountDraws(TorchFunctionMode):
    """Count the calls of `torch.randn`."""

    def __init__(self):
        super().__init__()
        self.draws = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.draws += function is torch.randn
        return function(*args, **({} if kwargs is None else kwargs))


def _in_parts(answer: tuple[Callable, Callable]) -> Callable[[int, int, int], Any]:
    """Stop and go on with `answer` = (pause, resume), what is saved going through pickle."""
    pause, resume = answer

    def walked(seed: int, stop: int, steps: int) -> Any:
        saved = pickle.loads(pickle.dumps(pause(seed, stop)))
        with _CountDraws() as count:
            w = resume(saved, steps)
        if count.draws > steps:
            raise RuntimeError(f"resume took {count.draws} steps, expected {steps}")
        return w

    return walked


EXERCISES = {
    "cuda_of": Exercise(reference=cuda_of, cases=_headers),
    "wheel": Exercise(reference=wheel, cases=_wheels),
    "reseed": Exercise(
        reference=reseed,
        cases=lambda: [(1, 2), (1, 1001), (7, 2**31 + 7), (2**63 - 1, 0)],
        through=_in_workers,
    ),
    "resume": Exercise(
        reference=(pause, resume),
        cases=lambda: [(0, 3, 2), (1, 0, 4), (2, 4, 0), (3, 7, 7), (4, 1, 700)],
        through=_in_parts,
    ),
}
