"""Chapter 20, exercises: misleading gradients, a bounce, the gradients of a root."""

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.differentiable_programs import bounce_at_event, bounce_at_step
from helpers.exercises.harness import Exercise

# ---- 1: does the gradient point where a larger change goes?


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


# ---- 2: a bounce


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


# ---- 3: the gradient of a root


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
    "gradient_misleads": Exercise(reference=gradient_misleads, cases=_slopes),
    "bounce": Exercise(reference=bounce, cases=_bounces, gradient=True),
    "root_gradients": Exercise(reference=root_gradients, cases=_roots, scale=1e-12),
}
