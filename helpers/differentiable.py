"""Chapter 20: simulators with gradients; fits, error bars, and what a search spends."""

# The simulators are made of ordinary tensor operations, so that autograd and `torch.func` go
# through them. Units are meters and seconds where nothing is said.

import math
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
    variance = left.square().sum() / (len(left) - len(p))
    return (variance * torch.linalg.inv(jacobian.T @ jacobian).diagonal()).sqrt()


class BudgetSpent(Exception):
    """Raised by `Budget` when the next call would cost more than is left."""


class Budget:
    """Count what a search spends on `loss`, in simulator calls, and remember the best it has seen.

    loss: parameters [d] -> scalar tensor. `limit`: how many calls may be spent. `gradient_cost`:
    how many calls a loss together with its gradient counts. Parameters may be tensors or arrays;
    `value` returns a float and `gradient` a float and an array, as SciPy wants them. The loss gets
    a float64 copy of its own, which it may keep or change.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], limit: float, gradient_cost: float = 1):
        self.loss, self.limit, self.gradient_cost = loss, limit, gradient_cost
        self.spent, self.best, self.best_at = 0.0, float("inf"), None
        self.history: list[tuple[float, float]] = []  # (spent, best so far)

    def value(self, p: Any) -> float:
        """Return the loss at `p`, for one call."""
        p = torch.as_tensor(p, dtype=torch.float64).detach()
        self._spend(1)
        with torch.no_grad():
            loss = self.loss(p.clone()).item()
        self._note(loss, p)
        return loss

    def gradient(self, p: Any) -> tuple[float, Any]:
        """Return the loss at `p` and its gradient, for `gradient_cost` calls."""
        p = torch.as_tensor(p, dtype=torch.float64).detach()
        self._spend(self.gradient_cost)
        unknowns = p.clone().requires_grad_()
        loss = self.loss(unknowns)
        (slope,) = torch.autograd.grad(loss, unknowns)
        self._note(loss.item(), p)
        return loss.item(), slope.numpy()

    def calls_until(self, goal: float) -> int | None:
        """Return how many calls were spent until the best loss was below `goal`, or None."""
        for spent, best in self.history:
            if best < goal:
                return math.ceil(spent)
        return None

    def _spend(self, calls: float) -> None:
        if self.spent + calls > self.limit:
            raise BudgetSpent(f"expected to stay within {self.limit} calls, spent {self.spent}")
        self.spent += calls

    def _note(self, loss: float, p: Tensor) -> None:
        if loss < self.best:
            self.best, self.best_at = loss, p.clone()
        self.history.append((self.spent, self.best))
