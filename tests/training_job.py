"""Small jobs for the Trainer tests; importable, so that a forkserver can run them."""

import itertools
import os
import random
import signal
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from helpers import callbacks, checkpoint, data, schedules
from helpers.training import TrainConfig, Trainer

STEPS = 24


def make_trainer(amp_dtype=None, steps=STEPS, micro_batches=2, device="cpu", wrap=None):
    """A job with everything that a resume must restore."""
    torch.manual_seed(1)
    # dropout draws from the global generator, batch norm has buffers, Adam has state
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)
    ).to(device)
    if wrap is not None:
        model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    config = TrainConfig(
        steps=steps, micro_batches=micro_batches, clip_norm=1.0, amp_dtype=amp_dtype
    )
    return Trainer(
        model,
        optimizer,
        loss,
        config,
        lr_at=lambda s: schedules.warmup_cosine(s, peak=0.03, warmup=4, total=steps),
    )


def loss(model, batch):
    x, y = batch
    jitter = random.random() + np.random.rand()  # careless code also uses these two
    return F.cross_entropy(model(x * (1 + 0.01 * jitter)), y)


def batches_from(start):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 8, generator=generator)
    y = x[:, :3].argmax(1)

    def noise(t, g):
        return t + 0.1 * torch.randn(t.shape, generator=g)

    return data.batches(x, y, size=16, seed=5, start=start, transform=noise)


def digest(trainer):
    """Everything the next step depends on, as one flat dict of exact values."""
    state = {f"model.{k}": v.clone() for k, v in trainer.model.state_dict().items()}
    for i, s in trainer.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{i}.{k}": torch.as_tensor(v).clone() for k, v in s.items()}
    state["step"] = torch.tensor(trainer.step)
    state["scale"] = torch.tensor(trainer.scaler.get_scale())
    state["rng"] = torch.get_rng_state()
    state["python"] = torch.tensor(random.random())
    state["numpy"] = torch.tensor(np.random.rand())
    return state


class Noisy(Dataset):
    """Samples that draw from every global generator, as careless augmentation does."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.arange(8.0).add(i).sin()
        noise = random.random() + np.random.rand() + torch.rand(8)
        return x + 0.1 * noise, (x[:3].argmax() + i) % 3


def loader_batches(workers, eager=False):
    """A DataLoader without `generator=`, again and again; 6 batches are an epoch."""
    # forked workers end when their parent is killed; a forkserver's have another parent
    context = "fork" if workers else None
    options = {"num_workers": workers, "multiprocessing_context": context}
    loader = DataLoader(Noisy(), batch_size=16, shuffle=True, drop_last=True, **options)

    def batches_from(n):
        epochs = itertools.repeat(loader)
        if eager:  # the first epoch's iterator is made now, not with its first batch
            epochs = itertools.chain([iter(loader)], epochs)
        return itertools.islice(itertools.chain.from_iterable(epochs), n, None)

    return batches_from


def run(folder, kill_at=None, amp_dtype=None, workers=None):
    """Train with a checkpoint at every second step, resuming when there is one.

    kill_at: (write_number, bytes): die with SIGKILL inside that write to a checkpoint file, after
    so many bytes of it; or (step, None): die right after that step.
    workers: of a DataLoader; None: batches that are a pure function of their number.
    """
    torch.set_num_threads(1)
    random.seed(2), np.random.seed(3)
    path = Path(folder) / "checkpoint.pt"
    trainer = make_trainer(amp_dtype)
    torch.manual_seed(4)
    if path.exists():
        trainer.load(path)
        random.random(), np.random.rand(), torch.rand(1)  # what else a program does: load undoes
        trainer.load(path)
    watchers = [callbacks.Checkpoints(path, every=2)]
    if kill_at is not None:
        step, size = kill_at
        if size is None:
            watchers.append(lambda t, m: t.step == step and os.kill(os.getpid(), signal.SIGKILL))
        else:
            die_in_write(step, size)
    if not trainer.finished:
        trainer.fit(batches_from if workers is None else loader_batches(workers), watchers)
    part = Path(folder) / "result.tmp"
    torch.save(digest(trainer), part)
    os.replace(part, Path(folder) / "result.pt")


class DyingFile:
    """A file that takes `size` bytes and then kills this process with SIGKILL."""

    def __init__(self, file, size):
        self.file, self.left = file, size

    def write(self, chunk):
        chunk = bytes(chunk)
        if len(chunk) >= self.left:
            self.file.write(chunk[: self.left])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= len(chunk)
        return self.file.write(chunk)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def die_in_write(save_number, size):
    """Make the `save_number`-th checkpoint of this process die after `size` bytes."""
    opened = itertools.count(1)

    def dying_open(path, mode):
        file = Path(path).open(mode)
        return DyingFile(file, size) if mode == "xb" and next(opened) == save_number else file

    checkpoint.open = dying_open


def plain_loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def linear(seed=0, wrap=None, **config):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if wrap == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, optimizer, plain_loss, TrainConfig(**{"steps": 5, **config}))


def pairs(n, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(n)
    ]


def join(rank, world, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def message(call, *arguments):
    """The text of the exception that `call` raises; "" if it raises none."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def data_parallel(rank, world, port, folder, sharded):
    """Three steps on this rank's half of each batch, then some in which rank 1 sees NaN."""
    join(rank, world, port)
    trainer = linear(steps=3, micro_batches=2, clip_norm=0.5, wrap="fsdp2" if sharded else "ddp")
    mine = [tuple(t.chunk(world)[rank] for t in batch) for batch in pairs(6)]
    losses, quiet = [], []
    if not sharded:
        no_sync = trainer.model.no_sync
        trainer.model.no_sync = lambda: quiet.append(1) or no_sync()
    trainer.fit(lambda s: iter(mine[s:]), [lambda t, m: losses.append(m["loss"])])

    written, save_atomic = [], checkpoint.save_atomic

    def noted(state, path):
        written.append(path)
        save_atomic(state, path)

    checkpoint.save_atomic = noted
    result = {
        "without exchange": len(quiet),
        "weights": [getattr(p, "full_tensor", lambda p=p: p)() for p in trainer.model.parameters()],
        "loss": torch.stack(losses),
        "save": message(trainer.save, f"{folder}/c.pt"),
        "bad save": message(trainer.save, f"{folder}/none/c.pt"),
        "written": len(written),
    }
    x, y = pairs(1)[0]
    bad = [(x * (float("nan") if rank == 1 else 1.0), y)] * 2
    result["nan loss"] = message(trainer.train_step, iter(bad))

    def loss_with_nan_gradient(model, batch):
        zero = model(batch[0]).sum() * 0
        return plain_loss(model, batch) + (zero.abs().sqrt() if rank == 1 else zero)

    trainer.loss_fn = loss_with_nan_gradient
    result["nan gradient"] = message(trainer.train_step, iter([(x, y)] * 2))
    result["finite"] = all(p.isfinite().all() for p in result["weights"])
    torch.save(result, f"{folder}/result{rank}.pt")
    dist.destroy_process_group()


def dropout_on_each_rank(rank, world, port, folder, resume):
    """A run with dropout that differs between ranks, saved by the callback, maybe resumed."""
    join(rank, world, port)
    trainer = make_trainer(wrap=nn.parallel.DistributedDataParallel, steps=8)
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    path = f"{folder}/c.pt"
    if resume:
        trainer.load(path)
    watchers = [callbacks.Checkpoints(path, every=2)]
    if not resume:
        watchers.append(lambda t, m: t.step == 4 and rank == 0 and os.link(path, f"{folder}/4.pt"))
    trainer.fit(loader_batches(0), watchers)
    torch.save(digest(trainer), f"{folder}/{'resumed' if resume else 'whole'}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def stop_early(rank, world, port, folder):
    """Each rank has a measure of its own: alone, rank 0 would stop at step 3, rank 1 never."""
    join(rank, world, port)
    trainer = linear(steps=9, wrap="ddp")
    looks = iter([[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 6, 5, 3, 2, 1.5, 1, 0.5, 0]][rank])
    stop = callbacks.EarlyStopping(lambda t: float(next(looks)), every=1, patience=2)
    trainer.fit(lambda s: iter(pairs(9)[s:]), [stop])
    torch.save({"step": trainer.step, "best": stop.best_step}, f"{folder}/result{rank}.pt")
    dist.destroy_process_group()
