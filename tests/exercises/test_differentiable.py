import pytest
import torch

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


def errors(freedom=True, root=True, inverse="of the product", mean=False):
    def answer(jacobian, residuals):
        n, d = jacobian.shape
        noise = residuals.square().sum() / (n - d if freedom else n)
        if mean:
            noise = ((residuals - residuals.mean()) ** 2).sum() / (n - d)
        product = jacobian.T @ jacobian
        if inverse == "of the product":
            diagonal = torch.linalg.inv(product).diagonal()
        elif inverse == "of the diagonal":
            diagonal = 1 / product.diagonal()
        else:
            diagonal = torch.linalg.inv(product)
        variance = noise * diagonal
        return variance.sqrt() if root else variance

    return answer


RIGHT = {
    "spring": [spring()],
    "errors_of_fit": [errors()],
    "root_gradients": [
        lambda z, a: (-z / (a + 3 * z * z), 1 / (a + 3 * z * z)),
    ],
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
    "errors_of_fit": [
        errors(freedom=False),
        errors(root=False),
        errors(inverse="of the diagonal"),
        errors(inverse="all of it"),
        errors(mean=True),
        lambda jacobian, residuals: residuals.std() * torch.ones(jacobian.shape[1]).double(),
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
    check(f"differentiable.{name}", answer)
    assert capsys.readouterr().out.startswith("✓")


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in WRONG.items() for answer in answers]
)
def test_wrong_answers_do_not(name, answer, capsys):
    check(f"differentiable.{name}", answer)
    assert capsys.readouterr().out.startswith("✗")
