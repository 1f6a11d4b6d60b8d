"""Chapter 06: checkpoint files — atomic to write, safe to read, complete enough to resume."""

import errno
import glob
import os
import random
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, leftovers stay
    fcntl = None

# --- write ----------------------------------------------------------------------------------------


def save_atomic(state: dict[str, Any], path: str | Path) -> None:
    """Save so that `path` holds the old file or the new one, whenever the process dies.

    A second file, with a name of its own and flushed to disk, takes over the name in one step
    (POSIX rename is atomic). Two processes that save to one path never mix: the last one wins.
    "~" is the home folder, a symbolic link leads to its target, and the file mode stays.

    Raises OSError, naming path and disk, when the file cannot be written, and ValueError when
    `path` is not a regular file or `state` holds what `load` would refuse. The old file stays.
    """
    path = _target(path)
    try:
        with _partial_file(path) as file:
            if path.exists():
                os.chmod(file.name, stat.S_IMODE(path.stat().st_mode))
            torch.save(state, file)
            file.flush()  # torch.save does it, too, but does not promise to
            _require_loadable(path, file.name)
            os.fsync(file.fileno())  # the data first: a name must never lead to half a file
            if os.name == "nt":
                file.close()  # Windows renames no open file
            os.replace(file.name, path)
        _sync_folder(path.parent)
    except (RuntimeError, OSError) as error:
        cause = _os_error(error)
        if cause is None:
            raise
        raise OSError(cause.errno, _cannot_save(path, cause)) from error


def require_writable(path: str | Path) -> None:
    """Raise now what `save_atomic` would raise for this path: before hours of training, not after.

    Makes the folder when there is none, and removes what dead processes left of their saves.
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial_file(_target(path)):
        pass


def _target(path: str | Path) -> Path:
    """Return the file behind `path`: a link to a larger disk is there to be followed."""
    path = Path(os.path.realpath(Path(path).expanduser()))
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: a checkpoint will not replace it")
    return path


@contextmanager
def _partial_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file beside `path` under a name that nobody else has; in the end it is gone."""
    _remove_leftovers(path)
    while True:
        part = path.with_name(f"{_stem(path)}.{secrets.token_hex(4)}.partial")
        file = open(part, "xb")  # "x": it must be new, and no link is followed
        try:
            with file:
                _lock(file, wait=True)
                if part.exists():  # else: taken for a dead writer's, just before it was locked
                    yield file
                    return
        finally:
            part.unlink(missing_ok=True)  # after the rename there is nothing to remove


def _remove_leftovers(path: Path) -> None:
    """Remove the partial files of writers that were killed. The living hold a lock on theirs."""
    for part in path.parent.glob(f"{glob.escape(_stem(path))}.{'[0-9a-f]' * 8}.partial"):
        try:
            with open(part, "rb+") as file:
                if _lock(file, wait=False):
                    part.unlink(missing_ok=True)
        except (FileNotFoundError, PermissionError):
            continue  # renamed or removed meanwhile, or another user's


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    """Take the lock that ends with its process; False when a living process has it.

    False, too, on file systems without locks (some network ones): there nothing is removed.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _stem(path: Path) -> str:
    return path.name[:50]  # a name has at most 255 bytes, a character up to 4


def _require_loadable(path: Path, part: str) -> None:
    """Refuse now what `load` would refuse later, when there is no other copy."""
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(part)
    if foreign:
        raise ValueError(
            f"{path} could not be loaded again: expected tensors and plain values, "
            f"got a state that needs {', '.join(sorted(foreign))}"
        )


def _sync_folder(folder: Path) -> None:
    """Bring the rename itself to disk; a folder's entries are data, too."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # SMB and some FUSE file systems cannot sync a folder;
            raise  # the file itself is complete and in its place
    finally:
        os.close(handle)


def _os_error(error: BaseException | None) -> OSError | None:
    """Find what the system said: torch.save wraps it in a RuntimeError about file positions."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _cannot_save(path: Path, cause: OSError) -> str:
    disk = path.parent
    while not os.path.ismount(disk):
        disk = disk.parent
    free = shutil.disk_usage(disk).free / 2**20
    return f"{cause.strerror}; cannot save {path} to the disk at {disk}, {free:,.1f} MiB free there"


# --- read -----------------------------------------------------------------------------------------


def load(path: str | Path, *, expected: set[str]) -> dict[str, Any]:
    """Read tensors and plain values, never code; ValueError when it is not such a file.

    expected: the keys that the checkpoint must have. Every byte is compared with the checksums
    in the file, which torch.load does not do.
    """
    path = Path(path).expanduser()
    with open(path, "rb") as file:
        state, problem = _read(file)
    if problem:
        raise ValueError(f"{path} is not a readable checkpoint: {problem}")
    got = sorted(state) if isinstance(state, dict) else type(state).__name__
    if got != sorted(expected):
        raise ValueError(
            f"{path} is not a checkpoint of this kind: expected {sorted(expected)}, got {got}"
        )
    return state


def _read(file: BinaryIO) -> tuple[Any, str]:
    """Return what is in the file, or what is wrong with it."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            # no checksum covers these: torch takes one flipped bit here for the mark of a folder
            # and returns memory that nobody has written to
            marked = [entry.filename for entry in archive.infolist() if entry.external_attr]
        if damaged is not None or marked:
            return None, f"{damaged or marked[0]} is damaged, its checksum or its entry is wrong"
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True), ""
    except UnpicklingError as error:  # torch's own text recommends the unsafe way
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = name[1] if name else "code"
        return None, f"expected tensors and plain values only, it needs {what}"
    except Exception as error:  # damaged bytes fail in a dozen ways; they are data, not our bugs
        return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# --- compare, before anything changes -------------------------------------------------------------


def require_same_tensors(path: str | Path, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise ValueError naming each tensor that is missing, unknown, or of other shape or dtype."""

    def kinds(state: dict[str, Any]) -> dict[str, str]:
        tensors = {name: t for name, t in state.items() if isinstance(t, Tensor)}
        return {name: f"{list(t.shape)} {t.dtype}" for name, t in tensors.items()}

    differ = _differences(kinds(here), kinds(there))
    if differ:
        raise ValueError(f"{path} holds another model; {differ}")


def require_same_settings(path: str | Path, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise ValueError naming each setting that two halves of one run do not share."""
    differ = _differences(here, there)
    if differ:
        raise ValueError(
            f"{path} was trained with other settings; {differ} "
            "(to change one on purpose: load with the old one, then set the new one)"
        )


def _differences(here: dict[str, Any], there: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: expected {here.get(name)}, got {there.get(name)}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    )


def optimizer_settings(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, scheduled: bool
) -> dict[str, Any]:
    """Return kind, options, and the names of the parameters in each group, in their order.

    scheduled: a schedule sets the learning rate; then only the ratios between the groups count.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options = dict(group)
        options["params"] = [names[id(p)] for p in group["params"]]
        options.pop("param_names", None)  # as PyTorch knows them, with a wrapper's "module."
        options["lr"] = options.pop("initial_lr")
        if scheduled:
            del options["lr"]
            options["lr / first lr"] = rate_ratio(group, optimizer)
        for option, value in options.items():
            settings[f"group {number} {option}"] = value
    return settings


def rate_ratio(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> float:
    """Return the group's learning rate as a multiple of the first group's, as both began."""
    rate, first = group["initial_lr"], optimizer.param_groups[0]["initial_lr"]
    if rate == first:
        return 1.0
    if first == 0:
        raise ValueError(f"the first group's lr is 0: the ratio of another's, {rate}, is undefined")
    return rate / first


def require_optimizer_state(
    path: str | Path, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Raise ValueError when `state`, an optimizer's state_dict, does not fit its parameters.

    Shapes are compared for torch's own optimizers, whose tensors broadcast to their parameter (as
    the moments of Adam, or the rows and columns of Adafactor); others may keep what they like.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = type(optimizer).__module__.startswith("torch.optim")
    for number, entries in state["state"].items():
        if number not in range(len(parameters)):
            raise ValueError(f"{path}: the optimizer has no parameter number {number}")
        want = parameters[number].shape
        for name, value in entries.items():
            if known and isinstance(value, Tensor) and not _broadcasts(value.shape, want):
                raise ValueError(
                    f"{path}: {name} of the optimizer's parameter {number}: expected "
                    f"{list(want)}, got {list(value.shape)}"
                )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in pairs)


def require_scaler_state(path: str | Path, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise ValueError unless `there`, a GradScaler's state_dict, has the numbers that `here` has.

    An empty state is that of a scaler that is turned off.
    """
    right = isinstance(there, dict) and there.keys() == here.keys()
    if not right or not all(_is_number(value) for value in there.values()):
        raise ValueError(f"{path}: scaler: expected numbers for {sorted(here)}, got {there}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < float("inf")


# --- random state ---------------------------------------------------------------------------------


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
        with torch.accelerator.device_index(device.index):
            state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def require_rng_state(path: str | Path, state: dict[str, Any], device: torch.device) -> None:
    """Raise ValueError unless `set_rng_state` can restore it: generators of no importance try."""
    if device.type not in state:
        raise ValueError(
            f"{path}: random state of {sorted(state)} cannot resume on {device.type!r}"
        )
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(tuple(state["numpy"]))
        torch.Generator().set_state(state["cpu"])
        torch.Generator(device).set_state(state[device.type])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path}: random state does not fit: {error}") from error


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).set_rng_state(state[device.type])
