"""Chapter 20, exercises: a damped spring, error bars of a fit, the gradient of a root."""

import torch
from torch import Tensor

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


# ---- 2: standard errors from a Jacobian


def errors_of_fit(jacobian: Tensor, residuals: Tensor) -> Tensor:
    """The roots of the diagonal of noise² · (JᵀJ)⁻¹, with n - d degrees of freedom."""
    n, d = jacobian.shape
    noise = residuals.square().sum() / (n - d)
    return (noise * torch.linalg.inv(jacobian.T @ jacobian).diagonal()).sqrt()


def _fits() -> list[tuple]:
    cases = []
    for n, d in ((10, 2), (5, 3), (40, 1)):
        cases.append((torch.randn(n, d).double(), 0.1 * torch.randn(n).double()))
    return [*cases, (torch.randn(3, 9).double().T, 5 * torch.rand(9).double())]


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
    "spring": Exercise(reference=spring, cases=_springs, gradient=True),
    "errors_of_fit": Exercise(
        reference=errors_of_fit, cases=_fits, forbid=("std", "var", "pinv", "lstsq")
    ),
    "root_gradients": Exercise(reference=root_gradients, cases=_roots, scale=1e-12),
}
