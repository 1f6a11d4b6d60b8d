import math

import pytest
import torch
from torch.autograd import Function

from helpers.exercises import check
from helpers.exercises.gradients import EXERCISES
from helpers.exercises.harness import WrongAnswer


class Turn(Function):
    @staticmethod
    def forward(x, strength):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.strength, None


class Same(Turn):
    @staticmethod
    def backward(ctx, g):
        return g * ctx.strength, None


class Plain(Turn):
    @staticmethod
    def backward(ctx, g):
        return -g, None


def masked(table, rows):
    def only(gradient):
        kept = torch.zeros_like(gradient)
        kept[rows] = gradient[rows]
        return kept

    return table.register_hook(only)


def in_place(table, rows):
    """Not allowed by PyTorch, but right as long as nobody else reads the gradient."""

    def only(gradient):
        for row in range(len(gradient)):
            if row not in rows:
                gradient[row] = 0

    return table.register_hook(only)


def the_others(table, rows):
    keep = torch.ones(len(table), 1)
    keep[rows] = 0
    return table.register_hook(lambda gradient: gradient * keep)


def times_zero(table, rows):
    """Right until a gradient has a NaN: 0 * nan is nan."""
    keep = torch.zeros(len(table), 1)
    keep[rows] = 1
    return table.register_hook(lambda gradient: gradient * keep)


def without_nan(table, rows):
    keep = torch.zeros(len(table), 1)
    keep[rows] = 1
    return table.register_hook(lambda gradient: (gradient * keep).nan_to_num())


def only_a_look(table, rows):
    return table.register_hook(lambda gradient: None)


def columns(table, rows):
    keep = torch.zeros(len(table), 1)
    keep[rows] = 1
    return table.register_hook(lambda gradient: gradient * (1 - keep) * 0)


def never_removed(table, rows):
    masked(table, rows)
    return only_a_look(table, rows)


def once(table, rows):
    """The hook removes itself: the next backward pass is not changed."""
    keep = torch.zeros(len(table), 1, dtype=torch.bool)
    keep[rows] = True

    def only(gradient):
        handle.remove()
        return torch.where(keep, gradient, 0.0)

    handle = table.register_hook(only)
    return handle


def hook_on_x(x, strength):
    """Right for the result, but all other uses of x are reversed, too."""
    x.register_hook(lambda gradient: -strength * gradient)
    return x


def hook_on_the_result(x, strength):
    y = x.view_as(x)
    y.register_hook(lambda gradient: -strength * gradient)
    return y


def by_two_backwards(f, x, v):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(x)
    (product,) = torch.autograd.grad((gradient * v).sum(), x)
    return product


def with_grad_outputs(f, x, v):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x) + 0 * (x * x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient, x, grad_outputs=v)[0]


def never_linear(f, x, v):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(gradient, x, grad_outputs=v)[0]


def on_x_itself(f, x, v):
    product = by_two_backwards(f, x, v)
    x.requires_grad_()
    return product


def by_differences(f, x, v):
    def slope(at):
        at = at.detach().requires_grad_()
        return torch.autograd.grad(f(at), at)[0]

    return (slope(x + 1e-4 * v) - slope(x - 1e-4 * v)) / 2e-4


def the_gradient(f, x, v):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)[0] * v


def row_sums(f, x, v):
    return by_two_backwards(f, x, torch.ones_like(v))


def the_whole_hessian(f, x, v):
    hessian = torch.autograd.functional.hessian(f, x)
    return (hessian.reshape(x.numel(), x.numel()) @ v.flatten()).view_as(x)


def of_log1mexp(forward, backward):
    class Log1mexp(Function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

    Log1mexp.forward = staticmethod(forward)
    Log1mexp.backward = staticmethod(lambda ctx, g: g * backward(*ctx.saved_tensors))
    return Log1mexp.apply


def exact(x):
    near, far = torch.log(-torch.expm1(-x)), torch.log1p(-torch.exp(-x))
    return torch.where(x < math.log(2), near, far)


RIGHT = {
    "train_only": [masked, in_place],
    "reverse": [
        *(Turn.apply, hook_on_the_result),
        lambda x, strength: (
            (1 + strength) * x.detach() - strength * x if strength == 0 else Turn.apply(x, strength)
        ),
    ],
    "hvp": [by_two_backwards, with_grad_outputs, the_whole_hessian],  # right, if wasteful
    "log1mexp": [
        of_log1mexp(exact, lambda x: 1 / torch.expm1(x)),
        of_log1mexp(exact, lambda x: torch.exp(-x) / -torch.expm1(-x)),
    ],
}

WRONG = {
    "train_only": [
        *(the_others, only_a_look, columns, never_removed, times_zero, without_nan),
        *(once, lambda table, rows: None),
    ],
    "reverse": [
        *(Same.apply, Plain.apply, hook_on_x),
        lambda x, strength: -strength * x,
        lambda x, strength: x.detach(),
        lambda x, strength: x.clone(),
    ],
    "hvp": [
        *(by_differences, the_gradient, row_sums, never_linear, on_x_itself),
        lambda f, x, v: v * f(x),
    ],
    "log1mexp": [
        lambda x: torch.log(1 - torch.exp(-x)),
        lambda x: torch.log1p(-torch.exp(-x)),
        lambda x: torch.log(-torch.expm1(-x)),
        exact,
        of_log1mexp(exact, lambda x: torch.exp(-x) / (1 - torch.exp(-x))),
        of_log1mexp(exact, lambda x: -1 / torch.expm1(x)),
        of_log1mexp(exact, lambda x: 1 / torch.expm1(-x)),
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass(name, capsys):
    for answer in RIGHT[name]:
        check(f"gradients.{name}", answer)
        assert capsys.readouterr().out.startswith("✓"), answer


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_do_not(name, capsys):
    for number, answer in enumerate([*WRONG[name], lambda *a: ...]):
        check(f"gradients.{name}", answer)
        assert capsys.readouterr().out.startswith("✗"), number


def test_what_an_answer_does_to_its_argument_is_named():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(WrongAnswer, match=r"x itself was changed: the gradient of x\.sum"):
        EXERCISES["reverse"].through(hook_on_x)(x, 2.0)
    with pytest.raises(WrongAnswer, match="x was changed: it requires a gradient now"):
        EXERCISES["hvp"].through(on_x_itself)(torch.sum, torch.ones(2), torch.ones(2))


def test_no_answer_yet(capsys):
    for name in RIGHT:
        check(f"gradients.{name}", lambda *a: ...)
        assert "not answered yet" in capsys.readouterr().out
