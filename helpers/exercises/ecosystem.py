"""Chapter 19, exercises: recall@k, a loop as a LightningModule, two mistakes with Accelerate."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import ecosystem, embeddings
from helpers.exercises.harness import Exercise, WrongAnswer

# ---- 1: how good is a search?


def recall(scores: Tensor, right: Tensor, k: int) -> float:
    """Count the queries whose right document is among the k best."""
    return embeddings.recall_at(scores, right, min(k, scores.shape[1]))


def _searches() -> list[tuple[Tensor, Tensor, int]]:
    fixed = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.8, 0.4], [0.3, 0.6, 0.7], [0.1, 0.2, 0.3]])
    cases = [(fixed, torch.tensor([2, 1, 0, 0]), k) for k in (1, 2, 3, 5)]
    for queries, documents, k in ((5, 7, 1), (8, 20, 5), (6, 4, 4), (3, 9, 2)):
        scores = torch.rand(queries, documents) - 0.5  # negative ones, too
        cases.append((scores, torch.randint(documents, (queries,)), k))
    wide = torch.rand(12, 6).t()  # not contiguous
    return [*cases, (wide, torch.randint(12, (6,)), 3), (wide.double() * 1e6, torch.arange(6), 4)]


# ---- 2 and 3: whoever runs the loop, the weights have to be those of a bare one

CLOSE = 1e-9  # in float64; sums taken in another order differ by some 1e-16
SAME = "the weights of the bare loop"


def _job(batches: int) -> tuple[nn.Module, DataLoader]:
    """Return a small model in float64 and a loader of batches of 8: the same each time."""
    made = torch.Generator().manual_seed(batches)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=made, dtype=torch.float64)
            parameter.copy_(drawn / 2)
    x = torch.randn(8 * batches, 4, generator=made, dtype=torch.float64)
    y = x[:, 0] * x[:, 1] + 2 * x[:, 2]
    return model, DataLoader(TensorDataset(x, y), batch_size=8)


def _compare(model: nn.Module, wanted: nn.Module, start: nn.Module) -> str:
    """Say that the weights are right, or raise WrongAnswer with how far off they are."""
    mine, theirs, before = (
        nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, wanted, start)
    )
    if torch.equal(mine, before):
        raise WrongAnswer("no weight has changed")
    gap = (mine - theirs).abs().max().item()
    if not gap < CLOSE:  # nan is not close, either
        raise WrongAnswer(f"a weight differs from that of the bare loop by {gap:.0e}")
    return SAME


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that Lightning prints about each `fit`."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def regression(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    """The loop of the exercise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for _ in range(epochs):
        for x, y in loader:
            loss = F.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()


def _by_lightning(answer: Any) -> Callable[[int, int], Any]:
    def trained(batches: int, epochs: int) -> Any:
        if answer is regression:
            return SAME
        if not (isinstance(answer, type) and issubclass(answer, L.LightningModule)):
            raise WrongAnswer("expected a class that inherits from L.LightningModule")
        model, loader = _job(batches)
        start, wanted = copy.deepcopy(model), copy.deepcopy(model)
        with _quiet():
            module = answer(model)
            loss = module.training_step(next(iter(loader)), 0)
            optimizers = module.configure_optimizers()
            if loss is ... or optimizers is ...:
                return ...
            if loss is None:
                raise WrongAnswer("training_step returned None, so Lightning skips every batch")
            if optimizers is None:
                raise WrongAnswer("configure_optimizers returned None, so nothing is updated")
            L.Trainer(max_epochs=epochs, **ecosystem.QUIET).fit(module, loader)
        regression(wanted, loader, epochs)
        return _compare(model, wanted, start)

    return trained


# ---- 3: accumulation with Accelerate


def accumulated(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, clip: float, k: int
) -> None:
    """What the loop of the exercise is meant to do, in bare PyTorch."""
    for number, (x, y) in enumerate(loader, 1):
        (F.mse_loss(model(x)[:, 0], y) / k).backward()
        if number % k == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def _own_settings() -> Iterator[None]:
    """Let an `Accelerator` begin anew, and give the notebook its own settings back after."""
    states = (PartialState, AcceleratorState, GradientState)
    kept = [dict(state._shared_state) for state in states]
    ecosystem.forget_accelerate()
    try:
        yield
    finally:
        for state, before in zip(states, kept, strict=True):
            state._shared_state.clear()
            state._shared_state.update(before)


def _by_accelerate(answer: Any) -> Callable[[int, int, float], Any]:
    def trained(k: int, batches: int, clip: float) -> Any:
        if answer is accumulated:
            return SAME
        model, loader = _job(batches)
        start, wanted = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with _own_settings():
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
            if answer(accelerator, model, optimizer, loader, clip) is ...:
                return ...
        plain = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
        accumulated(wanted, plain, loader, clip, k)
        return _compare(model, wanted, start)

    return trained


EXERCISES = {
    "recall": Exercise(reference=recall, cases=_searches),
    "regression": Exercise(
        reference=regression, through=_by_lightning, cases=lambda: [(3, 1), (3, 4), (5, 6)]
    ),
    "accumulated": Exercise(
        reference=accumulated,
        through=_by_accelerate,
        cases=lambda: [(1, 4, 0.5), (2, 6, 1000.0), (2, 6, 0.5), (3, 9, 0.5)],
    ),
}
