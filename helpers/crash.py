"""Chapter 06: a job to be killed and resumed, with everything in it that a checkpoint must hold."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from helpers import callbacks, checkpoint, data, mnist, schedules
from helpers.training import TrainConfig, Trainer

STEPS = 24
rate = partial(schedules.warmup_cosine, peak=0.01, warmup=6, total=STEPS)


def make_trainer() -> Trainer:
    """Dropout draws random numbers, AdamW keeps moments, float16 needs a scale that settles."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    config = TrainConfig(steps=STEPS, clip_norm=1.0, amp_dtype=torch.float16)
    adamw = torch.optim.AdamW(model.parameters())
    trainer = Trainer(model, adamw, mnist.classification_loss, config, rate)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # overflows at first
    return trainer


def finish(folder: Path, state: dict | None = None, watch: tuple = (), reset: str = "") -> Tensor:
    """Train on ``data.pt`` to the end, from `state` if there is one; return all weights [P].

    reset: "rate" or "data" starts over at step 0, as resuming without its position would.
    """
    images, labels = torch.load(folder / "data.pt", weights_only=True)  # [N, 784], [N]
    trainer, feed = make_trainer(), partial(data.batches, images, labels, size=100, seed=5)
    if state:
        checkpoint.save_atomic(state, folder / "state.pt")
        trainer.load(folder / "state.pt")
    now = trainer.step
    trainer.lr_at = lambda step: rate(step - now * (reset == "rate"))
    if not trainer.finished:
        trainer.fit(lambda start: feed(start=start - now * (reset == "data")), watch)
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def run(folder: Path, hang_at: int = 0, in_write: int = 0) -> Tensor:
    """Go on from ``checkpoint.pt``, if it is there, and save to it every four steps.

    hang_at: after this step wait to be killed; in_write=1: while its checkpoint is being written.
    """
    path = folder / "checkpoint.pt"

    def hang(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        if trainer.step == hang_at:
            os.fsync = lambda *_: print("waiting", flush=True) or time.sleep(600)
            if not in_write:
                os.fsync()

    state = torch.load(path, weights_only=True) if path.exists() else None
    return finish(folder, state, (hang, callbacks.Checkpoints(path, every=4)))


def killed(folder: Path, *hang: int) -> bool:
    """Do `run` in another process; kill it once it waits, and tell whether it was."""
    arguments = [str(folder), *map(str, hang)]
    command = [sys.executable, "-m", "helpers.crash", *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=env) as process:
        for line in process.stdout:
            if line == "waiting\n":
                process.kill()  # SIGKILL: no chance to tidy up
    if process.returncode and not hang:
        raise RuntimeError(f"expected a job that ends, got code {process.returncode}")
    return process.returncode != 0


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
