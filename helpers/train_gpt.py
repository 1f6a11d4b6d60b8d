"""Chapter 15: train the book's GPT on a text, on one process or many; a script to keep."""

# one process       python -m helpers.train_gpt --steps 100
# two processes     torchrun --standalone --nproc-per-node=2 -m helpers.train_gpt --parallel fsdp2
# it went down?     the same with --resume, on any number of ranks
# by itself         TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts=3 …
#                   with --resume; torchrun 2.15 often fails to restart without both
# several machines  helpers/launch/
# one plain file    python -m torch.distributed.checkpoint.format_utils dcp_to_torch STEP FILE.pt

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
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

Batch = tuple[Tensor, Tensor]
VOCABULARY = 256  # a token is a byte: any file will do, and no tokenizer has to be kept with it
PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# what may differ between two halves of a run; the text is compared by its bytes
MAY_CHANGE = {"text", "steps", "parallel", "tp_size", "timeout", "folder", "save_every", "resume"}


def flags() -> argparse.ArgumentParser:
    """Return the parser of the command line; `--help` prints what it knows."""
    show = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("train_gpt", formatter_class=show)
    add = parser.add_argument
    add("--text", type=Path, help="a file to train on (None: Python's language reference)")
    add("--batch", type=count, default=32, help="sequences in an update, of all ranks together")
    add("--micro-batches", type=count, default=1, help="parts of an update, one after another")
    add("--context", type=count, default=128, help="tokens in a sequence")
    add("--layers", type=count, default=4, help="blocks")
    add("--heads", type=count, default=4, help="of attention")
    add("--width", type=count, default=128, help="numbers for each token")
    add("--steps", type=count, default=1000, help="updates in the whole run, resumed parts too")
    add("--lr", type=float, default=1e-3, help="learning rate at its peak")
    add("--warmup", type=int, default=20, help="steps in which the learning rate rises")
    add("--weight-decay", type=float, default=0.1, help="of matrices, other parameters have none")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="of the weights and the order of the data")
    add("--precision", choices=PRECISION, default="fp32", help="of the forward pass")
    add("--parallel", choices=("ddp", "fsdp2", "tp"), default="ddp", help="what ranks share")
    add("--tp-size", type=count, help="ranks that share a layer, FSDP2 between them (None: all)")
    add("--timeout", type=count, default=600, help="seconds to wait for another rank")
    add("--folder", type=Path, default=Path("runs/train_gpt"), help="all ranks must see it")
    add("--save-every", type=count, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint if there is one")
    return parser


def count(text: str) -> int:
    """Return a flag's value as a whole number that is at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def check(args: argparse.Namespace, ranks: int) -> None:
    """Fill in `args.tp_size`; ValueError for flags that fit neither each other nor the ranks."""
    if args.parallel != "tp" and args.tp_size is not None:
        raise ValueError(f"--tp-size {args.tp_size} needs --parallel tp, got {args.parallel}")
    if args.tp_size is None:
        args.tp_size = ranks if args.parallel == "tp" else 1
    if ranks % args.tp_size:
        raise ValueError(f"{ranks} ranks cannot form groups of --tp-size {args.tp_size}")
    if args.heads % args.tp_size:
        raise ValueError(f"--heads {args.heads} cannot be split over --tp-size {args.tp_size}")
    data_ranks = ranks // args.tp_size
    if args.batch % (data_ranks * args.micro_batches):
        parts = f"{data_ranks} ranks x {args.micro_batches} --micro-batches"
        raise ValueError(f"--batch {args.batch} cannot be split equally over {parts}")
    model_config(args)  # these raise what they find wrong
    train_config(args)
    learning_rate(args)(0)


def model_config(args: argparse.Namespace) -> GPTConfig:
    """Return the sizes of the model."""
    sizes = {name: getattr(args, name) for name in ("context", "layers", "heads", "width")}
    return GPTConfig(vocabulary=VOCABULARY, **sizes)


def train_config(args: argparse.Namespace) -> TrainConfig:
    """Return the numbers of the run."""
    amp_dtype, numbers = PRECISION[args.precision], {"steps": args.steps, "clip_norm": args.clip}
    return TrainConfig(micro_batches=args.micro_batches, amp_dtype=amp_dtype, **numbers)


def learning_rate(args: argparse.Namespace) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: up, then down to a tenth."""
    shape = {"peak": args.lr, "floor": args.lr / 10, "warmup": args.warmup, "total": args.steps}
    return partial(warmup_cosine, **shape)


def settings(args: argparse.Namespace, text: Tensor) -> dict[str, object]:
    """Return what two halves of one run must share."""
    found = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    # tensor parallel splits `qkv` into three: its tensors have other names
    return {**found, "tp": args.parallel == "tp", "text": hashlib.sha256(text.numpy()).hexdigest()}


def last_step(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, if there is one."""
    try:
        return newest(folder)
    except FileNotFoundError:
        return None


def read_text(args: argparse.Namespace) -> Tensor:
    """Return the text's bytes, uint8 [N]; a batch to train on and one to validate must be in it."""
    text = "\n\n".join(topics.values()).encode() if args.text is None else args.text.read_bytes()
    needed = 2 * args.batch * args.context + 1
    if len(text) < needed:
        raise ValueError(f"expected a text of at least {needed} bytes, got {len(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of_rank(text: Tensor, starts: Tensor, context: int, data: DeviceMesh) -> Batch:
    """Return this rank's part of the sequences at `starts`: x and y, int64 [B, T] each.

    y is x one token later. All ranks are given the same starts, so that an update is made of the
    same sequences whatever their number.
    """
    mine = starts.chunk(data.size())[data.get_local_rank()]
    tokens = text[mine[:, None] + torch.arange(context + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def training_batches(
    text: Tensor, starts: Tensor, args: argparse.Namespace, data: DeviceMesh, number: int
) -> Iterator[Batch]:
    """Yield this rank's micro-batches for ever, from `number` on; a pure function of it."""
    size = args.batch // args.micro_batches
    for (chosen,) in batches(starts, size=size, seed=args.seed, start=number):
        yield batch_of_rank(text, chosen, args.context, data)


def make_mesh(place: Place, args: argparse.Namespace) -> DeviceMesh:
    """Return the ranks as a table: those of a row share layers and see the same data."""
    table = torch.arange(place.world_size).view(-1, args.tp_size)
    # not init_device_mesh: its groups would wait for half an hour, whatever --timeout says
    wait = timedelta(seconds=args.timeout)
    data, _ = dist.new_subgroups_by_enumeration(table.T.tolist(), timeout=wait)
    tensor, _ = dist.new_subgroups_by_enumeration(table.tolist(), timeout=wait)
    kind, names = place.device.type, ("data", "tensor")
    return DeviceMesh.from_group([data, tensor], kind, mesh=table, mesh_dim_names=names)


def make_model(place: Place, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    """Return the GPT as the ranks share it; its weights are the same, however they do."""
    torch.manual_seed(args.seed)
    model = GPT(model_config(args)).to(place.device)
    if args.parallel == "ddp" and place.world_size > 1:
        on_gpu = place.device.type == "cuda"
        return DistributedDataParallel(model, device_ids=[place.device] if on_gpu else None)
    if args.parallel == "tp":
        model = parallelize_gpt(model, mesh["tensor"])
    if args.parallel == "fsdp2" or args.tp_size < place.world_size:
        # gathered in 16 bits, if that is asked for, but gradients are summed as parameters are kept
        policy = MixedPrecisionPolicy(PRECISION[args.precision], torch.get_default_dtype())
        model = shard(model, mesh=mesh["data"], mp_policy=policy)
    return model


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW; only what has two dimensions decays: matrices, not biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean of -log p(next token) over the B T tokens, in nats."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def validation_loss(
    text: Tensor, starts: Tensor, args: argparse.Namespace, data: DeviceMesh, trainer: Trainer
) -> float:
    """Return the mean loss on sequences that are not trained on; every rank must call it."""
    trainer.model.eval()  # fit turns training mode on again
    device, amp_dtype = trainer.device, PRECISION[args.precision]
    losses = []
    with torch.no_grad(), torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
        for chosen in starts.view(-1, args.batch):
            x, y = batch_of_rank(text, chosen, args.context, data)
            losses.append(loss_of(trainer.model, (x.to(device), y.to(device))))
    return mean_over_ranks(torch.stack(losses).mean()).item()


class Watch:
    """What happens after a step: the bar of rank 0 moves on; now and then, a checkpoint."""

    def __init__(self, validate: Callable[[Trainer], float], args: argparse.Namespace, first: int):
        self.validate, self.args = validate, args
        self.losses: list[float] = []  # mean over all ranks, one of each step
        self.tokens = args.batch * args.context  # in a step
        self.bar = tqdm(
            total=args.steps * self.tokens,
            initial=first * self.tokens,
            unit="token",  # so it shows tokens a second, of all ranks together
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,  # in a log, each time adds a line
            disable=dist.get_rank() != 0,
        )

    def __call__(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        loss = metrics["loss"].item()
        self.losses.append(loss)
        self.bar.set_postfix_str(f"step {trainer.step}, loss {loss:.3f}", refresh=False)
        self.bar.update(self.tokens)
        if trainer.finished or trainer.step % self.args.save_every == 0:
            validation = self.validate(trainer)
            path = save_sharded(trainer, self.args.folder)
            if not self.bar.disable:
                self.bar.write(f"loss {loss:.4f}, validation {validation:.4f}: {path}")


def resume(trainer: Trainer, args: argparse.Namespace, here: dict[str, object]) -> None:
    """Continue from the last checkpoint; without one, note the settings of a new run."""
    found = [last_step(args.folder)]
    dist.broadcast_object_list(found)  # rank 0 decides: a shared folder may show it later to others
    if found[0] is not None:
        path = load_sharded(trainer, args.folder)
        if dist.get_rank() == 0:
            print(f"resumed from {path}", flush=True)
    elif dist.get_rank() == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save_atomic(here, args.folder / "settings.pt")


def train(args: argparse.Namespace, text: Tensor) -> list[float]:
    """Train in the group that the launcher has described; return the loss of each step."""
    with process_group(timeout=args.timeout) as place:
        mesh = make_mesh(place, args)
        model = make_model(place, mesh, args)
        optimizer = make_optimizer(model, args)
        trainer = Trainer(model, optimizer, loss_of, train_config(args), learning_rate(args))
        resume(trainer, args, settings(args, text))
        starts = torch.arange(0, len(text) - args.context, args.context)
        tenth = math.ceil(len(starts) / args.batch / 10)  # batches, counted from above
        held_out = args.batch * min(tenth, 20)
        validate = partial(validation_loss, text, starts[-held_out:], args, mesh["data"])
        batches_from = partial(training_batches, text, starts[:-held_out], args, mesh["data"])
        watch = Watch(validate, args, first=trainer.step)
        if trainer.step < args.steps:
            trainer.fit(batches_from, [watch])
        watch.bar.close()
        return watch.losses


def main(argv: list[str] | None = None) -> None:
    """Read the command line and train; what is wrong with it ends the program with one line."""
    args = flags().parse_args(argv)
    if "WORLD_SIZE" not in os.environ:  # no torchrun: one process, and any port that is free
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
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
