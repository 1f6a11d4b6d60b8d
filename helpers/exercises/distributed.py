"""Chapter 14, exercises: a collective, an exchange, a loop made parallel, the blame, mistakes."""

import math
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.exercises.harness import RTOL, Exercise, WrongAnswer, of_each_rank

# ---- 1 and 4: a letter for each question; 2, 3 and 5: what each rank has returned


def _at(answer: Any) -> Callable[[Any], Any]:
    return answer if callable(answer) else answer.__getitem__


def _rank_and_cause(answer: Any) -> Callable[[Any], Any]:
    """Return what was found about a run; the rank as text, for it may be None."""

    def found(run: str) -> Any:
        given = _at(answer)(run)
        if given is ...:
            return ...
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise WrongAnswer('expected two things, the rank and the cause, such as (2, "memory")')
        rank, cause = given
        if rank is ... or cause is ...:
            return ...
        if cause not in CAUSES:
            raise WrongAnswer(f"expected a cause, one of {', '.join(CAUSES)}, got {cause!r}")
        return str(rank), cause

    return found


def parallel(rank: int) -> list[float]:
    """Train task.py of the chapter for an epoch in one process; a rank has half of the samples.

    Return four weights, the number of samples and the last loss, that of all 16 samples.
    """
    model, (x, y) = _model(), _data(64)
    loss = _train_epoch(model, x, y, torch.arange(64))
    return [*model[0].weight[0, :4].tolist(), len(x) // 2, loss]


def repaired(rank: int) -> list[float]:
    """Train as buggy.py of the chapter should, in one process; return the loss after each epoch."""
    model, (x, y) = _model(), _data(75)
    losses = []
    for epoch in range(2):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
        _train_epoch(model, x, y, order)
        with torch.no_grad():
            losses.append(F.mse_loss(model(x[64:]), y[64:]).item())
    return losses


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(8, 16, dtype=torch.float64)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 1, dtype=torch.float64))


def _data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :1]) + x[:, 1:2]


def _train_epoch(model: nn.Sequential, x: Tensor, y: Tensor, order: Tensor) -> float:
    """Train on the samples in this order, 16 in each step; return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in order.split(16):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return loss.item()


def _judged(judge: Callable[[int, Any], None]) -> Callable[[Any], Callable[[int], Any]]:
    """Return a `through` that has `judge(rank, results)` look at what the reader's ranks return."""

    def through(answer: Any) -> Callable[[int], Any]:
        def at(rank: int) -> Any:
            results = of_each_rank(2)(answer)(rank)
            if not callable(answer):  # the reference, or dots
                judge(rank, results)
            return results

        return at

    return through


def _trained(rank: int, results: Any) -> None:
    """Say which of the results is not right, by its name."""
    if not isinstance(results, (tuple, list)) or len(results) != 6:
        raise WrongAnswer(
            f"rank {rank}: expected 6 results, four weights, the number of samples and the loss"
        )
    _only_numbers(rank, results)
    *weights, samples, loss = results
    *right_weights, right_samples, right_loss = parallel(rank)
    if not all(map(_close, weights, right_weights)):
        raise WrongAnswer(f"rank {rank}: the weights are not right")
    if samples != right_samples:
        raise WrongAnswer(f"rank {rank}: the number of samples is not right: {samples}")
    if not _close(loss, right_loss):
        raise WrongAnswer(f"rank {rank}: the loss is not right: {loss}")


def _evaluated(rank: int, losses: Any) -> None:
    """Say after which epoch the test loss is not right."""
    if not isinstance(losses, (tuple, list)) or len(losses) != 2:
        raise WrongAnswer(f"rank {rank}: expected 2 test losses, one after each epoch")
    _only_numbers(rank, losses)
    for epoch, right in enumerate(repaired(rank)):
        if not _close(losses[epoch], right):
            raise WrongAnswer(
                f"rank {rank}: the test loss after epoch {epoch} is not right: {losses[epoch]:.4f}"
            )


def _only_numbers(rank: int, results: tuple | list) -> None:
    if not all(isinstance(result, Number) for result in results):
        raise WrongAnswer(f"rank {rank}: expected numbers, such as those from .item()")


def _close(one: float, other: float) -> bool:
    rtol = RTOL[torch.float64]
    return math.isclose(one, other, rel_tol=rtol, abs_tol=rtol)


COLLECTIVE = {
    "A": "broadcast",
    "B": "gather",
    "C": "all_reduce",
    "D": "reduce_scatter",
    "E": "barrier",
}
CAUSES = ("batches", "branch", "memory", "order")
CULPRIT = {"A": (3, "memory"), "B": (1, "batches"), "C": (0, "branch"), "D": (None, "order")}

EXERCISES = {
    "collective": Exercise(
        reference=COLLECTIVE, through=_at, cases=lambda: [(key,) for key in COLLECTIVE]
    ),
    "exchange": Exercise(
        reference=[200.0, 100.0], through=of_each_rank(2), cases=lambda: [(0,), (1,)]
    ),
    "parallel": Exercise(reference=parallel, through=_judged(_trained), cases=lambda: [(0,), (1,)]),
    "culprit": Exercise(
        reference=CULPRIT, through=_rank_and_cause, cases=lambda: [(key,) for key in CULPRIT]
    ),
    "repaired": Exercise(
        reference=repaired, through=_judged(_evaluated), cases=lambda: [(0,), (1,)]
    ),
}
