"""Chapter 07: full MNIST — how good, and how soon at 99 %, against two well-known recipes.

Four recipes, interleaved seed by seed in one process on the same machine, the slow baselines for
the first seeds only:

    book-fast   the book's ConvNet, one epoch, tuned to pass 99 % early
    book        the book's ConvNet, for accuracy
    example     the official PyTorch MNIST example, from its published hyperparameters:
                conv 32 and 64, dropout 0.25 and 0.5, fully connected 128, Adadelta lr 1.0 falling
                by 0.7 an epoch, batch 64 (github.com/pytorch/examples, mnist)
    adam        the recipe of many tutorials: conv-pool twice, fully connected 128, Adam 1e-3,
                batch 64, 15 epochs

The clock runs while training and stands while testing. The two baselines end with the first epoch
that tests at 99 %: their accuracy column is the accuracy at that moment, not after all epochs.
The book's recipes run to their end; their seconds count all of it, as their last step is at 99 %.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from helpers import data, environment, mnist, timing
from helpers.page import records

SEEDS = range(5)
BASELINE_SEEDS = range(3)  # minutes each, and their spread is small beside the gap
FAST = mnist.Recipe(
    epochs=1,  # cannot overfit: neither augmentation nor dropout
    degrees=0,
    shift=0,
    dropout=0,
    width=16,
    batch_size=100,
    weight_decay=0.2,
    label_smoothing=0.1,
)
UNITS = {
    "recipe": "name",
    "seed": "number",
    "epochs": "count",
    "test_accuracy": "fraction",
    "errors": "count",
    "train_seconds": "s",
    "seconds_to_99": "s",
    "cpu_seconds_to_99": "s",
}


def book(digits: data.Digits, recipe: mnist.Recipe, seed: int, device: torch.device) -> Iterator:
    """One yield, the finished model: a one-cycle run is good at its end, not before."""
    yield mnist.train(digits, recipe, seed=seed, device=device)


def example_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 10),
    )  # fmt: skip


def adam_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def baseline(
    net: Callable, optimizer: Callable, gamma: float, epochs: int, seed: int, device: torch.device
) -> Iterator[nn.Module]:
    """Train as these scripts do, image by image through a DataLoader; yield after each epoch."""
    torch.manual_seed(seed)
    to_tensor = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((data.MEAN,), (data.STD,))]
    )
    folder = os.environ["PYTORCH_BOOK_DATA"]
    loader = DataLoader(datasets.MNIST(folder, transform=to_tensor), batch_size=64, shuffle=True)
    model = net().to(device)
    opt = optimizer(model.parameters())
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            opt.step()
        for group in opt.param_groups:
            group["lr"] *= gamma
        yield model


def runs(digits: data.Digits, seed: int, device: torch.device) -> dict[str, Iterator[nn.Module]]:
    def adadelta(p: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adadelta(p, lr=1.0)

    def adam(p: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(p, lr=1e-3)

    ours = {
        "book-fast": book(digits, FAST, seed, device),
        "book": book(digits, mnist.Recipe(), seed, device),
    }
    theirs = {
        "example": baseline(example_net, adadelta, 0.7, 14, seed, device),
        "adam": baseline(adam_net, adam, 1.0, 15, seed, device),
    }
    return ours | (theirs if seed in BASELINE_SEEDS else {})


def row(
    name: str,
    seed: int,
    models: Iterator[nn.Module],
    digits: data.Digits,
    device: torch.device,
) -> dict:
    """Train to the end, or to the first tested epoch at 99 %; stop the clock while testing."""
    ours = {"book-fast": FAST.epochs, "book": mnist.Recipe().epochs}
    wall = cpu = 0.0
    epochs, accuracy = 0, 0.0

    while accuracy < 0.99:  # the book's recipes yield once
        timing.wait_for(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        model = next(models, None)
        timing.wait_for(device)
        wall += time.perf_counter() - start
        cpu += time.process_time() - cpu_start
        if model is None:
            break
        epochs += 1
        accuracy = mnist.accuracy(model, digits.test_images, digits.test_labels)

    reached = accuracy >= 0.99
    result = {
        "recipe": name,
        "seed": seed,
        "epochs": ours.get(name, epochs),
        "test_accuracy": round(accuracy, 4),
        "errors": round((1 - accuracy) * len(digits.test_labels)),
        "train_seconds": round(wall, 2),
        "seconds_to_99": round(wall, 2) if reached else None,
        "cpu_seconds_to_99": round(cpu, 2) if reached else None,
    }
    print(result, flush=True)
    return result


def measure(device: torch.device) -> records.Record:
    digits = data.mnist()
    if digits.source != "full MNIST":
        raise RuntimeError("this benchmark needs full MNIST: set PYTORCH_BOOK_DATA to its folder")
    provenance = records.provenance(
        environment.versions(device), repeats=len(SEEDS), clock="perf_counter, training only"
    )
    rows = []
    for seed in SEEDS:
        for name, models in runs(digits, seed, device).items():
            rows.append(row(name, seed, models, digits, device))
    return records.Record("mnist", provenance, UNITS, rows)
