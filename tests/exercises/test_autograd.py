import numpy as np
import pytest
import torch

from helpers.autograd import Value
from helpers.exercises import check


def sigma(x):
    return 1 / (1 + (-x).exp())


def finite_difference(x):
    h = 1e-3
    return ((x + h) * (x + h).sigmoid() - (x - h) * (x - h).sigmoid()) / (2 * h)


def slope_without_graph(x):
    (slope,) = torch.autograd.grad((x * x.sigmoid()).sum(), x)
    return slope


def operation(result, gradient):
    """An operation of the engine that computes `result(x)`; its rule is `gradient(x, g)`."""

    def build(x):
        return Value(result(x.data), (x,), lambda g: (gradient(x.data, g),))

    return build


def stable(data):
    return data.max() + np.log(np.exp(data - data.max()).sum())


def softmax(data):
    weights = np.exp(data - data.max())
    return weights / weights.sum()


def last_axis(data):
    return stable(data[-1] if data.ndim else data)


def descend(change, clear=True, into=None):
    """Momentum where `change(velocity, gradient, mu)` is the new velocity."""

    def momentum(f, start, lr, mu, steps):
        p, velocity = Value(start.numpy().copy()), 0.0
        for _ in range(steps):
            f(p).backward()
            velocity = change(velocity, p.grad, mu)
            p.data = p.data - lr * velocity
            if clear:
                p.grad = np.zeros_like(p.data)
        return torch.tensor(p.data) if into is None else into(p.data)

    return momentum


def heavy_ball(velocity, gradient, mu):
    return mu * velocity + gradient


def nesterov(f, start, lr, mu, steps):
    position, velocity = start.numpy(), 0.0
    for _ in range(steps):
        p = Value(position)
        f(p).backward()
        velocity = mu * velocity + p.grad
        position = position - lr * (p.grad + mu * velocity)
    return torch.tensor(position)


def in_place(f, start, lr, mu, steps):
    position, velocity = start.numpy(), 0.0
    for _ in range(steps):
        p = Value(position)
        f(p).backward()
        velocity = mu * velocity + p.grad
        position -= lr * velocity  # writes into start
    return start.clone()


def learning_rate_in_the_velocity(f, start, lr, mu, steps):
    position, velocity = start.numpy(), 0.0
    for _ in range(steps):
        p = Value(position)
        f(p).backward()
        velocity = mu * velocity - lr * p.grad
        position = position + velocity
    return torch.from_numpy(position)


def one_step_more(f, start, lr, mu, steps):
    return descend(heavy_ball)(f, start, lr, mu, steps + 1)


def old_position(f, start, lr, mu, steps):
    return descend(heavy_ball)(f, start, lr, mu, max(steps - 1, 0))


def fixed_rate(f, start, lr, mu, steps):
    return descend(heavy_ball)(f, start, 0.1, mu, steps)


def line(x, y, lr, steps, cut=False, clear=True, as_number=True):
    """The loop of the exercise, with or without its three mistakes."""
    w = torch.zeros((), dtype=x.dtype, requires_grad=True)
    b = torch.zeros((), dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=lr)
    total = 0.0
    for _ in range(steps):
        loss = (w * x + (b.item() if cut else b) - y).square().mean()
        if clear:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = total + (loss.item() if as_number else loss)
    return w.item(), b.item(), total / steps


def in_parts(share):
    """Accumulate gradients, each part's mean loss times `share(part, batch, parts)`."""

    def gradient(w, x, y, sizes):
        leaf = w.detach().clone().requires_grad_()
        for x_part, y_part in zip(x.split(sizes), y.split(sizes), strict=True):
            loss = (leaf * x_part - y_part).square().mean()
            (loss * share(len(x_part), len(x), len(sizes))).backward()
        return leaf.grad

    return gradient


LEAVES = [True, True, False, True, False]

WRONG = {
    "five_tensors": [
        lambda: (LEAVES, [36.0, None, None, None, None]),  # c as if it were connected
        lambda: (LEAVES, [18.0, None, 6.0, None, 1.0]),
        lambda: (LEAVES, [18.0, 0.0, None, None, None]),
        lambda: ([True, True, False, False, False], [18.0, None, None, None, None]),
        lambda: ([True, False, False, False, False], [18.0, None, None, None, None]),
        lambda: LEAVES,
    ],
    "gradient_in_parts": [
        in_parts(lambda part, batch, parts: 1),
        in_parts(lambda part, batch, parts: 1 / parts),
        in_parts(lambda part, batch, parts: 1 / batch),
        in_parts(lambda part, batch, parts: part),
        lambda w, x, y, sizes: (2 * (w * x - y) * x).sum(),
        lambda w, x, y, sizes: (w * x - y).square().mean(),
    ],
    "fit_line": [
        lambda x, y, lr, steps: line(x, y, lr, steps, cut=True, clear=False, as_number=False),
        lambda x, y, lr, steps: line(x, y, lr, steps, cut=True),
        lambda x, y, lr, steps: line(x, y, lr, steps, clear=False),
        lambda x, y, lr, steps: line(x, y, lr, steps, as_number=False),
        lambda x, y, lr, steps: line(x, y, lr, steps)[:2],
    ],
    "on_paper": [
        lambda: (-6, 4, -12, 8, -6),  # u through L alone
        lambda: (-6, -6, 18, -12, -6),  # u through v alone
        lambda: (-6, -2, -4, 6, -6),  # a and b exchanged
        lambda: (4, -2, 6, -4, 4),
        lambda: (6, -4, -6, -2, -6),  # from a to c and then back
        lambda: (-6, -2, 6, -4),
        lambda: -24,
    ],
    "silu_slope": [
        lambda x: x.sigmoid() * (1 - x.sigmoid()),
        lambda x: x.sigmoid() + x * x.sigmoid(),
        lambda x: x * x.sigmoid() * (1 - x.sigmoid()),
        lambda x: sigma(x) + x * x.exp() / (1 + x.exp()) ** 2,  # overflows
        lambda x: (x.sigmoid() * (1 + x * (1 - x.sigmoid()))).detach(),
        lambda x: x.sigmoid().detach() * (1 + x * (1 - x.sigmoid())),
        lambda x: (x.sigmoid() * (1 + x * (1 - x.sigmoid()))).float(),
        lambda x: (x.sigmoid() * (1 + x * (1 - x.sigmoid()))).sum(),
        lambda x: x.sigmoid() - x * x.sigmoid() * (1 - x.sigmoid()),
        finite_difference,
        slope_without_graph,
        lambda x: torch.func.grad(lambda t: torch.nn.functional.silu(t).sum())(x),
    ],
    "matmul_vjp": [
        lambda a, b, g: (g @ b, a @ g),
        lambda a, b, g: (a.mT @ g, g @ b.mT),
        lambda a, b, g: (g @ b.T, a.T @ g),
        lambda a, b, g: (b.mT @ g, g @ a.mT),
        lambda a, b, g: (g @ b.mT, (g.mT @ a)),
        lambda a, b, g: (g @ b.mT, -a.mT @ g),
        lambda a, b, g: (g @ b.mT,),
        lambda a, b, g: ((g @ b.mT).float(), (a.mT @ g).float()),
        lambda a, b, g: (b.sum(-1).expand_as(a), a.sum(-2)[..., None].expand_as(b)),
        lambda a, b, g: (torch.ones_like(g) @ b.mT, a.mT @ torch.ones_like(g)),
    ],
    "softmax_vjp": [
        lambda x, g: g * x.softmax(-1),
        lambda x, g: x.softmax(-1) * (1 - x.softmax(-1)) * g,  # the diagonal alone
        lambda x, g: x.softmax(-1) * (g - (x.softmax(-1) * g).sum()),
        lambda x, g: x.softmax(-1) * (g - g.mean(-1, keepdim=True)),
        lambda x, g: x.softmax(-1) * (g - g.sum(-1, keepdim=True)),
        lambda x, g: x.softmax(-1) * (g + (x.softmax(-1) * g).sum(-1, keepdim=True)),
        lambda x, g: x.softmax(0) * (g - (x.softmax(0) * g).sum(0, keepdim=True)),
        lambda x, g: g - x.softmax(-1) * g.sum(-1, keepdim=True),  # of log_softmax
        lambda x, g: softmax_vjp_by(x.exp() / x.exp().sum(-1, keepdim=True), g),  # overflows
        lambda x, g: softmax_vjp_by(x.float().softmax(-1), g.float()),
        lambda x, g: x * (g - (x * g).sum(-1, keepdim=True)),
    ],
    "logsumexp": [
        operation(lambda d: np.log(np.exp(d).sum()), lambda d, g: g * softmax(d)),  # overflows
        lambda x: x.exp().sum().log(),
        operation(stable, lambda d, g: softmax(d)),
        operation(stable, lambda d, g: g * np.ones_like(d)),
        operation(stable, lambda d, g: g * softmax(d) ** 2),
        operation(stable, lambda d, g: 2 * g * softmax(d)),
        operation(lambda d: stable(d) - d.max(), lambda d, g: g * softmax(d)),
        operation(last_axis, lambda d, g: g * softmax(d)),
        lambda x: (x - x.data.max()).exp().sum().log(),
        lambda x: (x + -x.data.max()).exp().sum() + x.data.max(),
        lambda x: stable(x.data),
        lambda x: Value(stable(x.data)),  # cut off from x
        lambda x: x.data.max() + x.exp().log().sum(),
    ],
    "momentum": [
        descend(lambda v, g, mu: g),
        descend(heavy_ball, clear=False),
        descend(lambda v, g, mu: mu * v + (1 - mu) * g),
        descend(lambda v, g, mu: mu * (v + g)),
        descend(lambda v, g, mu: 0.9 * v + g),
        descend(heavy_ball, into=lambda data: data),
        descend(heavy_ball, into=lambda data: torch.tensor(data).float()),
        descend(heavy_ball, into=lambda data: torch.tensor(data).flatten()),
        nesterov,
        in_place,
        one_step_more,
        old_position,
        fixed_rate,
    ],
}


def softmax_vjp_by(s, g):
    return s * (g - (s * g).sum(-1, keepdim=True))


def softmax_vjp_by_jacobian(x, g):
    s = x.softmax(-1)
    jacobian = torch.diag_embed(s) - s[..., :, None] * s[..., None, :]
    return (jacobian @ g[..., None]).squeeze(-1)


RIGHT = {
    "five_tensors": [lambda: (LEAVES, [18, None, None, None, None])],
    "gradient_in_parts": [in_parts(lambda part, batch, parts: part / batch)],
    "fit_line": [line],
    "on_paper": [lambda: (-6, -2, 6, -4, -6), lambda: [-6.0, -2.0, 6.0, -4.0, -6.0]],
    "silu_slope": [
        lambda x: x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()),
        lambda x: x.sigmoid() * (1 + x * (1 - x.sigmoid())),
        lambda x: x.sigmoid() * (1 + x * (-x).sigmoid()),
        lambda x: torch.sigmoid(x) * (x - x * torch.sigmoid(x) + 1),
    ],
    "matmul_vjp": [
        lambda a, b, g: (g @ b.mT, a.mT @ g),
        lambda a, b, g: [g @ b.transpose(-1, -2), a.transpose(-1, -2) @ g],
        lambda a, b, g: (
            torch.einsum("...rc,...kc->...rk", g, b),
            torch.einsum("...rk,...rc->...kc", a, g),
        ),
    ],
    "softmax_vjp": [
        lambda x, g: softmax_vjp_by(x.softmax(-1), g),
        lambda x, g: g * x.softmax(-1) - x.softmax(-1) * (g * x.softmax(-1)).sum(-1, True),
        softmax_vjp_by_jacobian,
    ],
    "logsumexp": [
        operation(stable, lambda d, g: g * softmax(d)),
        lambda x: (x - x.data.max()).exp().sum().log() + x.data.max(),
        lambda x: (x - float(x.data.max())).exp().sum().log() + float(x.data.max()),
        operation(stable, lambda d, g: g * np.exp(d - stable(d))),
    ],
    "momentum": [
        descend(heavy_ball),
        descend(heavy_ball, into=torch.from_numpy),
        learning_rate_in_the_velocity,
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("silu_slope", WRONG["silu_slope"][5], "gradient of argument 1"),
        ("silu_slope", WRONG["silu_slope"][4], "cut off from its arguments"),
        ("matmul_vjp", WRONG["matmul_vjp"][6], "expected 2 results, got 1"),
        ("softmax_vjp", WRONG["softmax_vjp"][8], "some of yours are inf or nan"),
        ("logsumexp", WRONG["logsumexp"][2], "result 2: value: 3 of 3 elements differ"),
        ("logsumexp", WRONG["logsumexp"][10], "expected a result, got AttributeError"),
        ("momentum", in_place, "f(bowl, tensor([[3.0], [-2.0]]), 0.1, 0.9, 20): argument 2 was"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"autograd.{name}", answer)
    assert words in capsys.readouterr().out
