"""Chapter 06: checkpoint files — atomic to write, safe to read, complete enough to resume."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def save_atomic(state: dict[str, Any], path: str | Path) -> None:
    """Save so that `path` holds the old file or the new one, whenever the process dies.

    A second file, flushed to disk, takes over the name in one step (POSIX rename is atomic).
    """
    path = Path(path)
    part = path.with_name(path.name + ".partial")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    if os.name == "posix":  # the rename itself must reach the disk, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: str | Path, *, expected: set[str]) -> dict[str, Any]:
    """Read tensors and plain values, never code; ValueError when it is not such a file.

    expected: the keys that the checkpoint must have.
    """
    with open(path, "rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = (str(error) or "it is empty").splitlines()[0]
            raise ValueError(f"{path} is not a readable checkpoint: {reason}") from error
    got = set(state) if isinstance(state, dict) else type(state).__name__
    if got != expected:
        raise ValueError(f"{path} is not a checkpoint of this kind: expected {expected}, got {got}")
    return state


def require_same_shapes(path: str | Path, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise ValueError naming every tensor that is missing, unknown or of another shape."""

    def shapes(state: dict[str, Any]) -> dict[str, list[int]]:
        return {name: list(t.shape) for name, t in state.items() if isinstance(t, Tensor)}

    a, b = shapes(here), shapes(there)
    differ = [
        f"{name}: expected {a.get(name)}, got {b.get(name)}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
    if differ:
        raise ValueError(f"{path} holds another model; {'; '.join(differ)}")


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return every global generator's state, as tensors and plain values only.

    `torch.load(weights_only=True)` refuses NumPy's state tuple: it goes in as a list.
    """
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` returned. ValueError when it comes from another kind of device."""
    if device.type not in state:
        raise ValueError(f"random state of {sorted(state)} cannot resume on {device.type!r}")
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type])
