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


RIGHT = {
    "gradient_misleads": [misleads()],
    "bounce": [bounce()],
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
        ("gradient_misleads", misleads(kind=int), "expected bool, got int"),
        ("gradient_misleads", misleads(zero=False), "value is not right: False"),
    ],
)
def test_an_answer_learns_what_is_wrong(name, answer, error, capsys):
    check(f"differentiable_programs.{name}", answer)
    assert error in capsys.readouterr().out
