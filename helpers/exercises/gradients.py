"""Chapter 08, exercises: rows that stay, reversing, Hessian times vector, log(1 - exp(-x))."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from helpers.exercises.harness import Exercise, WrongAnswer
from helpers.gradients import reverse_gradient

# ---- 1: only some rows learn


def train_only(table: Tensor, rows: list[int]) -> Any:
    """Register a hook after which only these rows of `table` receive a gradient."""
    keep = table.new_zeros(len(table), 1, dtype=torch.bool)
    keep[rows] = True
    return table.register_hook(lambda gradient: torch.where(keep, gradient, 0.0))


def _with_and_without(register: Callable) -> Callable:
    """Turn the answer into: the gradient with its hook, and after the hook was removed."""

    def gradients(values: Tensor, rows: list[int], nan_row: int | None = None) -> Any:
        table = values.clone().requires_grad_()
        handle = register(table, rows)
        if handle is ...:
            return ...
        weights = torch.arange(1.0, values.numel() + 1, dtype=values.dtype).view_as(values)
        if nan_row is not None:
            weights[nan_row] = math.nan
        (table * weights).sum().backward()
        ((table[rows] ** 2).sum() + table.sum()).backward()  # the hook stays
        with_hook = table.grad.clone()
        handle.remove()
        table.grad = None
        (table * weights).sum().backward()
        return with_hook, table.grad

    return gradients


def _tables() -> list[tuple]:
    return [
        (torch.ones(4, 3), [1, 3]),
        (torch.ones(2, 1), [0]),
        (torch.randn(3, 2, dtype=torch.float64), []),
        (torch.randn(3, 2), [0, 1, 2]),
        (torch.randn(5, 4), [2, 2]),
        (torch.ones(3, 2), [1], 2),  # a row that is not trained has a NaN in its gradient
        (torch.ones(3, 2), [0, 2], 2),  # one that is trained keeps it
    ]


# ---- 2: a gradient that turns round


def _points() -> list[tuple]:
    cases = [(torch.randn(2, 3, dtype=torch.float64), strength) for strength in (1.0, 0.25, 0.0)]
    return [*cases, (torch.randn(4)[::2], 3.0), (torch.zeros(0), 1.0), (torch.tensor(2.0), -1.0)]


def _leaving_x_alone(answer: Callable) -> Callable:
    """Refuse an answer that puts a hook on `x` itself: it would reverse every use of `x`."""

    def reverse(x: Tensor, strength: float) -> Any:
        result = answer(x, strength)
        (elsewhere,) = torch.autograd.grad(x.sum(), x)
        if not torch.equal(elsewhere, torch.ones_like(x)):
            raise WrongAnswer("x itself was changed: the gradient of x.sum() should still be 1")
        return result

    return reverse


# ---- 3: the Hessian times a vector


def hvp(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """Return H v by the whole Hessian."""
    hessian = torch.func.jacrev(torch.func.grad(f))(x)
    return (hessian.reshape(x.numel(), x.numel()) @ v.flatten()).view_as(x)


def cubic(x: Tensor) -> Tensor:
    """Sum of x³, whose Hessian is diagonal."""
    return (x**3).sum()


def coupled(x: Tensor) -> Tensor:
    """A function whose Hessian has no zero."""
    return torch.sin(x.sum()) * (x * x).sum() + x.exp().sum()


def quadratic(x: Tensor) -> Tensor:
    """(sum of x)²: its Hessian is constant."""
    return x.sum() ** 2


def linear(x: Tensor) -> Tensor:
    """3 times the sum of x: its Hessian is 0."""
    return 3 * x.sum()


def _without_a_trace(answer: Callable) -> Callable:
    """Refuse an answer after which the given `x` requires a gradient."""

    def product(f: Callable, x: Tensor, v: Tensor) -> Any:
        result = answer(f, x, v)
        if x.requires_grad:
            raise WrongAnswer("x was changed: it requires a gradient now")
        return result

    return product


def _directions() -> list[tuple]:
    cases = []
    for f in (cubic, coupled, quadratic, linear):
        for shape in [(3,), (2, 2), ()]:
            x, v = torch.randn(2, *shape, dtype=torch.float64)
            cases.append((f, x, v))
    return cases


# ---- 4: log(1 - exp(-x))


class _Log1mexp(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        near = torch.log(-torch.expm1(-x))
        far = torch.log1p(-torch.exp(-x))
        return torch.where(x < math.log(2), near, far)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -grad_output * torch.exp(-x) / torch.expm1(-x)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(-x)) for x > 0, exact near 0 and far out."""
    return _Log1mexp.apply(x)


def _positive() -> list[tuple]:
    wide = torch.tensor([1e-300, 1e-20, 1e-9, 0.1, 0.6931, 0.6932, 1, 30, 700], dtype=torch.float64)
    narrow = torch.tensor([1e-30, 1e-8, 0.5, 2, 17, 80])
    return [(wide,), (narrow,), (torch.rand(3, 4).double().T + 1e-3,), (torch.zeros(0),)]


EXERCISES = {
    "train_only": Exercise(reference=train_only, cases=_tables, through=_with_and_without),
    "reverse": Exercise(
        reference=reverse_gradient, cases=_points, through=_leaving_x_alone, gradient=True
    ),
    "hvp": Exercise(reference=hvp, cases=_directions, through=_without_a_trace),
    "log1mexp": Exercise(reference=log1mexp, cases=_positive, gradient=True, scale=1e-300),
}
