"""Chapter 06: what may watch a Trainer — bar, history, TensorBoard, checkpoints, early stop."""

# Under DDP `Checkpoints` and `EarlyStopping` belong on every rank, the others on one or on all.

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm  # text: the same in a terminal, a notebook and a log

from helpers import checkpoint
from helpers.training import Trainer, mean_over_ranks

Metrics = dict[str, Tensor]


class ProgressBar:
    """A tqdm bar over the run; it starts where a resumed run starts.

    every: write the metrics every so many steps; reading one waits for the device.
    """

    def __init__(self, every: int = 10):
        self.every, self.bar = _period(every), None

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if self.bar is not None and self.bar.n != trainer.step - 1:  # of a run that was broken off
            self.bar.close()
            self.bar = None
        if self.bar is None:
            self.bar = tqdm(total=trainer.config.steps, initial=trainer.step - 1, unit="step")
        self.bar.update()

        if trainer.finished or trainer.step % self.every == 0:
            self.bar.set_postfix({k: f"{v.item():.3g}" for k, v in metrics.items()})
        if trainer.finished:
            self.bar.close()
            self.bar = None


class History:
    """Keep metrics as lists: history["loss"][i] belongs to history["step"][i].

    measure: extra metrics, e.g. ``{"accuracy": lambda trainer: …}``, taken every `every` steps
    and at the last one.
    """

    def __init__(
        self, every: int = 1, measure: dict[str, Callable[[Trainer], float]] | None = None
    ):
        self.every = _period(every)
        self.measure = {} if measure is None else measure
        self.values: dict[str, list[float]] = defaultdict(list)

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.step % self.every != 0 and not trainer.finished:
            return
        self.values["step"].append(trainer.step)
        for name, value in metrics.items():
            self.values[name].append(value.item())
        for name, measure in self.measure.items():
            self.values[name].append(measure(trainer))

    def __getitem__(self, name: str) -> list[float]:
        if name not in self.values:
            raise KeyError(f"no metric {name!r}; recorded: {sorted(self.values)}")
        return self.values[name]


class TensorBoard:
    """Write scalars every `every` steps and at the last one; `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, every: int = 1):
        self.every = _period(every)
        self.writer = SummaryWriter(folder)

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.finished or trainer.step % self.every == 0:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value.item(), trainer.step)
        if trainer.finished:
            self.writer.flush()  # a thread of its own writes, seconds later


class Checkpoints:
    """Save every `every` steps and at the last one, always under the same name.

    Raises OSError or ValueError at once when nothing can be written there.
    """

    def __init__(self, path: str | Path, every: int):
        self.path, self.every = Path(path), _period(every)
        checkpoint.require_writable(self.path)

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.finished or trainer.step % self.every == 0:
            trainer.save(self.path)


class EarlyStopping:
    """End the run once `measure` (lower is better) has not improved for `patience` looks.

    It looks every `every` steps, and leaves the best look's weights in the model. Put it first:
    the watchers behind it then know that this step is the last. A resumed run counts anew.
    Under DDP the mean of all ranks' measures decides, so that all stop together.
    """

    def __init__(self, measure: Callable[[Trainer], float], *, every: int, patience: int):
        self.measure, self.every = measure, _period(every)
        if patience < 1:
            raise ValueError(f"patience must be at least 1 look, got {patience}")
        self.patience = patience
        self.best = math.inf
        self.best_step = 0
        self.looks = 0  # since the best one
        self.weights: dict[str, Tensor] = {}

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.step % self.every != 0 and not trainer.finished:
            return

        value = self.measure(trainer)
        if dist.is_initialized():
            value = torch.tensor(value, dtype=torch.float64, device=trainer.device)
            value = mean_over_ranks(value).item()
        self.looks += 1
        if value < self.best:  # never true for NaN
            self.best, self.best_step, self.looks = value, trainer.step, 0
            self.weights = {name: t.clone() for name, t in trainer.model.state_dict().items()}

        if self.looks >= self.patience:
            trainer.stop()
        if trainer.finished and self.weights:
            trainer.model.load_state_dict(self.weights)


def _period(every: int) -> int:
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    return every
