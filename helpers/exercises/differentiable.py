"""Chapter 20, exercises: a spring, its constants and their error bars."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.differentiable import gauss_newton, standard_errors
from helpers.exercises.harness import Exercise

# ---- 1: a spring with a damper


def spring(start: Tensor, stiffness: Tensor, damping: Tensor, steps: int, dt: float) -> Tensor:
    """Positions after each step: first the velocity, then the position with the new velocity."""
    position, velocity, positions = start, torch.zeros_like(start), []
    for _ in range(steps):
        velocity = velocity + dt * (-stiffness * position - damping * velocity)
        position = position + dt * velocity
        positions.append(position)
    return torch.stack(positions)


def _springs() -> list[tuple]:
    one, many = torch.tensor(1.0).double(), torch.randn(3).double()
    return [
        (one, torch.tensor(4.0).double(), torch.tensor(0.5).double(), 12, 0.1),
        (one, torch.tensor(4.0).double(), torch.tensor(0.0).double(), 1, 0.25),
        (many, torch.rand(3).double(), torch.rand(3).double(), 7, 0.2),
        (torch.tensor(-2.0), torch.tensor(1.0), torch.tensor(3.0), 9, 0.1),
    ]


# ---- 2: its constants


def fit_spring(seen: Tensor, start: Tensor, guess: Tensor, dt: float) -> Tensor:
    """The stiffness and the damping whose positions are nearest to `seen`, from a guess [2]."""

    def residuals(logs: Tensor) -> Tensor:
        stiffness, damping = logs.exp()
        return spring(start, stiffness, damping, len(seen), dt) - seen

    return gauss_newton(residuals, guess.log(), steps=12).exp()


def _within_1_percent(answer: Any) -> Callable[..., Any]:
    """Call both constants right that differ from the reference's by less than 1%."""

    def called(*arguments: Any) -> Any:
        found, exact = answer(*arguments), fit_spring(*arguments)
        if not isinstance(found, Tensor) or found.shape != exact.shape:
            return found
        found = found.detach()
        return exact if bool(((found - exact).abs() < 0.01 * exact).all()) else found

    return called


def _measured() -> list[tuple]:
    cases = []
    for start, constants, guess in (
        (1.0, (4.0, 0.5), (3.0, 0.8)),
        (-0.5, (2.0, 0.3), (3.0, 0.2)),
        (2.0, (1.5, 1.0), (1.0, 0.5)),
    ):
        at = torch.tensor(start).double()
        true = torch.tensor(constants).double()
        seen = spring(at, *true, 30, 0.1)
        cases.append((seen, at, torch.tensor(guess).double(), 0.1))
    return cases


# ---- 3: their error bars


def spring_errors(seen: Tensor, start: Tensor, constants: Tensor, dt: float) -> Tensor:
    """The standard errors [2] of a fitted stiffness and damping, the noise from the residuals."""

    def residuals(constants: Tensor) -> Tensor:
        stiffness, damping = constants
        return spring(start, stiffness, damping, len(seen), dt) - seen

    return standard_errors(residuals, constants)


def _fitted() -> list[tuple]:
    cases = []
    for start, constants, steps in ((1.0, (4.0, 0.5), 30), (-0.5, (2.0, 0.3), 12)):
        at, true = torch.tensor(start).double(), torch.tensor(constants).double()
        seen = spring(at, *true, steps, 0.1) + 0.02 * torch.randn(steps).double()
        cases.append((seen, at, fit_spring(seen, at, true, 0.1), 0.1))
    return cases


EXERCISES = {
    "spring": Exercise(reference=spring, cases=_springs, gradient=True),
    "fit_spring": Exercise(reference=fit_spring, cases=_measured, through=_within_1_percent),
    "spring_errors": Exercise(reference=spring_errors, cases=_fitted, scale=1e-3),
}
