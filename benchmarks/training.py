"""Chapter 06: what the Trainer costs on top of the same loop written by hand.

Two models, a small one (where overhead shows) and the book's ConvNet; both loops make the same
updates on the same batches. Chunks of steps alternate A B B A, so that a slow moment of the
machine hits both; a row gives the quantiles of a chunk's time per step and of the paired ratios.
"""

import time

import torch
import torch.nn.functional as F

from helpers import models, records
from helpers.training import TrainConfig, Trainer

PAIRS, CHUNK = 120, 10
UNITS = {"model": "name", "bare": "ms", "trainer": "ms", "ratio": "trainer / bare"}


def job(name: str, device: torch.device):
    torch.manual_seed(0)
    if name == "MLP 784-256-10, batch 64":
        model, x = models.MLP(784, 256, 10), torch.randn(64, 784)
    else:
        model, x = models.ConvNet(dropout=0), torch.randn(125, 1, 28, 28)  # no RNG
    model, x = model.to(device).train(), x.to(device)
    y = torch.randint(10, (len(x),), device=device)
    return model, torch.optim.AdamW(model.parameters()), (x, y)


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def bare_chunk(model, optimizer, batch) -> None:
    """The five steps and one look at the loss, without which nobody trains."""
    for _ in range(CHUNK):
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not loss.item() < float("inf"):
            raise FloatingPointError(f"loss is {loss.item()}")


def trainer_chunk(trainer: Trainer, batches) -> None:
    for _ in range(CHUNK):
        trainer.train_step(batches)


def clock(run, *arguments) -> float:
    """Milliseconds per step of one chunk; `loss.item()` has waited for the device."""
    start = time.perf_counter()
    run(*arguments)
    return (time.perf_counter() - start) / CHUNK * 1e3


def compare(name: str, device: torch.device) -> dict:
    model, optimizer, batch = job(name, device)
    other, other_optimizer, _ = job(name, device)
    trainer = Trainer(other, other_optimizer, cross_entropy, TrainConfig(steps=10**9))
    batches = iter(lambda: batch, None)
    bare, with_trainer = [], []
    for i in range(-3, PAIRS):  # three to warm up
        order = [(bare, bare_chunk, (model, optimizer, batch))]
        order.insert(i % 2, (with_trainer, trainer_chunk, (trainer, batches)))
        for times, run, arguments in order:
            times.append(clock(run, *arguments))
    bare, with_trainer = bare[3:], with_trainer[3:]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if not torch.equal(p, q):
            raise AssertionError(f"{name}: the two loops do not make the same updates")
    ratios = [b / a for a, b in zip(bare, with_trainer, strict=True)]
    columns = {"bare": bare, "trainer": with_trainer, "ratio": ratios}
    return {"model": name} | {k: records.quantiles(v) for k, v in columns.items()}


def measure(device: torch.device) -> records.Record:
    provenance = records.provenance(
        device, repeats=PAIRS, clock=f"perf_counter over {CHUNK} steps, alternating"
    )
    rows = [compare(n, device) for n in ("MLP 784-256-10, batch 64", "ConvNet, batch 125")]
    return records.Record("training", provenance, UNITS, rows)
