"""Chapter 15: pipeline parallel: schedules as data, with their bubble, and the GPT in stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from helpers.models import GPT

# The order of work: pure data, which needs no process


class Action(NamedTuple):
    """What a stage does: forward or backward of one micro-batch."""

    micro_batch: int
    backward: bool


def gpipe(stages: int, micro_batches: int) -> list[list[Action]]:
    """Return each stage's order: forward of all micro-batches, then backward of all.

    As `torch.distributed.pipelining.ScheduleGPipe`; Huang et al., 2018: arXiv:1811.06965.
    """
    _require(stages, micro_batches)
    forward = [Action(i, False) for i in range(micro_batches)]
    backward = [Action(i, True) for i in range(micro_batches)]
    return [forward + backward for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[Action]]:
    """Return each stage's order in 1F1B: stage s of p begins with p − s forwards.

    Then one backward and one forward in turns, so that never more than p − s micro-batches wait
    for their backward; the last backwards follow. As `Schedule1F1B`, which like this one wants at
    least as many micro-batches as stages; Narayanan et al., 2021: arXiv:2104.04473.
    """
    _require(stages, micro_batches)
    if micro_batches < stages:
        raise ValueError(f"expected at least {stages} micro-batches, got {micro_batches}")
    orders = []
    for stage in range(stages):
        ahead = stages - stage
        order = [Action(i, False) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(Action(i, True))
            if ahead + i < micro_batches:
                order.append(Action(ahead + i, False))
        orders.append(order)
    return orders


@dataclass(frozen=True)
class Work:
    """A piece of work at its place in time: `stage` is busy with it from `start` to `end`."""

    stage: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def timeline(
    orders: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0
) -> list[Work]:
    """Let every stage work in its order, each piece as soon as what it needs is there.

    orders: by stage. forward, backward: how long one piece takes, any unit. Forward of a
    micro-batch needs that of the stage before, backward that of the stage behind. Assumed: all
    stages are equally fast, sending takes no time. Raises ValueError for orders in which stages
    would wait for each other for ever.
    """
    ends: dict[tuple[int, Action], float] = {}
    found: list[Work] = []
    done = [0] * len(orders)
    free = [0.0] * len(orders)
    while any(n < len(order) for n, order in zip(done, orders, strict=True)):
        before = len(found)
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                action = order[done[stage]]
                needed = _needed(stage, action, len(orders))
                if not all(key in ends for key in needed):
                    break
                start = max([free[stage], *(ends[key] for key in needed)])
                end = start + (backward if action.backward else forward)
                found.append(Work(stage, *action, start, end))
                ends[stage, action] = free[stage] = end
                done[stage] += 1
        if len(found) == before:
            waiting = {s: o[n] for s, (o, n) in enumerate(zip(orders, done, strict=True)) if o[n:]}
            raise ValueError(f"these stages wait for each other: {waiting}")
    return sorted(found, key=lambda work: (work.start, work.stage))


def _needed(stage: int, action: Action, stages: int) -> list[tuple[int, Action]]:
    if not action.backward:
        return [(stage - 1, action)] if stage else []
    own = (stage, Action(action.micro_batch, False))
    return [own, (stage + 1, action)] if stage + 1 < stages else [own]


def bubble(works: Sequence[Work]) -> float:
    """Return the share of all stages' time in which they wait, from the first start to the end.

    For GPipe and for 1F1B it is (p − 1) / (m + p − 1) with p stages and m micro-batches.
    """
    stages = len({work.stage for work in works})
    span = max(work.end for work in works) - min(work.start for work in works)
    return 1 - sum(work.end - work.start for work in works) / (stages * span)


def most_stored(order: Sequence[Action]) -> int:
    """Return how many micro-batches at most wait for backward: so many activations are held."""
    now = most = 0
    for action in order:
        now += -1 if action.backward else 1
        most = max(most, now)
    return most


def _require(stages: int, micro_batches: int) -> None:
    if min(stages, micro_batches) < 1:
        raise ValueError(
            f"expected at least 1 stage and 1 micro-batch, got {stages} and {micro_batches}"
        )


# The book's GPT in stages


class Stage(nn.Module):
    """Some blocks of a GPT; the first stage also embeds tokens, the last one has norm and head.

    int64 [B, T] or x [B, T, C] -> x [B, T, C] or logits [B, T, vocabulary]. Parameters keep their
    names and are those of the GPT, but the head of the last of several stages: its matrix is that
    of the first stage's embedding, on another rank, so it is a copy (`sum_tied_gradients`).
    """

    def __init__(self, model: GPT, blocks: range, *, first: bool, last: bool):
        super().__init__()
        if first:
            self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout
        # a dict keeps the numbers of the blocks: blocks.3.norm1.weight
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        if last:
            self.norm, self.head = model.norm, model.head
            if not first:
                self.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)
                self.head.weight = nn.Parameter(model.tokens.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.tokens(x) + self.positions(positions))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def split(model: GPT, stages: int) -> list[Stage]:
    """Cut a GPT into stages; embeddings and head count as much as a block each.

    Raises ValueError for fewer than two stages, or more than there are blocks, and two.
    """
    pieces = model.config.layers + 2
    if not 2 <= stages <= pieces:
        raise ValueError(f"expected from 2 to {pieces} stages, got {stages}")
    cuts = [round(stage * pieces / stages) for stage in range(stages + 1)]
    found = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        blocks = range(max(begin - 1, 0), min(end - 1, model.config.layers))
        found.append(Stage(model, blocks, first=begin == 0, last=end == pieces))
    return found


def forward_backward(
    schedule: PipelineScheduleSingle, rank: int, stages: int, x: Tensor, y: Tensor
) -> Tensor | None:
    """Run all micro-batches through the pipeline; gradients are left in this rank's stage.

    x, y: the whole batch, on every rank; the schedule cuts it. Returns the mean loss on the last
    rank, None on the others. The gradients are those of that mean.
    """
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank < stages - 1:
        schedule.step()
    else:
        schedule.step(target=y, losses=losses)
    return torch.stack(losses).mean().detach() if losses else None


def sum_tied_gradients(
    stage: Stage, rank: int, stages: int, group: dist.ProcessGroup | None = None
) -> None:
    """Add the gradients of the token matrix, which the first and the last stage have, on both.

    Between backward and the optimizer's step, on every rank of the pipeline. With the same
    optimizer on both, the two copies then stay equal to the bit.
    """
    if rank == 0:
        weight, peer = stage.tokens.weight, stages - 1
    elif rank == stages - 1:
        weight, peer = stage.head.weight, 0
    else:
        return
    theirs = torch.empty_like(weight.grad)
    operations = [
        dist.P2POp(dist.isend, weight.grad, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    weight.grad += theirs
