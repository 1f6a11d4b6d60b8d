"""Chapter 06: a job to be killed and resumed, with everything in it that a checkpoint must hold."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import callbacks, data, schedules
from helpers.training import TrainConfig, Trainer

STEPS = 24


def make_trainer() -> Trainer:
    """Dropout draws random numbers, AdamW keeps moments, the rate moves, float16 needs a scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    config = TrainConfig(steps=STEPS, clip_norm=1.0, amp_dtype=torch.float16)
    return Trainer(model, optimizer, steep_loss, config, rate)


def rate(step: int) -> float:
    """Warm-up and cosine."""
    return schedules.warmup_cosine(step, peak=0.01, warmup=6, total=STEPS)


def steep_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy times 100: its float16 gradients overflow until the scaler has come down."""
    return 100 * F.cross_entropy(model(batch[0]), batch[1])


def batches_from(folder: str | Path, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield shuffled batches of ``data.pt`` in `folder`: images [N, 784] and labels [N]."""
    images, labels = torch.load(Path(folder) / "data.pt", weights_only=True)
    return data.batches(images, labels, size=100, seed=5, start=start)


def run(folder: str | Path, stall_at: int = 0) -> Trainer:
    """Train with a checkpoint every four steps, going on from the one that is there.

    stall_at: at this step hang inside the write of the checkpoint, and wait to be killed.
    """
    path, trainer = Path(folder) / "checkpoint.pt", make_trainer()
    if path.exists():
        trainer.load(path)

    def report(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        if trainer.step == stall_at:
            os.fsync = lambda file: print("writing", flush=True) or time.sleep(600)
        print(trainer.step, flush=True)

    watchers = [report, callbacks.Checkpoints(path, every=4)]
    trainer.fit(lambda start: batches_from(folder, start), watchers)
    return trainer


if __name__ == "__main__":
    run(sys.argv[1], *map(int, sys.argv[2:]))
