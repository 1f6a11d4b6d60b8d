"""Chapter 06: what may watch a Trainer — bar, history, TensorBoard, checkpoints, early stop."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm  # text: the same in a terminal, a notebook and a log

from helpers.training import Trainer

Metrics = dict[str, Tensor]


class ProgressBar:
    """A tqdm bar over the run; it starts where a resumed run starts."""

    def __init__(self, every: int = 10):
        self.every, self.bar = every, None

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if self.bar is None:
            self.bar = tqdm(total=trainer.config.steps, initial=trainer.step - 1, unit="step")
        self.bar.update()
        last = trainer.step == trainer.config.steps
        if last or trainer.step % self.every == 0:  # reading a metric waits for the device
            self.bar.set_postfix({k: f"{v.item():.3g}" for k, v in metrics.items()})
        if last:
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
        self.every, self.measure = every, measure or {}
        self.values: dict[str, list[float]] = defaultdict(list)

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.step % self.every and trainer.step != trainer.config.steps:
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
    """Write scalars for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, every: int = 1):
        self.writer, self.every = SummaryWriter(folder), every

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.step % self.every == 0:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value.item(), trainer.step)
        if trainer.step == trainer.config.steps:
            self.writer.flush()


class Checkpoints:
    """Save every `every` steps and at the last one, always under the same name."""

    def __init__(self, path: str | Path, every: int):
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.path, self.every = Path(path), every
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.step % self.every == 0 or trainer.step == trainer.config.steps:
            trainer.save(self.path)


class EarlyStopping:
    """End the run once `measure` (lower is better) has not improved for `patience` looks.

    It looks every `every` steps, and leaves the best look's weights in the model. Put it first:
    it makes this step the last, as the watchers behind it then see. A resumed run counts anew.
    """

    def __init__(self, measure: Callable[[Trainer], float], *, every: int, patience: int):
        if every < 1 or patience < 1:
            raise ValueError(f"every and patience must be at least 1, got {every} and {patience}")
        self.measure, self.every, self.patience = measure, every, patience
        self.best, self.best_step, self.weights, self.looks = math.inf, 0, {}, 0

    def __call__(self, trainer: Trainer, metrics: Metrics) -> None:
        last = trainer.step == trainer.config.steps
        if trainer.step % self.every and not last:
            return
        value, state, self.looks = self.measure(trainer), trainer.model.state_dict(), self.looks + 1
        if value < self.best:  # never true for NaN
            self.best, self.best_step, self.looks = value, trainer.step, 0
            self.weights = {name: t.clone() for name, t in state.items()}
        if self.looks >= self.patience or last:
            trainer.config = replace(trainer.config, steps=trainer.step)
            trainer.model.load_state_dict(self.weights or state)
