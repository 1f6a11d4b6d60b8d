"""Chapter 03, exercises: a graph on paper, leaves, a training loop, VJPs, the engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.autograd import Value
from helpers.exercises.harness import Exercise

# ---- 1: a graph on paper


def on_paper() -> tuple[float, ...]:
    """Return the gradients of L = u v with respect to v, u, a, b and c, by PyTorch."""
    a = torch.tensor(2.0, requires_grad=True)
    b = torch.tensor(-3.0, requires_grad=True)
    c = torch.tensor(10.0, requires_grad=True)
    u = a * b
    v = u + c
    gradients = torch.autograd.grad(u * v, (v, u, a, b, c))
    return tuple(gradient.item() for gradient in gradients)


# ---- 2: five tensors


def five_tensors() -> tuple[list[bool], list[float | None]]:
    """Return is_leaf and .grad of w, x, y, c and the loss, by PyTorch."""
    w = torch.tensor(2.0, requires_grad=True)
    x = torch.tensor(3.0)
    y = w * x
    c = y.detach()
    loss = y * c
    loss.backward()
    tensors = [w, x, y, c, loss]
    grads = [w.grad.item(), x.grad, None, c.grad, None]  # only leaves may be asked for .grad
    return [tensor.is_leaf for tensor in tensors], grads


# ---- 3: a derivative by hand


def silu_slope(x: Tensor) -> Tensor:
    """Return the derivative of x σ(x), by PyTorch's own rule."""
    return torch.func.grad(lambda t: torch.nn.functional.silu(t).sum())(x)


def _inputs() -> list[tuple[Tensor]]:
    inputs = [
        torch.linspace(-4, 4, 9),
        torch.tensor(0.5),
        torch.tensor([-900.0, 900]),  # exp overflows here
        torch.rand(2, 3).double().T,
        torch.zeros(1, 2),
        torch.zeros(0, 3),
        torch.randn(40, dtype=torch.float64) * 20,
        torch.randn(8)[::2],
    ]
    return [(x,) for x in inputs]


# ---- 4: gradients in parts


def gradient_in_parts(w: Tensor, x: Tensor, y: Tensor, sizes: list[int]) -> Tensor:
    """Return the gradient of the mean of (w x - y)² over all samples, by hand."""
    del sizes  # the whole batch at once
    return (2 * (w * x - y) * x).mean()


def _batches() -> list[tuple]:
    cases = []
    for sizes in [[3, 1], [2, 2], [1, 4, 2], [5]]:
        x = torch.randn(sum(sizes), dtype=torch.float64)
        y = torch.randn(sum(sizes), dtype=torch.float64)
        cases.append((torch.tensor(1.5, dtype=torch.float64), x, y, sizes))
    return cases


# ---- 5: a training loop


def fit_line(x: Tensor, y: Tensor, lr: float, steps: int) -> tuple[float, float, float]:
    """Return w, b and the mean loss of gradient descent from 0, with derivatives by hand."""
    w = b = total = 0.0
    for _ in range(steps):
        error = w * x + b - y
        total += error.square().mean().item()
        w -= lr * (2 * error * x).mean().item()
        b -= lr * (2 * error).mean().item()
    return w, b, total / steps


def _lines() -> list[tuple]:
    cases = []
    for count, lr, steps in [(6, 0.1, 1), (6, 0.1, 2), (10, 0.05, 5), (4, 0.2, 30)]:
        x = torch.linspace(0, 2, count, dtype=torch.float64)
        y = 3 * x + 2 + 0.3 * torch.randn(count, dtype=torch.float64)
        cases.append((x, y, lr, steps))
    return cases


# ---- 6 and 8: vector-Jacobian products


def matmul_vjp(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a and b, where g is that of a @ b."""
    return torch.func.vjp(torch.matmul, a, b)[1](g)


def softmax_vjp(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of x, where g is that of its softmax along the last dimension."""
    return torch.func.vjp(lambda t: t.softmax(-1), x)[1](g)[0]


def _products() -> list[tuple]:
    shapes = [
        ((2, 3), (3, 4)),
        ((3, 3), (3, 3)),
        ((5, 2, 3), (5, 3, 1)),
        ((2, 4, 1, 3), (2, 4, 3, 2)),
        ((1, 1), (1, 1)),
        ((2, 3), (3, 0)),
        ((2, 0), (0, 3)),
    ]
    cases = []
    for a, b in shapes:
        cases.append((torch.randn(a), torch.randn(b), torch.randn(*a[:-1], b[-1])))
    cases.append((torch.randn(3, 2).T, torch.randn(4, 3).T, torch.randn(4, 2).T))
    cases.append(tuple(torch.randn(4, 4, dtype=torch.float64) for _ in range(3)))
    return cases


def _softmaxes() -> list[tuple]:
    cases = [tuple(torch.randn(2, *shape)) for shape in [(4,), (3, 3), (2, 1, 5), (6, 1), (0, 3)]]
    cases.append((torch.tensor([900.0, 899.0, -900.0]), torch.ones(3).cumsum(0)))
    cases.append((torch.randn(5, 3).T, torch.randn(5, 3).T))
    cases.append(tuple(torch.randn(2, 3, 50, dtype=torch.float64)))
    return cases


# ---- 7: a new operation for the engine


def logsumexp(x: Tensor) -> Tensor:
    """Return the log of the sum of exp over all elements, with PyTorch."""
    return x.flatten().logsumexp(0)


def _in_an_expression(operation: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    """Turn the operation into: its value, and the gradient through an expression of it.

    The expression uses the operation twice, on half its argument: a rule must pass `g` on.
    """

    def value_and_gradient(x: Tensor) -> Any:
        if operation is logsumexp:  # the reference, with PyTorch
            leaf = x.requires_grad_()
        else:
            leaf = Value(x.numpy())
        inner = operation(leaf * 0.5)
        if inner is ...:
            return ...
        (inner * inner - 3 * inner).backward()
        return torch.as_tensor(inner.data), torch.as_tensor(leaf.grad)

    return value_and_gradient


def _values() -> list[tuple[Tensor]]:
    lists = [[0.0, 1, 2], [[-3.0, 4], [4, 4]], [2000.0, 1990], [-5000.0], 3.0, [[[1.0], [-2.0]]]]
    cases = [(torch.tensor(one, dtype=torch.float64),) for one in lists]
    cases.append((torch.randn(30, 7, dtype=torch.float64),))
    cases.append((torch.full((4,), -4000.0, dtype=torch.float64),))
    return cases


# ---- 9: gradient descent with momentum


def momentum(f: Callable[[Any], Any], start: Tensor, lr: float, mu: float, steps: int) -> Tensor:
    """Return where PyTorch's SGD arrives."""
    p = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=lr, momentum=mu)
    for _ in range(steps):
        (p.grad,) = torch.autograd.grad(f(p), p)
        optimizer.step()
    return p.detach()


def bowl(p: Any) -> Any:
    """Sum of (p - 1)²: of a Value or of a tensor."""
    return ((p - 1) ** 2).sum()


def valley(p: Any) -> Any:
    """Sum of p tanh p: |p| with a round bottom."""
    return (p.tanh() * p).sum()


def _runs() -> list[tuple]:
    begin = torch.tensor([[3.0], [-2.0]], dtype=torch.float64)
    cases = []
    for f in (bowl, valley):
        cases += [(f, begin, 0.1, 0.9, 20), (f, begin, 0.1, 0.5, 3), (f, begin, 0.1, 0.0, 4)]
    cases.append((valley, begin, 0.02, 0.9, 7))
    cases.append((bowl, begin, 0.1, 0.9, 0))
    cases.append((bowl, torch.tensor([5.0], dtype=torch.float64), 0.3, 0.2, 5))
    cases.append((valley, torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).T, 0.2, 0.7, 6))
    return cases


EXERCISES = {
    "on_paper": Exercise(reference=on_paper, cases=lambda: [()]),
    "five_tensors": Exercise(reference=five_tensors, cases=lambda: [()]),
    "silu_slope": Exercise(
        reference=silu_slope, cases=_inputs, gradient=True, forbid=("silu", "where", "nan_to_num")
    ),
    "gradient_in_parts": Exercise(reference=gradient_in_parts, cases=_batches),
    "fit_line": Exercise(reference=fit_line, cases=_lines),
    "matmul_vjp": Exercise(reference=matmul_vjp, cases=_products),
    "softmax_vjp": Exercise(reference=softmax_vjp, cases=_softmaxes),
    "logsumexp": Exercise(reference=logsumexp, cases=_values, through=_in_an_expression),
    "momentum": Exercise(reference=momentum, cases=_runs),
}
