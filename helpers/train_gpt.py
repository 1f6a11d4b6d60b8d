"""Chapter 15: train the book's GPT on a text, on one process or many; a script to keep."""

# one process       python -m helpers.train_gpt --steps 100
# two processes     torchrun --standalone --nproc-per-node=2 -m helpers.train_gpt --parallel fsdp2
# went down?        the same command with --resume, on as many ranks or on another number of them
# by itself         torchrun --standalone --max-restarts=3 … -m helpers.train_gpt --resume …
# several machines  helpers/launch/
# one plain file    python -m torch.distributed.checkpoint.format_utils dcp_to_torch STEP FILE.pt

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from helpers import checkpoint
from helpers.data import batches
from helpers.distributed import Place, process_group
from helpers.models import GPT, GPTConfig
from helpers.resharding import load_sharded, newest, save_sharded
from helpers.schedules import warmup_cosine
from helpers.sharding import shard
from helpers.tensor_parallel import parallelize_gpt
from helpers.training import TrainConfig, Trainer, mean_over_ranks

# B sequences of a rank in one micro-batch, T tokens in a sequence (--context)

VOCABULARY = 256  # a token is a byte: any file will do, and no tokenizer has to be kept with it
PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# What torchrun would set for a single process; port 0 is any that is free.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


# Settings


def flags() -> argparse.ArgumentParser:
    """Return the parser of the command line; `--help` prints what it knows."""
    parser = argparse.ArgumentParser(
        "train_gpt", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument

    add("--text", type=Path, help="a file to train on (None: Python's language reference)")
    add("--batch", type=int, default=32, help="sequences in an update, of all ranks together")
    add("--micro-batches", type=int, default=1, help="parts of an update, one after another")
    add("--context", type=int, default=128, help="tokens in a sequence")

    add("--layers", type=int, default=4, help="blocks")
    add("--heads", type=int, default=4, help="of attention")
    add("--width", type=int, default=128, help="numbers for each token")
    add("--dropout", type=float, default=0.0, help="share of numbers that are dropped")

    add("--steps", type=int, default=1000, help="updates in the whole run, resumed parts included")
    add("--lr", type=float, default=1e-3, help="learning rate at its peak")
    add("--warmup", type=int, default=20, help="steps in which the learning rate rises")
    add("--weight-decay", type=float, default=0.1, help="of matrices, other parameters have none")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="of weights, order of the data, and dropout")
    add("--precision", choices=PRECISION, default="fp32", help="of the forward pass")

    add("--parallel", choices=("ddp", "fsdp2", "tp"), default="ddp", help="what ranks share")
    add("--tp-size", type=int, help="ranks that share a layer, FSDP2 between them (None: all)")
    add("--timeout", type=float, default=600.0, help="seconds to wait for another rank")

    add("--folder", type=Path, default=Path("runs/train_gpt"), help="all ranks must see it")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint if there is one")
    return parser


def check(args: argparse.Namespace, ranks: int) -> None:
    """Fill in `args.tp_size`; ValueError for flags that fit neither each other nor the ranks."""
    if args.parallel != "tp" and args.tp_size not in (None, 1):
        raise ValueError(f"--tp-size {args.tp_size} needs --parallel tp, got {args.parallel}")
    if args.tp_size is None:
        args.tp_size = ranks if args.parallel == "tp" else 1
    if args.tp_size < 1 or ranks % args.tp_size:
        raise ValueError(f"{ranks} ranks cannot form groups of --tp-size {args.tp_size}")
    if args.heads % args.tp_size:
        raise ValueError(f"--heads {args.heads} cannot be split over --tp-size {args.tp_size}")
    if args.parallel == "tp" and args.dropout:
        raise ValueError(f"--parallel tp expects --dropout 0, got {args.dropout}")

    for name in ("batch", "micro_batches", "context", "steps", "save_every", "timeout"):
        if getattr(args, name) <= 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be above 0, got {getattr(args, name)}")
    if not 0 <= args.warmup < args.steps:
        raise ValueError(f"--warmup must be below --steps {args.steps}, got {args.warmup}")
    data_ranks = ranks // args.tp_size
    if args.batch % (data_ranks * args.micro_batches):
        raise ValueError(
            f"--batch {args.batch} cannot be split equally over {data_ranks} ranks "
            f"in {args.micro_batches} --micro-batches"
        )


def settings(args: argparse.Namespace, text: Tensor) -> dict[str, object]:
    """Return what two halves of one run must share; `steps` may grow, and the ranks may change."""
    names = ("batch", "micro_batches", "context", "layers", "heads", "width", "dropout", "lr")
    names += ("warmup", "weight_decay", "clip", "seed", "precision")
    found = {name: getattr(args, name) for name in names}
    # tensor parallel splits `qkv` into three: the tensors have other names
    return {**found, "tp": args.parallel == "tp", "text": hashlib.sha256(text.numpy()).hexdigest()}


def last_step(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, if there is one."""
    try:
        return newest(folder)
    except FileNotFoundError:
        return None


# Data


def read_text(args: argparse.Namespace) -> Tensor:
    """Return the text's bytes, uint8 [N]; a tenth of it must be enough for one batch."""
    text = "\n\n".join(topics.values()).encode() if args.text is None else args.text.read_bytes()
    needed = 10 * (args.batch * args.context + 1)
    if len(text) < needed:
        name = args.text or "the language reference"
        raise ValueError(f"expected a text of at least {needed} bytes, {name} has {len(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Sequences:
    """The part of a text that this rank sees, in batches of x and y, int64 [B, T] each.

    text: uint8 [N]. y is x one token later. All ranks shuffle alike and each takes its part, so
    that an update is made of the same sequences whatever the number of ranks.
    """

    def __init__(self, text: Tensor, args: argparse.Namespace, data: DeviceMesh):
        self.text, self.seed, self.context = text, args.seed, args.context
        self.starts = torch.arange(0, len(text) - args.context, args.context)
        self.size = args.batch // args.micro_batches  # of all ranks together
        self.rank, self.ranks = data.get_local_rank(), data.size()

    def shuffled(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches for ever, from batch `number` on: a pure function of seed and number."""
        for (starts,) in batches(self.starts, size=self.size, seed=self.seed, start=number):
            yield self.of_rank(starts)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch once, as many on every rank; a shorter one at the end is left out."""
        for starts in self.starts.split(self.size):
            if len(starts) == self.size:
                yield self.of_rank(starts)

    def of_rank(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequences at this rank's part of `starts`."""
        mine = starts.chunk(self.ranks)[self.rank]
        tokens = self.text[mine[:, None] + torch.arange(self.context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


# Model


def make_mesh(place: Place, args: argparse.Namespace) -> DeviceMesh:
    """Return the ranks as a table: those of a row share layers, those of a column the data."""
    table = torch.arange(place.world_size).view(-1, args.tp_size)
    # not init_device_mesh: its groups would wait for half an hour, whatever --timeout says
    wait = timedelta(seconds=args.timeout)
    data, _ = dist.new_subgroups_by_enumeration(table.T.tolist(), timeout=wait)
    tensor, _ = dist.new_subgroups_by_enumeration(table.tolist(), timeout=wait)
    names = ("data", "tensor")
    return DeviceMesh.from_group(
        [data, tensor], place.device.type, mesh=table, mesh_dim_names=names
    )


def make_model(place: Place, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    """Return the GPT as the ranks share it; its weights are the same, however they do."""
    torch.manual_seed(args.seed)
    sizes = {name: getattr(args, name) for name in ("context", "layers", "heads", "width")}
    model = GPT(GPTConfig(vocabulary=VOCABULARY, dropout=args.dropout, **sizes)).to(place.device)
    torch.manual_seed(args.seed + 1 + place.rank)  # for dropout, which is each rank's own

    if args.parallel == "ddp" and place.world_size > 1:
        on_gpu = place.device.type == "cuda"
        return DistributedDataParallel(model, device_ids=[place.device] if on_gpu else None)
    if args.parallel == "tp":
        model = parallelize_gpt(model, mesh["tensor"])
    if args.parallel == "fsdp2" or args.tp_size < place.world_size:
        amp_dtype = PRECISION[args.precision]  # what is gathered; gradients are summed in 32 bits
        policy = MixedPrecisionPolicy(param_dtype=amp_dtype, reduce_dtype=torch.float32)
        options = {} if amp_dtype is None else {"mp_policy": policy}
        model = shard(model, mesh=mesh["data"], **options)
    return model


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW; only what has two dimensions decays: matrices, not biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean of -log p(next token) over the B T tokens, in nats."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# Training


def validation_loss(trainer: Trainer, sequences: Sequences) -> float:
    """Return the mean loss over the sequences of all ranks; every rank must call it."""
    trainer.model.eval()  # fit turns training mode on again
    device, amp_dtype = trainer.device, trainer.config.amp_dtype
    losses = []
    with torch.no_grad(), torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
        for x, y in sequences.in_order():
            losses.append(loss_of(trainer.model, (x.to(device), y.to(device))))
    return mean_over_ranks(torch.stack(losses).mean()).item()


class Watch:
    """What happens after a step: the bar of rank 0 moves on; now and then, a checkpoint."""

    def __init__(self, place: Place, args: argparse.Namespace, held_out: Sequences, first: int):
        self.args, self.held_out = args, held_out
        self.losses: list[float] = []  # mean over all ranks, one of each step
        self.tokens = args.batch * args.context  # in a step
        self.bar = tqdm(
            total=args.steps * self.tokens,
            initial=first * self.tokens,
            unit="token",  # so it shows tokens a second, of all ranks together
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,  # in a log, each time adds a line
            disable=place.rank != 0,
        )

    def __call__(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        loss = metrics["loss"].item()
        self.losses.append(loss)
        self.bar.set_postfix_str(f"step {trainer.step}, loss {loss:.3f}", refresh=False)
        self.bar.update(self.tokens)
        if trainer.finished or trainer.step % self.args.save_every == 0:
            validation = validation_loss(trainer, self.held_out)
            path = save_sharded(trainer, self.args.folder)
            if not self.bar.disable:
                self.bar.write(f"loss {loss:.4f}, validation {validation:.4f}: {path}")
        if trainer.finished:
            self.bar.close()


def resume(trainer: Trainer, place: Place, args: argparse.Namespace, here: dict) -> None:
    """Continue from the last checkpoint; without one, note the settings of a new run."""
    found = [last_step(args.folder)]
    dist.broadcast_object_list(found)  # rank 0 decides: a shared folder may show it later to others
    if found[0] is not None:
        path = load_sharded(trainer, args.folder)
        if place.rank == 0:
            print(f"resumed from {path}", flush=True)
    elif place.rank == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save_atomic(here, args.folder / "settings.pt")


def train(args: argparse.Namespace, text: Tensor) -> list[float]:
    """Train in the group that the launcher has described; return the loss of each step."""
    config = TrainConfig(
        steps=args.steps,
        micro_batches=args.micro_batches,
        clip_norm=args.clip,
        amp_dtype=PRECISION[args.precision],
    )
    rates = {"peak": args.lr, "warmup": args.warmup, "total": args.steps, "floor": args.lr / 10}
    held_out = len(text) // 10
    with process_group(timeout=args.timeout) as place:
        mesh = make_mesh(place, args)
        model = make_model(place, mesh, args)
        optimizer = make_optimizer(model, args)
        trainer = Trainer(model, optimizer, loss_of, config, partial(warmup_cosine, **rates))
        resume(trainer, place, args, settings(args, text))

        training = Sequences(text[:-held_out], args, mesh["data"])
        validation = Sequences(text[-held_out:], args, mesh["data"])
        watch = Watch(place, args, validation, first=trainer.step)
        if trainer.step < args.steps:
            trainer.fit(training.shuffled, [watch])
        return watch.losses


def main(argv: list[str] | None = None) -> None:
    """Read the command line and train; what is wrong with it ends the program with one line."""
    args = flags().parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(ALONE)
    try:
        check(args, ranks=int(os.environ["WORLD_SIZE"]))
        text = read_text(args)
        step = last_step(args.folder)
        if step is not None and not args.resume:
            raise ValueError(f"{step} is there: pass --resume to continue, or another --folder")
        if step is not None:
            here, path = settings(args, text), args.folder / "settings.pt"
            there = checkpoint.load(path, expected=set(here))
            checkpoint.require_same_settings(path, here, there)
    except (OSError, ValueError) as error:
        sys.exit(f"train_gpt: {error}")
    train(args, text)


if __name__ == "__main__":
    main()
