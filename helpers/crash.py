"""Chapter 06: a job to be killed and resumed, with everything in it that a checkpoint must hold."""

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import callbacks, checkpoint, data, schedules
from helpers.training import TrainConfig, Trainer

STEPS = 24
rate = partial(schedules.warmup_cosine, peak=0.01, warmup=6, total=STEPS)


def make_trainer() -> Trainer:
    """Dropout draws random numbers, AdamW keeps moments, the rate moves, float16 needs a scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    config = TrainConfig(steps=STEPS, clip_norm=1.0, amp_dtype=torch.float16)
    return Trainer(model, torch.optim.AdamW(model.parameters()), steep_loss, config, rate)


def steep_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """100 times the cross-entropy: float16 gradients overflow until the scaler has come down."""
    return 100 * F.cross_entropy(model(batch[0]), batch[1])


def finish(
    folder: Path, state: dict | None = None, watch: Sequence = (), reset: str = ""
) -> Tensor:
    """Train on ``data.pt`` to the end, from `state` if there is one; return all weights [P].

    reset: "rate" or "data" starts over at step 0, as resuming without its position would.
    """
    images, labels = torch.load(folder / "data.pt", weights_only=True)  # [N, 784], [N]
    trainer, feed = make_trainer(), partial(data.batches, images, labels, size=100, seed=5)
    if state:
        checkpoint.save_atomic(state, folder / "state.pt")
        trainer.load(folder / "state.pt")
    back = {name: trainer.step if reset == name else 0 for name in ("rate", "data")}
    trainer.lr_at = lambda step: rate(step - back["rate"])
    trainer.fit(lambda start: feed(start=start - back["data"]), watch)
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def run(folder: Path, hang_at: int = 0, in_write: int = 0) -> Tensor:
    """Go on from ``checkpoint.pt``, if it is there, and save to it every four steps.

    hang_at: after this step wait to be killed; in_write=1: while its checkpoint is being written.
    """

    def hang(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        if trainer.step == hang_at:
            os.fsync = lambda *_: print("waiting", flush=True) or time.sleep(600)
            _ = in_write or os.fsync()

    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=True) if path.exists() else None
    return finish(folder, state, [hang, callbacks.Checkpoints(path, every=4)])


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
