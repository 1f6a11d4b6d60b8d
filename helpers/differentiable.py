"""Chapter 20: simulators, a renderer, a planner: programs with gradients; fits, error bars."""

# Nearly everything here is made of ordinary tensor operations, so that autograd and `torch.func` go
# through it. Not so the bounces, whose `if` looks at a number, so that `vmap` cannot. Units are
# meters, seconds and radians where nothing is said.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jacfwd

# ---- simulators


def flight(constants: Tensor, start: Tensor, *, steps: int, dt: float, every: int = 1) -> Tensor:
    """Throw a ball: return its positions [steps // every, 2], by the midpoint rule.

    constants: (g in m/s², k in 1/m); the acceleration is -g upwards and -k·|v|·v against the
    velocity v. start: the velocity at the origin, m/s [2]. Positions are taken after every `every`
    of `steps` steps of `dt` seconds. Raises ValueError where `every` does not divide `steps`.
    """
    if steps % every:
        raise ValueError(f"expected steps to be a multiple of every, got {steps} and {every}")
    g, k = constants
    down = torch.stack([torch.zeros_like(g), -g])

    def acceleration(velocity: Tensor) -> Tensor:
        return down - k * velocity.norm() * velocity

    position, velocity = torch.zeros_like(start), start
    positions = []
    for step in range(1, steps + 1):
        halfway = velocity + dt / 2 * acceleration(velocity)
        position = position + dt * halfway
        velocity = velocity + dt * acceleration(halfway)
        if step % every == 0:
            positions.append(position)
    return torch.stack(positions)


def heat(start: Tensor, conductivity: Tensor, *, steps: int, every: int) -> Tensor:
    """Let heat flow along a rod: return the temperatures [steps // every, cells].

    start: temperatures of the cells [cells]. conductivity: [cells - 1], between neighbors, times
    the time step over the cell's length squared; above 1/2 the simulation is unstable. No heat
    leaves at the ends. Raises ValueError for conductivities that do not fit the cells.
    """
    if conductivity.shape != (len(start) - 1,):
        shape = list(conductivity.shape)
        raise ValueError(f"expected {len(start) - 1} conductivities between cells, got {shape}")
    temperature, frames = start, []
    end = start.new_zeros(1)
    for step in range(1, steps + 1):
        flow = conductivity * temperature.diff()
        temperature = temperature + torch.cat([flow, end]) - torch.cat([end, flow])
        if step % every == 0:
            frames.append(temperature)
    return torch.stack(frames)


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


# ---- fits and error bars


def gauss_newton(residuals: Callable[[Tensor], Tensor], start: Tensor, *, steps: int) -> Tensor:
    """Minimize the sum of squares of `residuals(p)` [n] over p [d], from `start`.

    Each step replaces the residuals by their tangent and solves that linear problem exactly. No
    step is damped: the start must be near enough. Works under `torch.func.vmap`.
    """
    p = start
    for _ in range(steps):
        jacobian = jacfwd(residuals)(p)  # [n, d]
        normal = jacobian.T @ jacobian
        p = p - torch.linalg.solve(normal, jacobian.T @ residuals(p))
    return p


def standard_errors(residuals: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    """Return the standard errors [d] of a least-squares fit `p` [d].

    The noise is estimated from what the fit leaves over, n - d degrees of freedom for n residuals
    of equal and independent noise; the covariance is noise² · (JᵀJ)⁻¹.
    """
    left = residuals(p)
    jacobian = jacfwd(residuals)(p)
    noise = left.square().sum() / (len(left) - len(p))
    return (noise * torch.linalg.inv(jacobian.T @ jacobian).diagonal()).sqrt()


class BudgetSpent(Exception):
    """Raised by `Budget` when the next call would cost more than is left."""


class Budget:
    """Count what a search spends on `loss`, in simulator calls, and remember the best it has seen.

    loss: parameters [d] -> scalar tensor. `limit`: how many calls may be spent. `gradient_cost`:
    how many calls a loss together with its gradient counts. Parameters may be tensors or arrays;
    `value` returns a float and `gradient` a float and an array, as SciPy wants them.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], limit: float, gradient_cost: float = 1):
        self.loss, self.limit, self.gradient_cost = loss, limit, gradient_cost
        self.spent, self.best, self.best_at = 0.0, float("inf"), None
        self.history: list[tuple[float, float]] = []  # (spent, best so far)

    def value(self, p: Any) -> float:
        """Return the loss at `p`, for one call."""
        p = torch.as_tensor(p, dtype=torch.float64)
        self._spend(1)
        with torch.no_grad():
            return self._note(self.loss(p).item(), p)

    def gradient(self, p: Any) -> tuple[float, Any]:
        """Return the loss at `p` and its gradient, for `gradient_cost` calls."""
        p = torch.as_tensor(p, dtype=torch.float64).clone().requires_grad_()
        self._spend(self.gradient_cost)
        loss = self.loss(p)
        (slope,) = torch.autograd.grad(loss, p)
        return self._note(loss.item(), p.detach()), slope.numpy()

    def _spend(self, calls: float) -> None:
        if self.spent + calls > self.limit:
            raise BudgetSpent(f"expected to stay within {self.limit} calls, spent {self.spent}")
        self.spent += calls

    def _note(self, loss: float, p: Tensor) -> float:
        if loss < self.best:
            self.best, self.best_at = loss, p.clone()
        self.history.append((self.spent, self.best))
        return loss


# ---- a renderer


def ellipse_image(shape: Tensor, *, size: int, softness: float) -> Tensor:
    """Render an ellipse on black: an image [3, size, size] of a square from -1 to 1.

    shape [8]: center x and y, logarithms of the half axes a and b, angle in radians, red, green,
    blue. The edge is a sigmoid, about `softness` wide; as softness goes to 0 it becomes a step.
    """
    x, y, log_a, log_b, angle = shape[:5]
    a, b = log_a.exp(), log_b.exp()  # positive, whatever an optimizer does to the logarithms
    line = torch.linspace(-1, 1, size, dtype=shape.dtype)
    down, right = torch.meshgrid(line, line, indexing="ij")
    along = (right - x) * angle.cos() + (down - y) * angle.sin()
    across = (down - y) * angle.cos() - (right - x) * angle.sin()
    # 0 on the edge, negative inside; times the mean radius it is roughly a distance
    outside = ((along / a).square() + (across / b).square() + 1e-12).sqrt() - 1
    cover = torch.sigmoid(-outside * (a * b).sqrt() / softness)
    return shape[5:, None, None] * cover


# ---- a planner


def path_cost(
    points: Tensor, centers: Tensor, radii: Tensor, *, margin: float, samples: int = 1
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
