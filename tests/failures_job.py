"""What ranks do in the tests of failures: killed, hung, disagreeing, never for ever."""

import os
import signal
import socket
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from helpers.distributed import process_group

# For `helpers.distributed.spawn`: `spawn(rank_dies, 1)`, `spawn(mismatch, "order")`, …


def rank_dies(victim: int, wait: float = 20.0) -> None:
    """Rank `victim` is killed by SIGKILL; the others lose their connection, and say so at once."""
    with process_group("gloo", wait) as place:
        dist.barrier()  # everybody was there
        if place.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def rank_hangs(victim: int, wait: float = 2.0, seconds: float = 3600.0) -> None:
    """Rank `victim` does something else for `seconds`; the others wait for `wait` seconds.

    No connection breaks, so the timeout of the process group is all that ends the waiting; its
    default is 30 minutes, with NCCL 10.
    """
    with process_group("gloo", wait) as place:
        dist.barrier()
        if place.rank == victim:
            time.sleep(seconds)
        dist.all_reduce(torch.ones(1))


def mismatch(kind: str, wait: float = 2.0) -> torch.Tensor:
    """Let two ranks disagree about what comes next; return what rank holds if nobody notices.

    kind: ``operation`` (all_reduce meets broadcast: all wait until the timeout), ``shape`` or
    ``dtype`` (other bytes than expected: gloo aborts the process), ``missing`` (rank 1 makes one
    call less), ``order`` (two all_reduces swapped: no error at all, a wrong sum).
    With env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} every call is compared before it runs: the error
    names both calls. It cannot notice ``order``, where both calls look alike.
    """
    kinds = ("operation", "shape", "dtype", "missing", "order")
    if kind not in kinds:
        raise ValueError(f"expected a kind of mismatch, one of {', '.join(kinds)}, got {kind!r}")
    with process_group("gloo", wait) as place:
        loss, weight = torch.tensor([1.0]), torch.tensor([100.0])
        first = place.rank == 0
        if kind == "operation" and not first:
            dist.broadcast(loss, 0)
        elif kind == "shape":
            dist.all_reduce(torch.ones(4 if first else 6))
        elif kind == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float32 if first else torch.float64))
        elif kind == "order":
            for tensor in (loss, weight) if first else (weight, loss):
                dist.all_reduce(tensor)
        elif kind == "operation" or first:
            dist.all_reduce(loss)
        else:
            time.sleep(2 * wait)  # it goes on with other work, and does not come back
        return loss


def port_in_use() -> None:
    """Open a store at a port that is taken, as two jobs with one MASTER_PORT do; needs no ranks.

    Raises torch.distributed.DistNetworkError (EADDRINUSE). Port 0 lets the system choose one.
    """
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        port = other_job.getsockname()[1]
        dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=5))


def uneven_batches(batches: list[int], join: bool, wait: float = 3.0) -> dict[str, object]:
    """Train with DDP, rank r on `batches[r]` batches; return the steps made, and the weight.

    Without `Join`, the rank with more batches waits in backward for gradients that never come.
    With it, ranks that are done answer with zeros, which still count in the average.
    """
    with process_group("gloo", wait) as place:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 0
        with Join([model]) if join else nullcontext():
            for _ in range(batches[place.rank]):
                optimizer.zero_grad()
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
                steps += 1
            if not join:
                dist.barrier()  # what follows training: a checkpoint, an evaluation
        return {"steps": steps, "weight": model.module.weight.detach()}


def epoch_orders(
    samples: int, ranks: int, epochs: int, *, set_epoch: bool
) -> list[list[list[int]]]:
    """Return which samples DistributedSampler gives: `[epoch][rank]`, in order; needs no ranks.

    Without `set_epoch` the order is shuffled once and repeated in every epoch, without a word.
    """
    data = range(samples)
    samplers = [DistributedSampler(data, ranks, rank, shuffle=True) for rank in range(ranks)]
    orders = []
    for epoch in range(epochs):
        if set_epoch:
            for sampler in samplers:
                sampler.set_epoch(epoch)
        orders.append([list(sampler) for sampler in samplers])
    return orders
