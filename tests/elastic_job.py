"""A job that may lose hosts and win them back: its global batch does not depend on the ranks.

Each update is made from two micro-batches, whoever computes them: one rank adds their gradients,
of two ranks each brings one. a + b is b + a in floating point, too, and halving is exact, so both
ways give the same bits.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from helpers import checkpoint, distributed

MICRO_BATCHES = 2


def micro_batch(step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def train(folder, steps, width=32):
    """Train to `steps` from the checkpoint in `folder`, if there is one; write a line a step.

    Where there is a file gate.txt, no rank goes beyond the step that it names.
    """
    folder = Path(folder)
    path = folder / "checkpoint.pt"
    with distributed.process_group("gloo", timeout=60) as place:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        done = 0
        if path.exists():
            state = checkpoint.load(path, expected={"model", "optimizer", "step"})
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["step"]
        dist.barrier()  # all have read before one writes
        if place.rank == 0:
            note(folder / "joined.txt", done, place.world_size)

        for step in range(done, steps):
            while step >= gate(folder, steps):
                time.sleep(0.02)
            optimizer.zero_grad()
            for number in range(place.rank, MICRO_BATCHES, place.world_size):
                x, y = micro_batch(step, number)
                ((model(x) - y).square().mean() / MICRO_BATCHES).backward()
            flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
            dist.all_reduce(flat)
            for p, summed in zip(
                model.parameters(),
                flat.split([p.numel() for p in model.parameters()]),
                strict=True,
            ):
                p.grad.copy_(summed.view_as(p))
            optimizer.step()
            if place.rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint.save_atomic({**state, "step": step + 1}, path)
                note(folder / "steps.txt", step, place.world_size)
        torch.save(model.state_dict(), folder / f"end{place.rank}.pt")


def note(path, step, ranks):
    with open(path, "a", encoding="ascii") as file:
        file.write(f"{step} {ranks}\n")


def gate(folder, steps):
    path = folder / "gate.txt"
    return int(path.read_text(encoding="ascii") or 0) if path.exists() else steps


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:]))
