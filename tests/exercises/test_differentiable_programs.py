import pytest
import torch

from helpers.exercises import check


def misleads(sides="both", zero=True, cut=True, signs=True, wide=True, kind=bool):
    def answer(function, x, h):
        point = x.clone().requires_grad_()
        y = function(point)
        slope = torch.zeros_like(x)
        if y.requires_grad or not cut:
            (slope,) = torch.autograd.grad(y, point)
        h = h if wide else 1e-6
        ahead = function(x + h) if sides != "behind" else function(x)
        behind = function(x - h) if sides != "ahead" else function(x)
        difference = ahead - behind
        if not signs:
            return kind(not torch.isclose(slope, difference / (2 * h)))
        if not zero:
            return kind(slope * difference < 0)
        return kind(slope.sign() != difference.sign())

    return answer


def bounce(event=True, slower=True, after="rest", detach=False):
    def answer(height, speed, bounciness, steps, dt):
        velocity = -speed
        for _ in range(steps):
            below = height + dt * velocity
            if event and below < 0 and velocity < 0:
                until = height / speed
                if detach:
                    until = until.detach()
                velocity = bounciness * speed if slower else speed
                height = (dt - until) * velocity if after == "rest" else dt * velocity
            elif not event and height < 0 and velocity < 0:
                velocity = bounciness * speed
                height = height + dt * velocity
            else:
                height = below
        return height

    return answer


def solved(A, y, D, strength):
    """The minimum as a least-squares problem: sqrt(strength)·D below A."""
    below = strength**0.5 * D
    rows = torch.cat([A, below])
    target = torch.cat([y, y.new_zeros(len(D))])
    return torch.linalg.lstsq(rows, target[:, None]).solution[:, 0]


def root_mean_square(residual, x):
    return residual.square().mean().sqrt()


def strongest(
    pick=max, size=root_mean_square, above=False, penalize=True, squared=False, kind=float
):
    def answer(A, y, D, noise, strengths):
        chosen = []
        for strength in strengths:
            strength = float(strength)
            penalty = D if penalize else torch.eye(A.shape[1]).to(A)
            x = solved(A, y, penalty, strength**2 if squared else strength)
            if (size(A @ x - y, x) > noise) == above:
                chosen.append(strength)
        return kind(pick(chosen))

    return answer


def until_above(A, y, D, noise, strengths):
    """Right only if the strengths rise."""
    chosen = float(strengths[0])
    for strength in strengths:
        x = solved(A, y, D, float(strength))
        if root_mean_square(A @ x - y, x) > noise:
            break
        chosen = float(strength)
    return chosen


def nearest(A, y, D, noise, strengths):
    """The residual nearest to the noise, from above, too."""

    def gap(strength):
        x = solved(A, y, D, strength)
        return abs(root_mean_square(A @ x - y, x).item() - noise)

    return min([float(strength) for strength in strengths], key=gap)


def sorted_first(A, y, D, noise, strengths):
    for strength in sorted((float(strength) for strength in strengths), reverse=True):
        x = torch.linalg.solve(A.mT @ A + strength * (D.mT @ D), A.mT @ y)
        if (A @ x - y).norm() <= noise * len(y) ** 0.5:
            return strength


RIGHT = {
    "gradient_misleads": [misleads()],
    "bounce": [bounce()],
    "choose_strength": [strongest(), sorted_first],
    "root_gradients": [
        lambda z, a: (-z / (a + 3 * z * z), 1 / (a + 3 * z * z)),
    ],
}
WRONG = {
    "gradient_misleads": [
        misleads(sides="ahead"),
        misleads(sides="behind"),
        misleads(zero=False),
        misleads(cut=False),
        misleads(signs=False),
        misleads(wide=False),
        misleads(kind=torch.as_tensor),
        lambda function, x, h: False,
        lambda function, x, h: True,
    ],
    "bounce": [
        bounce(event=False),
        bounce(slower=False),
        bounce(after="a whole step"),
        bounce(detach=True),
        lambda height, speed, bounciness, steps, dt: height - speed * steps * dt,
    ],
    "choose_strength": [
        strongest(pick=min),
        strongest(pick=lambda chosen: chosen[0]),
        strongest(pick=lambda chosen: chosen[-1]),
        strongest(size=lambda residual, x: residual.norm()),  # a sum
        strongest(size=lambda residual, x: residual.square().mean()),  # without a root
        strongest(size=lambda residual, x: residual.abs().mean()),
        strongest(size=lambda residual, x: residual.norm() / len(x) ** 0.5),
        strongest(above=True, pick=lambda chosen: max(chosen, default=0.0)),
        strongest(penalize=False, pick=lambda chosen: max(chosen, default=0.0)),
        strongest(squared=True, pick=lambda chosen: max(chosen, default=0.0)),
        strongest(kind=torch.as_tensor),
        until_above,
        nearest,
        lambda A, y, D, noise, strengths: float(max(strengths)),
    ],
    "root_gradients": [
        lambda z, a: (z / (a + 3 * z * z), 1 / (a + 3 * z * z)),
        lambda z, a: (1 / (a + 3 * z * z), -z / (a + 3 * z * z)),
        lambda z, a: (-z / (a + 3 * z * z), -1 / (a + 3 * z * z)),
        lambda z, a: (-z / (a + z * z), 1 / (a + z * z)),
        lambda z, a: (-1 / (a + 3 * z * z), 1 / (a + 3 * z * z)),
        lambda z, a: -z / (a + 3 * z * z),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in RIGHT.items() for answer in answers]
)
def test_right_answers_pass(name, answer, capsys):
    check(f"differentiable_programs.{name}", answer)
    assert capsys.readouterr().out.startswith("✓")


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in WRONG.items() for answer in answers]
)
def test_wrong_answers_do_not(name, answer, capsys):
    check(f"differentiable_programs.{name}", answer)
    assert capsys.readouterr().out.startswith("✗")


@pytest.mark.parametrize(
    ("name", "answer", "error"),
    [
        ("bounce", bounce(detach=True), "gradient of argument 1"),
        ("choose_strength", strongest(pick=min), "value is not right: 0.0001"),
        ("choose_strength", strongest(kind=torch.as_tensor), "expected float, got Tensor"),
        ("gradient_misleads", misleads(kind=int), "expected bool, got int"),
        ("gradient_misleads", misleads(zero=False), "value is not right: False"),
    ],
)
def test_an_answer_learns_what_is_wrong(name, answer, error, capsys):
    check(f"differentiable_programs.{name}", answer)
    assert error in capsys.readouterr().out
