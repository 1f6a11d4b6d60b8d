"""A job of the Trainer under DDP whose ranks are killed; importable, and a program for torchrun."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers import callbacks, distributed
from tests import training_job

STEPS = 80


def train_until_killed(folder, kills):
    """The Trainer's job under DDP, with a checkpoint at every second step.

    kills: one a start of the job, as many as are left: (rank, seconds after the group is there).
    """
    torch.set_num_threads(1)  # sums in another order have other bits; launchers set other numbers
    path = Path(folder, "checkpoint.pt")
    starts = Path(folder, "starts.txt")
    with distributed.process_group("gloo", timeout=60) as place:
        trainer = training_job.make_trainer(wrap=DistributedDataParallel, steps=STEPS)
        random.seed(place.rank), np.random.seed(place.rank), torch.manual_seed(place.rank)
        number = len(starts.read_text("ascii").splitlines()) if starts.exists() else 0
        if path.exists():
            trainer.load(path)
        dist.barrier()  # all have read before one writes
        if place.rank == 0:
            with open(starts, "a", encoding="ascii") as file:
                file.write(f"{trainer.step}\n")
        if number < len(kills) and kills[number][0] == place.rank:
            kill = threading.Timer(kills[number][1], os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()
        if not trainer.finished:
            watchers = [callbacks.Checkpoints(path, every=2)]
            trainer.fit(training_job.batches_from, watchers)
        while number < len(kills):  # the end came first: wait for it here
            time.sleep(0.05)
        torch.save(training_job.digest(trainer), Path(folder, f"end{place.rank}.pt"))


def train_by_torchrun(folder, *numbers):
    """The same with `kills` on the command line: rank, milliseconds, rank, milliseconds, …"""
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    train_until_killed(folder, [(rank, ms / 1000) for rank, ms in pairs])


if __name__ == "__main__":
    train_by_torchrun(sys.argv[1], *map(int, sys.argv[2:]))
