"""Chapter 19: the same job in five programs: lines, time per step, start, import, memory, size.

Time per step and time to start: the programs of `helpers.ecosystem` do the small job in turns, in
an order that changes from round to round, with one thread. A hook in the model notes when each
forward pass begins. A step is the time from one forward pass to the next, and the median of a run
counts, without its first steps; `ratio` is that median over the bare loop's in the same round. The
start is the time from the call to the first forward pass. Import and memory: a fresh process that
imports the library (PyTorch for the bare loop), `PROCESSES` times, in turns; the memory is its
resident set. The size is what installing the library adds beside PyTorch, by the lists of files
that pip keeps.
"""

import logging
import statistics
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import torch

from helpers import data, ecosystem, environment, timing
from helpers.ecosystem_job import make_job
from helpers.page import records

ROUNDS, EPOCHS, PROCESSES = 20, 3, 5
WARM_UP = 10  # steps of each run that do not count: the first ones set things up
DISTRIBUTIONS = {"Accelerate": "accelerate", "Fabric": "lightning", "Lightning": "lightning"}
IMPORTS = {
    "bare": "import torch",
    "Trainer": "import helpers.training",
    "Accelerate": "import accelerate",
    "Fabric": "import lightning.fabric",
    "Lightning": "import lightning",
}
UNITS = {"program": "name", "lines": "lines", "lines_grown": "lines", "step": "ms"}
UNITS |= {"ratio": "program / bare", "start": "ms", "load": "s", "memory": "MB", "size": "MB"}

# not `ru_maxrss`: a child starts with the largest set of the process that forked it
FRESH = """\
import time
import psutil
start = time.perf_counter()
{statement}
print(time.perf_counter() - start, psutil.Process().memory_info().rss / 1e6)
"""


def run(name: str, digits: data.Digits) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Train once; return the ms to the first forward pass, the ms of a step, and the weights."""
    model, optimizer, loader = make_job(digits)
    began: list[float] = []
    model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    called = time.perf_counter()
    ecosystem.PROGRAMS[name][0](model, optimizer, loader, EPOCHS)

    if len(began) != EPOCHS * len(loader):
        raise AssertionError(f"{name}: {len(began)} forward passes in {EPOCHS} epochs")
    steps = [b - a for a, b in zip(began[WARM_UP:], began[WARM_UP + 1 :], strict=False)]
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return 1e3 * (began[0] - called), 1e3 * statistics.median(steps), weights


def in_turns(digits: data.Digits) -> dict[str, dict[str, list[float]]]:
    """Return the readings of each program, a round after the other."""
    names = list(ecosystem.PROGRAMS)
    found = {name: {"start": [], "step": [], "ratio": []} for name in names}
    for number in range(-1, ROUNDS):  # the first round warms up
        order = names[number % len(names) :] + names[: number % len(names)]
        taken = {name: run(name, digits) for name in order}
        for name, (start, step, weights) in taken.items():
            expected = taken["bare"][2]
            if not all(torch.equal(tensor, expected[key]) for key, tensor in weights.items()):
                raise AssertionError(f"{name}: other weights than the bare loop's")
            if number >= 0:
                found[name]["start"].append(start)
                found[name]["step"].append(step)
                found[name]["ratio"].append(step / taken["bare"][1])
    return found


def fresh() -> dict[str, dict[str, list[float]]]:
    """Return seconds to import and resident MB of a new process, for each program's library."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"load": [], "memory": []} for name in IMPORTS
    }
    for number in range(-1, PROCESSES):  # the first round fills the file cache
        for name, statement in IMPORTS.items():
            command = [sys.executable, "-c", FRESH.format(statement=statement)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, megabytes = map(float, done.stdout.split())
            if number >= 0:
                found[name]["load"].append(seconds)
                found[name]["memory"].append(megabytes)
    return found


def row(name: str, readings: dict[str, list[float]]) -> dict[str, Any]:
    """A line of the record."""
    small, grown, others = ecosystem.PROGRAMS[name]
    size = 0.0
    if name in DISTRIBUTIONS:
        size = ecosystem.added_bytes(DISTRIBUTIONS[name]) / 1e6
    return {
        "program": name,
        "lines": ecosystem.code_lines(small, *others),
        "lines_grown": ecosystem.code_lines(grown, *others),
        "size": round(size, 1),
        **{column: timing.quantiles(values) for column, values in readings.items()},
    }


def measure(device: torch.device) -> records.Record:
    """Measure all programs on a CPU: `ecosystem` names it in each of them."""
    if device.type != "cpu":
        raise RuntimeError(f"the five programs train on a CPU, got {device}")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made = records.provenance(
        environment.versions(device), repeats=ROUNDS, clock="perf_counter in a forward hook"
    )
    for distribution in ("lightning", "accelerate"):
        made[distribution] = version(distribution)
    with warnings.catch_warnings(action="ignore"):  # advice, and deprecations inside the libraries
        trained = in_turns(data.digits())
    imported = fresh()
    rows = [row(name, trained[name] | imported[name]) for name in ecosystem.PROGRAMS]
    return records.Record("ecosystem", made, UNITS, rows)
