"""Chapter 15: checkpoints of sharded training, atomic, which load on another number of ranks."""

import os
import re
import shutil
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from helpers import checkpoint
from helpers.training import Trainer

# A folder for each saved step. Tensors are in the files of torch.distributed.checkpoint (DCP);
# what is a rank's own, and what is no tensor, in a file of its own, which is safe to read:
#
#     runs/step-00000010/.metadata        which piece of which tensor lies where
#                        __0_0.distcp     the pieces that rank 0 has written, and so on
#                        rank-0.pt        step, settings, random state of rank 0, and so on

FORMAT = 1
KEYS = {"version", "torch", "ranks", "config", "step", "tensors", "optimizer_settings"}
KEYS |= {"param_groups", "scaler", "data_seed", "generators"}


def save_sharded(trainer: Trainer, folder: str | Path, *, keep: int = 2) -> Path:
    """Write `folder/step-N` with all that the next step depends on; return its path.

    Every rank must call it. Each writes the parts of parameters and optimizer state that it has;
    of what several have, one writes. The step appears under its name when all ranks have written,
    by one rename, and then older ones are removed but for the last `keep`. When a rank fails, all
    raise, and what was there stays. All ranks must see the same folder.
    Raises FloatingPointError rather than save after a loss that is not finite.
    """
    step = _Step.begin(trainer, folder, keep)
    dcp.save(step.tensors, checkpoint_id=step.part)
    return step.publish(None)


@dataclass
class PendingSave:
    """A save that goes on in a thread; every rank must call `finish`, before it saves again."""

    step: "_Step"
    writing: Future
    group: dist.ProcessGroup

    def finish(self) -> Path:
        """Wait until all ranks have written, then do what ends `save_sharded`; return the path."""
        failure = self.writing.exception()
        if failure is not None:
            # as text: not every exception can travel to the other ranks
            failure = RuntimeError(f"rank {_rank()} could not write {self.step.path}: {failure}")
        return self.step.publish(self.group, failure)


def save_sharded_async(
    trainer: Trainer, folder: str | Path, group: dist.ProcessGroup, *, keep: int = 2
) -> PendingSave:
    """Copy what `save_sharded` would write, and write the copy while training goes on.

    It costs memory of the host: a copy of this rank's parts. group: of all ranks, for this alone
    (`dist.new_group(backend="gloo")`): the thread's collectives must not mix with the training's.
    """
    step = _Step.begin(trainer, folder, keep)
    writing = dcp.async_save(step.tensors, checkpoint_id=step.part, process_group=group)
    return PendingSave(step, writing, group)


def load_sharded(trainer: Trainer, folder: str | Path) -> Path:
    """Continue from the newest complete step in `folder`, on any number of ranks; return its path.

    Every rank must call it. Parameters and optimizer state are those saved, to the bit, cut anew
    for these ranks. Random states belong to ranks: with another number of them, each keeps its own
    generators as they are, and a warning says so; with the same number, training goes on to the
    same bits. ValueError, and nothing changed, when settings or tensors differ.

    DCP reads `.metadata` with pickle, which can run code: load no folder of a stranger's.
    """
    failure, ranks = None, _ranks()
    fresh = not trainer.optimizer.state
    try:
        path = newest(folder)
        first = checkpoint.load(path / "rank-0.pt", expected=KEYS)
        same_ranks = first["ranks"] == ranks
        own = first
        if same_ranks:
            own = checkpoint.load(path / f"rank-{_rank()}.pt", expected=KEYS)
        tensors = _tensors(trainer, with_state=own["param_groups"] is not None)
        _require_fit(path, trainer, own, tensors)
    except (OSError, ValueError) as error:
        failure = error
    try:
        _raise_together(failure, None)
    except (OSError, ValueError):
        if fresh:
            trainer.optimizer.state.clear()
        raise

    dcp.load(tensors, checkpoint_id=path)
    set_model_state_dict(trainer.model, tensors["model"])
    if own["param_groups"] is None:
        trainer.optimizer.state.clear()
    else:
        state = {"state": tensors["optimizer"], "param_groups": own["param_groups"]}
        set_optimizer_state_dict(trainer.model, trainer.optimizer, state)
    trainer.scaler.load_state_dict(own["scaler"])
    trainer.step, trainer.skipped, trainer.unread = own["step"], 0, []
    trainer.data_seed = own["data_seed"]
    if same_ranks:
        checkpoint.set_rng_state(own["generators"], trainer.device)
    else:
        warnings.warn(
            f"{path} was saved by {first['ranks']} ranks, here are {ranks}: weights and optimizer "
            "are the same, the random generators of the ranks are not",
            stacklevel=2,
        )
    return path


def newest(folder: str | Path) -> Path:
    """Return the complete step in `folder` with the largest number; FileNotFoundError if none."""
    found = _steps(Path(folder).expanduser())
    if not found:
        raise FileNotFoundError(f"no complete step-N in {folder}")
    return found[-1]


def _steps(folder: Path) -> list[Path]:
    named = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(named, key=lambda p: int(p.name.removeprefix("step-")))


# What is saved


def _tensors(trainer: Trainer, *, with_state: bool) -> dict[str, Any]:
    """Return {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, …}}}.

    The tensors are the model's and the optimizer's own, DTensors where they are sharded.
    with_state: an optimizer without a state gets one: PyTorch makes a step with a learning rate of
    0 and gradients of 0, which counts as a step. So only for a load, which overwrites it.
    """
    tensors = {"model": get_model_state_dict(trainer.model), "optimizer": {}}
    if with_state:
        if not trainer.optimizer.state:
            trainer.model.zero_grad(set_to_none=True)  # or PyTorch makes no state
        state = get_optimizer_state_dict(trainer.model, trainer.optimizer)
        tensors["optimizer"] = state["state"]
    return tensors


def _kinds(tensors: dict[str, Any]) -> dict[str, str]:
    named = dict(tensors["model"])
    for name, entries in tensors["optimizer"].items():
        named |= {f"{entry} of {name}": value for entry, value in entries.items()}
    return {n: f"{list(t.shape)} {t.dtype}" for n, t in named.items() if isinstance(t, Tensor)}


def _require_fit(
    path: Path, trainer: Trainer, own: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Raise ValueError unless all of it can be loaded; change nothing."""
    if own["version"] != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {own['version']}")
    checkpoint.require_same_settings(path, trainer._settings(), own["config"])
    checkpoint.require_same_settings(path, _kinds(tensors), own["tensors"])
    asked = trainer._optimizer_settings
    checkpoint.require_same_settings(path, asked, own["optimizer_settings"])
    checkpoint.require_scaler_state(path, trainer.scaler.state_dict(), own["scaler"])
    checkpoint.require_rng_state(path, own["generators"], trainer.device)


# How it is written


@dataclass
class _Step:
    """A step on its way to disk: `part` becomes `path` when all ranks are done."""

    path: Path
    part: Path
    tensors: dict[str, Any]
    keep: int

    @classmethod
    def begin(cls, trainer: Trainer, folder: str | Path, keep: int) -> "_Step":
        """Write what is this rank's own; return what is left to write."""
        if keep < 1:
            raise ValueError(f"expected to keep at least 1 step, got {keep}")
        trainer._read_back()
        path = Path(folder).expanduser() / f"step-{trainer.step:08d}"
        part = path.with_name(f"{path.name}.partial")
        failure = None
        if _rank() == 0:
            try:
                shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
                part.mkdir(parents=True)
            except OSError as error:
                failure = error
        _raise_together(failure, None)

        has_state = bool(trainer.optimizer.state)  # not before the first step, nor with plain SGD
        tensors = _tensors(trainer, with_state=has_state)
        groups = None
        if has_state:
            groups = get_optimizer_state_dict(trainer.model, trainer.optimizer)["param_groups"]
        state = {
            "version": FORMAT,
            "torch": str(torch.__version__),
            "ranks": _ranks(),
            "config": trainer._settings(),
            "step": trainer.step,
            "tensors": _kinds(tensors),
            "optimizer_settings": trainer._optimizer_settings,
            "param_groups": groups,
            "scaler": trainer.scaler.state_dict(),
            "data_seed": trainer.data_seed,
            "generators": checkpoint.rng_state(trainer.device),
        }
        try:
            checkpoint.save_atomic(state, part / f"rank-{_rank()}.pt")
        except (OSError, ValueError) as error:
            failure = error
        _raise_together(failure, None)
        return cls(path, part, tensors, keep)

    def publish(
        self, group: dist.ProcessGroup | None, failure: BaseException | None = None
    ) -> Path:
        """Give the folder its name, once every rank is here; on rank 0, then all return."""
        _raise_together(failure, group)
        if _rank() == 0:
            try:
                if self.path.exists():  # saved twice at one step: the new one counts
                    _remove(self.path)
                os.replace(self.part, self.path)
                for old in _steps(self.path.parent)[: -self.keep]:
                    _remove(old)
            except OSError as error:
                failure = error
        _raise_together(failure, group)
        return self.path


def _remove(step: Path) -> None:
    """Remove a complete step: first its name, or a half-removed one would pass for complete."""
    leaving = step.with_name(f"{step.name}.removed")
    shutil.rmtree(leaving, ignore_errors=True)  # of a run that was killed here
    os.replace(step, leaving)
    shutil.rmtree(leaving)


def _raise_together(failure: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if one has failed, so that none waits for it for ever."""
    failures = [failure]
    if dist.is_initialized():
        failures = [None] * _ranks()
        dist.all_gather_object(failures, failure, group=group)
    for failed in failures:
        if failed is not None:
            raise failed


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
