"""Chapter 06: what the Trainer, and Lightning's, cost on top of the same loop written by hand.

Two models, a small one (where overhead shows) and the book's ConvNet; all loops make the same
updates on the same batches:

    bare        forward, backward, update, zero_grad: nothing is read back, nothing is checked
    checked     the same, and after each backward the gradient's norm is taken and read back with
                the loss: what it costs to notice in time that one of them is not finite
    trainer     which checks as well
    lightning   `barebones`, with all that can be turned off turned off; it checks nothing

Chunks of steps take turns, in an order that changes, with one of Lightning's between, so that a
slow moment of the machine hits all; a row gives the quantiles of a chunk's time per step and of the
paired ratios.
"""

import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable
from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from helpers import environment, models, timing
from helpers.page import records
from helpers.training import TrainConfig, Trainer

PAIRS, WARM_UP = 400, 3
CHUNKS = {"MLP 784-256-10, batch 64": 20, "ConvNet, batch 125": 2}  # steps in turn
UNITS = {"model": "name", "bare": "ms", "checked": "ms", "trainer": "ms", "lightning": "ms"}
UNITS |= {"ratio": "trainer / bare", "checked_ratio": "checked / bare"}
UNITS |= {"own_ratio": "trainer / checked", "lightning_ratio": "lightning / bare"}


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
    """The loop of every tutorial; the device is never waited for."""
    for _ in range(steps):
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def checked_chunk(steps: int, model, optimizer, batch) -> None:
    """The same loop, which stops before an update that would spoil the weights."""
    for _ in range(steps):
        loss = cross_entropy(model, batch)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        values = torch.stack([loss.detach(), norm]).tolist()
        if not all(map(math.isfinite, values)):
            raise FloatingPointError(f"loss and gradient norm are {values}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def trainer_chunk(steps: int, trainer: Trainer, batch) -> None:
    trainer.config = TrainConfig(steps=trainer.step + steps)
    trainer.fit(lambda number: itertools.repeat(batch))


def clock(run, steps: int, device: torch.device, *arguments) -> float:
    """Milliseconds per step of one chunk."""
    return timing.host_ms(partial(run, steps, *arguments), device) / steps


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

    def __init__(self, steps: int, device: torch.device, others: Callable[[], None]):
        self.steps, self.device, self.others, self.times = steps, device, others, []

    def on_train_start(self, trainer, module) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        if (index + 1) % self.steps == 0:
            timing.wait_for(self.device)
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
    jobs = [job(name, device) for _ in range(4)]
    bare, checked, ours, lightning = jobs
    batch = bare[2]
    trainer = Trainer(ours[0], ours[1], cross_entropy, TrainConfig(steps=1))
    loops = {
        "bare": (bare_chunk, bare),
        "checked": (checked_chunk, checked),
        "trainer": (trainer_chunk, (trainer, batch)),
    }
    columns = {loop: [] for loop in loops}

    def others() -> None:
        order = list(loops)
        if len(columns["bare"]) % 2:
            order.reverse()
        for loop in order:
            run, arguments = loops[loop]
            columns[loop].append(clock(run, CHUNKS[name], device, *arguments))

    turns = Turns(CHUNKS[name], device, others)
    fit(Module(*lightning[:2]), turns, batch, device)
    columns["lightning"] = turns.times

    weights = [nn.utils.parameters_to_vector(j[0].to(device).parameters()) for j in jobs]
    if not all(torch.equal(weights[0], other) for other in weights[1:]):
        raise AssertionError(f"{name}: the loops do not make the same updates")

    columns = {loop: times[WARM_UP:] for loop, times in columns.items()}
    for column, unit in UNITS.items():
        above, _, below = unit.partition(" / ")
        if below:
            pairs = zip(columns[above], columns[below], strict=True)
            columns[column] = [a / b for a, b in pairs]
    return {"model": name} | {column: timing.quantiles(columns[column]) for column in columns}


def measure(device: torch.device) -> records.Record:
    clock = f"perf_counter over {' and '.join(map(str, CHUNKS.values()))} steps, in turns"
    provenance = records.provenance(environment.versions(device), repeats=PAIRS, clock=clock)
    return records.Record("training", provenance, UNITS, [compare(n, device) for n in CHUNKS])
