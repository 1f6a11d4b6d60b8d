"""Chapter 20, exercises: a spring, its constants, misleading gradients, a bounce, a root."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.differentiable import (
    bounce_at_event,
    bounce_at_step,
    gauss_newton,
    standard_errors,
)
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


# ---- 4: does the gradient point where a larger change goes?


def gradient_misleads(function: Callable[[Tensor], Tensor], x: Tensor, h: float) -> bool:
    """Whether the derivative and the central difference over `h` differ in sign: -, 0 or +."""
    point = x.detach().clone().requires_grad_()
    y = function(point)
    slope = torch.autograd.grad(y, point)[0] if y.requires_grad else torch.zeros_like(x)
    return bool(slope.sign() != (function(x + h) - function(x - h)).sign())


def _dropped(height: Tensor) -> Tensor:
    return bounce_at_step(height, speed=1.0, steps=10, dt=0.1)


def _dropped_with_moment(height: Tensor) -> Tensor:
    return bounce_at_event(height, speed=1.0, steps=10, dt=0.1)


def _slopes() -> list[tuple]:
    cases = []
    for function, x, h in (
        (torch.exp, 0.5, 0.1),
        (lambda x: -(x**3), 0.7, 0.1),
        (torch.square, 0.1, 0.5),  # a difference to one side only has the other sign
        (torch.square, -0.1, 0.5),
        (_dropped, 0.5536, 0.3),  # misleads
        (_dropped, 0.5536, 1e-6),  # so small a change does not show it
        (_dropped_with_moment, 0.5536, 0.3),
        (torch.floor, 0.4, 0.7),  # 0: misleads
        (lambda x: (x > 0.5).to(x), 0.4, 0.3),  # no graph: misleads
        (lambda x: (x > 0.5).to(x), 0.4, 0.05),  # no graph, and no change either
        (lambda x: 1e-9 * x, 0.4, 0.05),  # small, and right
    ):
        cases.append((function, torch.tensor(x).double(), h))
    return cases


# ---- 5: a bounce


def bounce(height: Tensor, speed: Tensor, bounciness: Tensor, steps: int, dt: float) -> Tensor:
    """After a fall of h at speed v, the height at time T is e·(v·T - h), with e the bounciness."""
    time = steps * dt
    if height > speed * time:
        return height - speed * time
    return bounciness * (speed * time - height)


def _bounces() -> list[tuple]:
    cases = []
    for height, speed, bounciness, steps in (
        (0.5536, 1.0, 1.0, 10),
        (0.7123, 2.0, 0.6, 10),
        (1.314, 1.7, 0.9, 25),
        (3.0, 1.0, 0.5, 10),  # does not reach the ground
    ):
        numbers = [torch.tensor(x).double() for x in (height, speed, bounciness)]
        cases.append((*numbers, steps, 0.1))
    return cases


# ---- 6: the gradient of a root


def root_gradients(z: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """z³ + a·z = b, differentiated: 3z²·dz + a·dz + z·da = db."""
    slope = 3 * z.square() + a
    return -z / slope, 1 / slope


def _roots() -> list[tuple[Tensor, Tensor]]:
    z, a = torch.randn(6).double(), 0.5 + torch.rand(6).double()
    return [
        (z, a),
        (torch.zeros(2).double(), a[:2]),
        (torch.tensor(2.0), torch.tensor(1.0)),
        (1e6 * z, a),
    ]


EXERCISES = {
    "spring": Exercise(reference=spring, cases=_springs, gradient=True),
    "fit_spring": Exercise(reference=fit_spring, cases=_measured, through=_within_1_percent),
    "spring_errors": Exercise(reference=spring_errors, cases=_fitted, scale=1e-3),
    "gradient_misleads": Exercise(reference=gradient_misleads, cases=_slopes),
    "bounce": Exercise(reference=bounce, cases=_bounces, gradient=True),
    "root_gradients": Exercise(reference=root_gradients, cases=_roots, scale=1e-12),
}
