"""Chapter 20, exercises: misleading gradients, a bounce, a regularization, a root."""

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


# ---- 3: how strong a regularization


def choose_strength(
    A: Tensor, y: Tensor, D: Tensor, noise: float, strengths: Tensor | list[float]
) -> float:
    """The largest of `strengths` whose root mean square residual is not above `noise`."""
    small_enough = []
    for strength in strengths:
        x = torch.linalg.solve(A.T @ A + strength * D.T @ D, A.T @ y)
        residual = (A @ x - y).square().mean().sqrt()
        if residual <= noise:
            small_enough.append(float(strength))
    return max(small_enough)


def _regularizations() -> list[tuple]:
    """At least one strength is small enough; no residual is within 2% of the noise."""
    eye = torch.eye(40).double()
    slope = eye.diff(dim=0)  # [39, 40]
    rod = torch.linalg.matrix_power(eye - 0.05 * slope.T @ slope, 80)
    start = torch.zeros(40).double()
    start[8:14] = 1.0
    heat = rod @ start + 0.01 * torch.randn(40).double()

    wide = torch.randn(30, 20).double() / 5  # more measurements than unknowns
    curve = torch.linspace(0, 3, 20).double().sin()
    seen = wide @ curve + 0.1 * torch.randn(30).double()
    bend = torch.eye(20).double().diff(n=2, dim=0)  # [18, 20]

    ramp = torch.linspace(0, 2, 40).double()
    noisy = ramp + 0.1 * torch.randn(40).double()

    rising = [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0]
    mixed = torch.tensor([0.1, 1e-3, 10.0, 1e-2, 1e-4], dtype=torch.float64)
    falling = torch.tensor([1e3, 100.0, 10.0, 1.0, 0.1], dtype=torch.float64)
    return [
        (rod, heat, slope, 0.0115, rising),
        (rod, heat, slope, 0.0115, mixed),
        (wide, seen, bend, 0.115, falling),
        (wide, seen, bend, 0.25, [2.0, 5e3, 0.02]),
        (eye, noisy, slope, 0.08, [0.3, 30.0, 3.0, 0.03]),
        (eye, noisy, slope, 0.3, [1.0, 10.0, 3.0]),  # all of them are small enough
    ]


# ---- 4: the gradient of a root


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
    "choose_strength": Exercise(reference=choose_strength, cases=_regularizations),
    "root_gradients": Exercise(reference=root_gradients, cases=_roots, scale=1e-12),
}
