"""Chapter 20: bounces, a renderer, a planner, a solver, a fixed point, with their gradients."""

# Nearly everything here is made of ordinary tensor operations, so that autograd and `torch.func` go
# through it. Not so the bounces, whose `if` looks at a number, so that `vmap` cannot. Units are
# meters, seconds and radians where nothing is said.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# ---- events


def bounce_at_step(height: Tensor, *, speed: float, steps: int, dt: float) -> Tensor:
    """Drop a ball with constant `speed`; turn it round at the first step that begins below 0."""
    velocity = -speed
    for _ in range(steps):
        if height < 0 and velocity < 0:
            velocity = -velocity
        height = height + dt * velocity
    return height


def bounce_at_event(height: Tensor, *, speed: float, steps: int, dt: float) -> Tensor:
    """The same ball, turned round at the moment when it hits the ground, inside of the step."""
    velocity = -speed
    for _ in range(steps):
        below = height + dt * velocity
        if below < 0 and velocity < 0:
            until = height / speed  # a tensor: the moment depends on the height, and has a gradient
            velocity = -velocity
            height = (dt - until) * velocity  # from the ground
        else:
            height = below
    return height


# ---- a renderer


def ellipse_image(ellipse: Tensor, *, size: int, softness: float) -> Tensor:
    """Render an ellipse on black: an image [3, size, size] of a square from -1 to 1.

    ellipse [8]: center x and y, logarithms of the half axes a and b, angle in radians, red, green,
    blue. The edge is a sigmoid, about `softness` wide; as softness goes to 0 it becomes a step.
    """
    x, y, log_a, log_b, angle = ellipse[:5]
    a, b = log_a.exp(), log_b.exp()  # positive, whatever an optimizer does to the logarithms
    line = torch.linspace(-1, 1, size, dtype=ellipse.dtype)
    down, right = torch.meshgrid(line, line, indexing="ij")
    along = (right - x) * angle.cos() + (down - y) * angle.sin()
    across = (down - y) * angle.cos() - (right - x) * angle.sin()
    # 0 on the edge, negative inside; times the mean radius it is roughly a distance
    outside = ((along / a).square() + (across / b).square() + 1e-12).sqrt() - 1
    cover = torch.sigmoid(-outside * (a * b).sqrt() / softness)
    return ellipse[5:, None, None] * cover


# ---- a planner


def path_cost(
    points: Tensor, centers: Tensor, radii: Tensor, *, margin: float, samples: int = 4
) -> Tensor:
    """Return a scalar: squared lengths of the steps, and a penalty for coming near an obstacle.

    points: [n, 2], with both ends. centers [m, 2], radii [m]: disks. The penalty begins `margin`
    outside of a disk and grows with the square of how deep a place lies. It looks at `samples`
    places of each step; with 1 only at the points, and a long step can jump over a disk.
    """
    steps = points.diff(dim=0)
    shares = torch.arange(samples, dtype=points.dtype) / samples
    places = points[:-1, None] + shares[:, None] * steps[:, None]  # [n - 1, samples, 2]
    distance = (places[:, :, None] - centers).norm(dim=-1)  # [n - 1, samples, m]
    depth = (radii + margin - distance).clamp(min=0)
    return len(steps) * steps.square().sum() + 200 / samples * depth.square().sum()


# ---- differential equations


def rk4(f: Callable[[Tensor], Tensor], y: Tensor, *, steps: int, dt: float) -> Tensor:
    """Solve dy/dt = f(y) by the classical Runge-Kutta rule: return [steps + 1, …], `y` first."""
    states = [y]
    for _ in range(steps):
        k1 = f(y)
        k2 = f(y + dt / 2 * k1)
        k3 = f(y + dt / 2 * k2)
        k4 = f(y + dt * k3)
        y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        states.append(y)
    return torch.stack(states)


# ---- a fixed point


class FixedPoint(torch.autograd.Function):
    """z = tanh(W z + u), found by repetition; differentiated where it is, not how it was found.

        z = FixedPoint.apply(weight, u, steps)

    weight [n, n] with a spectral norm below 1, u [n], steps: how often to repeat. At the fixed
    point, z - tanh(W z + u) = 0; the implicit function theorem gives
    dL/du = (I - D W)⁻ᵀ dL/dz times D, with D = diag(1 - z²). Nothing but z and W is kept.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, u: Tensor, steps: int) -> Tensor:
        """Repeat `steps` times from 0."""
        z = torch.zeros_like(u)
        for _ in range(steps):
            z = torch.tanh(weight @ z + u)
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep W and z."""
        weight, _, _ = inputs
        ctx.save_for_backward(weight, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Solve one linear system."""
        weight, z = ctx.saved_tensors
        slope = 1 - z.square()
        system = torch.eye(len(z), dtype=z.dtype, device=z.device) - slope[:, None] * weight
        of_u = torch.linalg.solve(system.T, grad) * slope
        return torch.outer(of_u, z), of_u, None
