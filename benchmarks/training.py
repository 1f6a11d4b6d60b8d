"""Chapter 06: what the Trainer, and Lightning's, cost on top of the same loop written by hand.

Two models, a small one (where overhead shows) and the book's ConvNet; all loops make the same
updates on the same batches. Chunks of steps alternate A B B A, with one of Lightning's between,
so that a slow moment of the machine hits all; a row gives the quantiles of a chunk's time per step
and of the paired ratios. Lightning runs `barebones`: with all that can be turned off turned off.
"""

import logging
import time
import warnings
from collections.abc import Callable

import lightning as L
import torch
import torch.nn.functional as F

from helpers import environment, models, timing
from helpers.page import records
from helpers.training import TrainConfig, Trainer

PAIRS, WARM_UP = 400, 3
CHUNKS = {"MLP 784-256-10, batch 64": 10, "ConvNet, batch 125": 2}  # steps in turn
UNITS = {"model": "name", "bare": "ms", "trainer": "ms", "lightning": "ms"}
UNITS |= {"ratio": "trainer / bare", "lightning_ratio": "lightning / bare"}


def job(name: str, device: torch.device):
    torch.manual_seed(0)
    if name.startswith("MLP"):
        model, x = models.MLP(784, 256, 10), torch.randn(64, 784)
    else:
        model, x = models.ConvNet(dropout=0), torch.randn(125, 1, 28, 28)  # no RNG
    model, x = model.to(device).train(), x.to(device)
    y = torch.randint(10, (len(x),), device=device)
    return model, torch.optim.AdamW(model.parameters()), (x, y)


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def bare_chunk(steps: int, model, optimizer, batch) -> None:
    """The five steps and one look at the loss, without which nobody trains."""
    for _ in range(steps):
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not loss.item() < float("inf"):
            raise FloatingPointError(f"loss is {loss.item()}")


def trainer_chunk(steps: int, trainer: Trainer, batches) -> None:
    for _ in range(steps):
        trainer.train_step(batches)


def clock(run, steps: int, *arguments) -> float:
    """Milliseconds per step of one chunk; `loss.item()` has waited for the device."""
    start = time.perf_counter()
    run(steps, *arguments)
    return (time.perf_counter() - start) / steps * 1e3


class Module(L.LightningModule):
    """The same job for Lightning."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.made = model, optimizer

    def training_step(self, batch, index):
        return cross_entropy(self.model, batch)

    def configure_optimizers(self):
        return self.made


class Turns(L.Callback):
    """After each chunk of Lightning's steps, note its time and let the others have their turn."""

    def __init__(self, steps: int, others: Callable[[], None]):
        self.steps, self.others, self.times = steps, others, []

    def on_train_start(self, trainer, module) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        if (index + 1) % self.steps == 0:
            outputs["loss"].item()  # has waited for the device
            self.times.append((time.perf_counter() - self.start) / self.steps * 1e3)
            self.others()
            self.start = time.perf_counter()


def fit(module: Module, turns: Turns, batch, device: torch.device) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    steps = turns.steps * (PAIRS + WARM_UP)
    with warnings.catch_warnings(action="ignore"):  # of deprecations inside it
        trainer = L.Trainer(
            accelerator=device.type, devices=1, max_steps=steps, barebones=True, callbacks=[turns]
        )
        trainer.fit(module, (batch for _ in range(steps)))


def compare(name: str, device: torch.device) -> dict:
    model, optimizer, batch = job(name, device)
    other, other_optimizer, _ = job(name, device)
    third = Module(*job(name, device)[:2])
    trainer = Trainer(other, other_optimizer, cross_entropy, TrainConfig(steps=10**9))
    batches = iter(lambda: batch, None)
    bare, ours = [], []

    def others() -> None:
        order = [(bare, bare_chunk, (model, optimizer, batch))]
        order.insert(len(bare) % 2, (ours, trainer_chunk, (trainer, batches)))
        for times, run, arguments in order:
            times.append(clock(run, CHUNKS[name], *arguments))

    turns = Turns(CHUNKS[name], others)
    fit(third, turns, batch, device)
    for a, b, c in zip(*(m.parameters() for m in (model, other, third.model)), strict=True):
        if not (torch.equal(a, b) and torch.equal(a, c.to(a.device))):
            raise AssertionError(f"{name}: the loops do not make the same updates")
    columns = {"bare": bare, "trainer": ours, "lightning": turns.times}
    columns = {k: times[WARM_UP:] for k, times in columns.items()}
    for column, times in {"ratio": "trainer", "lightning_ratio": "lightning"}.items():
        pairs = zip(columns[times], columns["bare"], strict=True)
        columns[column] = [b / a for b, a in pairs]
    return {"model": name} | {k: timing.quantiles(v) for k, v in columns.items()}


def measure(device: torch.device) -> records.Record:
    clock = f"perf_counter over {' and '.join(map(str, CHUNKS.values()))} steps, alternating"
    provenance = records.provenance(environment.versions(device), repeats=PAIRS, clock=clock)
    return records.Record("training", provenance, UNITS, [compare(n, device) for n in CHUNKS])
