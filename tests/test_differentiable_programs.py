"""A renderer, a planner, bounces, RK4, a fixed point: against closed forms and differences."""

import math

import pytest
import torch
from torch.func import jacrev, vmap

from helpers import differentiable_programs as programs
from helpers.differentiable_programs import FixedPoint

# A sum or product of n float64 numbers is off by at most n units of 2**-53, relative to the size
# of its terms. The longest chains below have some thousand operations on numbers near 1.
ROUNDING = 1e-12


@pytest.fixture(autouse=True)
def float64():
    """float64 by default, as in the notebook."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def close(a, b, atol=ROUNDING, rtol=ROUNDING):
    torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


# ---- renderer

HALF = math.log(0.5)
CIRCLE = [0.0, 0.0, HALF, HALF, 0.0, 1.0, 0.5, 0.0]


def test_a_circle_is_half_covered_on_its_edge_and_full_inside():
    image = programs.ellipse_image(torch.tensor(CIRCLE), size=9, softness=0.01)
    assert image.shape == (3, 9, 9)
    close(image[0, 4, 6], torch.tensor(0.5), atol=1e-9)  # pixel (0.5, 0): on the edge
    close(image[:, 4, 4], torch.tensor(CIRCLE[5:]), atol=1e-9)
    close(image[0, 0, 0], torch.tensor(0.0), atol=1e-9)


def test_a_sharp_ellipse_has_the_area_of_an_ellipse():
    shape = torch.tensor([0.1, -0.2, HALF, 2 * HALF, 0.7, 1.0, 1.0, 1.0])
    image = programs.ellipse_image(shape, size=401, softness=1e-4)
    area = image[0].sum().item() * (2 / 400) ** 2
    # pixels on the edge, about 2.4 / 0.005, are in or out: the error of the sum is some dozens
    assert abs(area - math.pi * 0.5 * 0.25) < 60 * (2 / 400) ** 2


def test_x_is_to_the_right_and_the_angle_turns_x_towards_y():
    right = torch.tensor([0.5, 0.0, -1.6, -1.6, 0.0, 1.0, 1.0, 1.0])
    image = programs.ellipse_image(right, size=21, softness=0.02)[0]
    assert image[:, 11:].sum() > 100 * image[:, :10].sum()
    turned = torch.tensor([0.0, 0.0, math.log(0.8), math.log(0.1), math.pi / 4, 1.0, 1.0, 1.0])
    image = programs.ellipse_image(turned, size=21, softness=0.02)[0]
    assert image[15, 15] > 0.8 and image[5, 15] < 0.01  # 0.84: on the long axis, near its end


def test_the_renderer_s_gradient_is_that_of_differences():
    shape = torch.tensor([0.1, -0.2, -0.7, -1.2, 0.7, 1.0, 0.5, 0.2], requires_grad=True)

    def image(shape):
        return programs.ellipse_image(shape, size=6, softness=0.2)

    assert torch.autograd.gradcheck(image, (shape,))


def test_a_pixel_in_the_center_has_a_finite_gradient():
    shape = torch.tensor(CIRCLE, requires_grad=True)
    programs.ellipse_image(shape, size=5, softness=0.1).sum().backward()
    assert bool(shape.grad.isfinite().all())


# ---- planner


def test_a_path_s_cost_by_hand():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0]])
    cost = programs.path_cost(
        points, torch.tensor([[1.0, 0.5]]), torch.tensor([0.4]), margin=0.3, samples=1
    )
    # 2 steps · (1 + 4); only the middle point is within 0.7 of the disk's center: 0.2 deep
    close(cost, torch.tensor(2 * 5 + 200 * 0.2**2))


def test_samples_see_what_lies_between_two_points():
    points = torch.tensor([[0.0, 0.0], [4.0, 0.0], [8.0, 0.0]])
    disk = {"centers": torch.tensor([[2.0, 0.0]]), "radii": torch.tensor([1.0]), "margin": 0.5}
    blind = programs.path_cost(points, **disk, samples=1)
    seeing = programs.path_cost(points, **disk)
    close(blind, torch.tensor(2 * 32.0))
    # of the places at 0, 1, 2, …, three are within 1.5 of the center: 0.5, 1.5 and 0.5 deep
    close(seeing, torch.tensor(2 * 32.0 + 50 * (0.25 + 2.25 + 0.25)))


# ---- events


@pytest.mark.parametrize(
    ("bounce", "slope"),
    [(programs.bounce_at_step, 1.0), (programs.bounce_at_event, -1.0)],
)
def test_where_a_ball_is_after_a_bounce(bounce, slope):
    """After a fall of h at speed v, the height at time T is v·T - h: a slope of -1."""
    height = torch.tensor(0.55, requires_grad=True)
    end = bounce(height, speed=1.0, steps=10, dt=0.1)
    (found,) = torch.autograd.grad(end, height)
    assert found.item() == slope
    assert abs(end.item() - 0.45) < (0.11 if slope > 0 else ROUNDING)


@pytest.mark.parametrize("bounce", [programs.bounce_at_step, programs.bounce_at_event])
def test_a_ball_that_does_not_reach_the_ground_falls(bounce):
    height = torch.tensor(3.0, requires_grad=True)
    end = bounce(height, speed=1.0, steps=10, dt=0.1)
    close(end.detach(), torch.tensor(2.0))
    assert torch.autograd.grad(end, height)[0].item() == 1.0


# ---- fixed point


def contraction(n=4):
    torch.manual_seed(0)
    weight = torch.randn(n, n)
    return 0.7 * weight / torch.linalg.matrix_norm(weight, 2), torch.randn(n)


def test_a_fixed_point_solves_its_equation():
    weight, u = contraction()
    z = FixedPoint.apply(weight, u, 120)  # 0.7**120 is 3e-19
    close(z, torch.tanh(weight @ z + u))


def test_a_fixed_point_works_under_vmap_and_jacrev():
    weight, u = contraction()

    def solve(u):
        return FixedPoint.apply(weight, u, 120)

    several = torch.stack([u, 2 * u, -u])
    close(vmap(solve)(several), torch.stack([solve(u), solve(2 * u), solve(-u)]))
    slope = 1 - solve(u).square()
    system = torch.eye(4) - slope[:, None] * weight
    close(jacrev(solve)(u), torch.linalg.solve(system, torch.diag(slope)))


def test_the_implicit_gradient_is_that_of_differences_and_of_unrolling():
    weight, u = contraction()

    def solve(weight, u):
        return FixedPoint.apply(weight, u, 120)

    inputs = (weight.requires_grad_(), u.requires_grad_())
    assert torch.autograd.gradcheck(solve, inputs)

    def unrolled(weight, u):
        z = torch.zeros_like(u)
        for _ in range(120):
            z = torch.tanh(weight @ z + u)
        return z

    ours = torch.autograd.grad(solve(*inputs).sum(), inputs)
    theirs = torch.autograd.grad(unrolled(*inputs).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


# ---- Runge-Kutta


def test_rk4_has_order_4():
    errors = []
    for steps in (10, 20, 40):
        states = programs.rk4(lambda y: -y, torch.ones(1), steps=steps, dt=1 / steps)
        errors.append(abs(states[-1].item() - math.exp(-1)))
    assert all(14 < a / b < 18 for a, b in zip(errors, errors[1:], strict=False)), errors


def test_rk4_agrees_with_torchdiffeq():
    """Its `rk4` is the 3/8 rule: for a linear equation all rules of order 4 in 4 stages agree."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    start = torch.tensor([2.0, 0.0])
    times = torch.arange(26) * 0.1
    theirs = torchdiffeq.odeint(lambda t, y: y @ matrix.T, start, times, method="rk4")
    ours = programs.rk4(lambda y: y @ matrix.T, start, steps=25, dt=0.1)
    close(ours, theirs)


def test_rk4_keeps_the_shape_of_a_batch():
    states = programs.rk4(lambda y: 0 * y, torch.ones(5, 2), steps=3, dt=0.1)
    assert states.shape == (4, 5, 2)
    assert bool((states == 1).all())
