"""The training script as ranks run it in its tests; importable, and a program for torchrun."""

import math
import os
import signal
import sys
from pathlib import Path

import torch
from torch.func import functional_call

from helpers import train_gpt
from helpers.models import GPT
from helpers.training import Trainer
from tests.rounding import bounds

# Each part that a rank of two holds is a multiple of 32 numbers: no loop of the CPU is left with
# single numbers at its end, which a compiler may round otherwise.
SIZES = ["--layers=2", "--width=64", "--heads=4", "--context=16", "--batch=8", "--steps=8"]
SIZES += ["--warmup=2", "--save-every=4", "--lr=0.003", "--timeout=60"]
SIZES += ["--clip=1e9"]  # not reached: ranks with parts add up a norm in another order

TINY = ["--layers=1", "--width=8", "--heads=2", "--context=4", "--batch=4", "--steps=4"]
TINY += ["--save-every=2"]

UNIT = 2.0**-53  # of float64, in which all of it is computed
EPS = 1e-8  # of AdamW


def parsed(*flags, ranks=1):
    args = train_gpt.flags().parse_args([*SIZES, *map(str, flags)])
    train_gpt.check(args, ranks)
    return args


def several(*runs):
    """Train several times in the same processes; of each run the loss of each step."""
    torch.set_default_dtype(torch.float64)  # the processes end with it
    found = []
    for flags in runs:
        args = parsed(*flags, ranks=int(os.environ["WORLD_SIZE"]))
        found.append(train_gpt.train(args, train_gpt.read_text(args)))
    return found


def groups(*flags):
    """The timeouts in seconds of this rank's groups, and the numbers of their ranks."""
    args = parsed(*flags, ranks=int(os.environ["WORLD_SIZE"]))
    with train_gpt.process_group(timeout=args.timeout) as place:
        mesh = train_gpt.make_mesh(place, args)
        waits = {}
        for name in mesh.mesh_dim_names:
            group = mesh.get_group(name)
            options = group._get_backend(place.device).options
            waits[name] = (mesh[name].mesh.tolist(), options._timeout.total_seconds())
        return waits


class Alone:
    """A mesh of one rank."""

    def size(self):
        return 1

    def get_local_rank(self):
        return 0


def bound_of_tiny_curve():
    """How far rounding in float64 may take the losses of the tiny run from their exact values."""
    args = parsed(*TINY)
    torch.manual_seed(args.seed)
    model = GPT(train_gpt.model_config(args))
    rate_at = train_gpt.learning_rate(args)
    text = train_gpt.read_text(args)
    starts = torch.arange(0, len(text) - args.context, args.context)
    stream = train_gpt.training_batches(text, starts[: -20 * args.batch], args, Alone(), 0)
    data = [next(stream) for _ in range(args.steps)]

    def curve(parameters):
        losses = []
        first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        second = dict(first)
        for step, batch in enumerate(data):
            parameters = {name: p.requires_grad_() for name, p in parameters.items()}
            loss = train_gpt.loss_of(
                lambda x, now=parameters: functional_call(model, now, (x,)), batch
            )
            losses.append(loss)
            slopes = torch.autograd.grad(loss, list(parameters.values()))
            updated = {}
            for (name, p), slope in zip(parameters.items(), slopes, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * slope
                second[name] = 0.95 * second[name] + 0.05 * slope * slope
                # a byte that has not come yet: exactly 0 in any order of sums, and stays it
                unused = second[name] == 0
                root = torch.where(unused, 1.0, second[name]).sqrt()
                root = torch.where(unused, 0.0, root) / math.sqrt(1 - 0.95 ** (step + 1))
                mean = first[name] / (1 - 0.9 ** (step + 1))
                decay = args.weight_decay if p.ndim >= 2 else 0.0
                kept = p * (1 - rate_at(step) * decay)
                updated[name] = (kept - rate_at(step) * mean / (root + EPS)).detach()
            parameters = updated
        return torch.stack(losses)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    bound = bounds(curve, parameters)[0]
    return bound * (UNIT / 2.0**-24)  # first order: in proportion to the unit


def killed_once(marker, *flags):
    """The script; the first time, rank 1 is killed at the beginning of its sixth step."""
    plain = Trainer.train_step

    def train_step(self, data):
        if self.step == 5 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, data)

    Trainer.train_step = train_step
    torch.set_default_dtype(torch.float64)
    train_gpt.main([*SIZES, *flags])


if __name__ == "__main__":
    killed_once(Path(sys.argv[1]), *sys.argv[2:])
