import pytest
import torch
from torch.func import jacfwd

from helpers.exercises import check


def spring(order="velocity", sign=-1, damped=True, detach=False, keep="after"):
    def answer(start, stiffness, damping, steps, dt):
        position, velocity, positions = start, torch.zeros_like(start), []
        for _ in range(steps):
            if keep == "before":
                positions.append(position)
            if order == "position":
                position = position + dt * velocity
            pull = stiffness * position
            brake = damping * velocity if damped else 0
            velocity = velocity + dt * (sign * pull - brake)
            if order == "velocity":
                position = position + dt * velocity
            if detach:
                position = position.detach()
            if keep == "after":
                positions.append(position)
        return torch.stack(positions)

    return answer


def fit(steps=300, logs=True, order=False, lr=0.05, flat=True):
    def answer(seen, start, guess, dt):
        unknown = (guess.log() if logs else guess.clone()).requires_grad_()
        optimizer = torch.optim.Adam([unknown], lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            stiffness, damping = unknown.exp() if logs else unknown
            found = spring()(start, stiffness, damping, len(seen), dt)
            (found - seen).square().mean().backward()
            optimizer.step()
        result = unknown.exp() if logs else unknown
        if order:
            result = result.flip(0)
        return result if flat else tuple(result)

    return answer


def errors(freedom=2, root=True, both=True, mean=False, noise=True):
    def answer(seen, start, constants, dt):
        def residuals(constants):
            return spring()(start, *constants, len(seen), dt) - seen

        r, J = residuals(constants), jacfwd(residuals)(constants)
        n = len(seen)
        variance = r.square().sum() / (n - freedom) if noise else 1.0
        if both:
            variances = variance * torch.linalg.inv(J.T @ J).diagonal()
        else:
            variances = variance / (J.T @ J).diagonal()
        if mean:
            variances = variances / n
        return variances.sqrt() if root else variances

    return answer


RIGHT = {
    "spring": [spring()],
    "fit_spring": [fit(), fit(steps=600, logs=False)],
    "spring_errors": [errors()],
}
WRONG = {
    "spring": [
        spring(order="position"),
        spring(sign=1),
        spring(damped=False),
        spring(detach=True),
        spring(keep="before"),
        lambda start, *_: start,
    ],
    "fit_spring": [
        fit(steps=5),
        fit(order=True),
        fit(flat=False),
        lambda seen, start, guess, dt: guess,
        lambda seen, start, guess, dt: guess[:1],
    ],
    "spring_errors": [
        errors(freedom=0),
        errors(root=False),
        errors(both=False),
        errors(mean=True),
        errors(noise=False),
        lambda seen, start, constants, dt: constants,
    ],
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in RIGHT.items() for answer in answers]
)
def test_right_answers_pass(name, answer, capsys):
    check(f"differentiable.{name}", answer)
    assert capsys.readouterr().out.startswith("✓")


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in WRONG.items() for answer in answers]
)
def test_wrong_answers_do_not(name, answer, capsys):
    check(f"differentiable.{name}", answer)
    assert capsys.readouterr().out.startswith("✗")


@pytest.mark.parametrize(
    ("name", "answer", "error"),
    [
        ("fit_spring", fit(flat=False), "expected Tensor, got tuple"),
        ("fit_spring", lambda seen, *_: seen[:1], "shape: expected [2], got [1]"),
        ("fit_spring", lambda *_: ..., "not answered yet"),
    ],
)
def test_an_answer_learns_what_is_wrong(name, answer, error, capsys):
    check(f"differentiable.{name}", answer)
    assert error in capsys.readouterr().out
