"""Simulators against closed forms and SciPy, gradients against float64 differences and theory."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.integrate import solve_ivp
from torch.func import jacrev, vmap

from helpers import differentiable
from helpers.differentiable import Budget, BudgetSpent, FixedPoint

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


# ---- flight


def flown(g, k, velocity, times):
    """The same throw by SciPy, to 1e-10."""

    def rates(_, state):
        vx, vy = state[2:]
        speed = math.hypot(vx, vy)
        return [vx, vy, -k * speed * vx, -g - k * speed * vy]

    solved = solve_ivp(
        rates, (0, times[-1]), [0, 0, *velocity], "DOP853", times, rtol=1e-11, atol=1e-12
    )
    return torch.tensor(solved.y[:2].T.copy())


def test_a_flight_without_drag_is_a_parabola():
    """The midpoint rule is exact for constant acceleration."""
    start = torch.tensor([3.0, 7.0])
    found = differentiable.flight(torch.tensor([9.81, 0.0]), start, steps=12, dt=0.1, every=3)
    t = torch.tensor([0.3, 0.6, 0.9, 1.2])
    close(found, torch.stack([3 * t, 7 * t - 9.81 / 2 * t**2], dim=1))


def test_a_flight_approaches_the_exact_one_with_the_square_of_the_step():
    times = np.arange(1, 11) * 0.2
    exact = flown(9.81, 0.05, [12, 16], times)
    errors = []
    for each in (4, 8, 16):
        found = differentiable.flight(
            torch.tensor([9.81, 0.05]),
            torch.tensor([12.0, 16.0]),
            steps=10 * each,
            dt=0.2 / each,
            every=each,
        )
        errors.append((found - exact).abs().max().item())
    ratios = [a / b for a, b in zip(errors, errors[1:], strict=False)]
    assert all(3.4 < ratio < 4.8 for ratio in ratios), ratios  # 4 as the step goes to 0


def test_a_flight_s_gradient_is_that_of_differences():
    start = torch.tensor([12.0, 16.0])

    def shortened(constants, velocity):
        return differentiable.flight(constants, velocity, steps=6, dt=0.1, every=2)

    constants = torch.tensor([9.0, 0.04], requires_grad=True)
    assert torch.autograd.gradcheck(shortened, (constants, start.requires_grad_()))


def test_a_flight_s_frames_must_fit():
    with pytest.raises(ValueError, match="expected steps to be a multiple of every, got 7 and 2"):
        differentiable.flight(torch.tensor([9.81, 0.0]), torch.ones(2), steps=7, dt=0.1, every=2)


# ---- heat


def test_heat_is_a_power_of_a_matrix():
    torch.manual_seed(0)
    start, conductivity = torch.rand(7), 0.1 + 0.3 * torch.rand(6)
    difference = torch.eye(7).diff(dim=0)  # [6, 7]
    step = torch.eye(7) - difference.T @ torch.diag(conductivity) @ difference
    found = differentiable.heat(start, conductivity, steps=6, every=3)
    powers = [torch.linalg.matrix_power(step, n) for n in (3, 6)]
    close(found, torch.stack([power @ start for power in powers]))


def test_no_heat_is_lost_and_temperatures_become_equal():
    start = torch.tensor([0.0, 0.0, 4.0, 0.0])
    found = differentiable.heat(start, torch.full((3,), 0.4), steps=200, every=50)
    close(found.sum(dim=1), torch.full((4,), 4.0))
    close(found[-1], torch.ones(4), atol=1e-9)  # the slowest part decays like 0.766**200


def test_conductivities_stand_between_cells():
    with pytest.raises(ValueError, match=r"expected 4 conductivities between cells, got \[5\]"):
        differentiable.heat(torch.zeros(5), torch.ones(5), steps=1, every=1)


# ---- Runge-Kutta


def test_rk4_has_order_4():
    errors = []
    for steps in (10, 20, 40):
        states = differentiable.rk4(lambda y: -y, torch.ones(1), steps=steps, dt=1 / steps)
        errors.append(abs(states[-1].item() - math.exp(-1)))
    assert all(14 < a / b < 18 for a, b in zip(errors, errors[1:], strict=False)), errors


def test_rk4_agrees_with_torchdiffeq():
    """Its `rk4` is the 3/8 rule: for a linear equation all rules of order 4 in 4 stages agree."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    start = torch.tensor([2.0, 0.0])
    times = torch.arange(26) * 0.1
    theirs = torchdiffeq.odeint(lambda t, y: y @ matrix.T, start, times, method="rk4")
    ours = differentiable.rk4(lambda y: y @ matrix.T, start, steps=25, dt=0.1)
    close(ours, theirs)


def test_rk4_keeps_the_shape_of_a_batch():
    states = differentiable.rk4(lambda y: 0 * y, torch.ones(5, 2), steps=3, dt=0.1)
    assert states.shape == (4, 5, 2)
    assert bool((states == 1).all())


# ---- fits


def line_data(seed=0, noise=0.3):
    draw = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 3, 12)
    return x, 2 * x - 1 + noise * torch.randn(12, generator=draw)


def test_a_straight_line_is_fitted_in_one_step_with_the_textbook_s_errors():
    x, y = line_data()
    expected = stats.linregress(x.numpy(), y.numpy())

    def residuals(p):
        return p[0] * x + p[1] - y

    p = differentiable.gauss_newton(residuals, torch.zeros(2), steps=1)
    errors = differentiable.standard_errors(residuals, p)
    close(p, torch.tensor([expected.slope, expected.intercept]))
    close(errors, torch.tensor([expected.stderr, expected.intercept_stderr]))


def test_a_curve_is_fitted_like_scipy_does():
    x = torch.linspace(0, 2, 15)
    y = 3 * torch.exp(-1.3 * x) + 0.05 * torch.sin(40 * x)

    def curve(t, a, b):
        return a * np.exp(-b * t)

    expected, covariance = optimize.curve_fit(curve, x.numpy(), y.numpy(), [1, 1], xtol=1e-12)

    def residuals(p):
        return p[0] * torch.exp(-p[1] * x) - y

    p = differentiable.gauss_newton(residuals, torch.tensor([1.0, 1.0]), steps=12)
    errors = differentiable.standard_errors(residuals, p)
    close(p, torch.tensor(expected), rtol=1e-6)  # where SciPy stops
    # SciPy's Jacobian is made of differences, off by about 1e-8
    close(errors, torch.tensor(covariance.diagonal().copy()).sqrt(), rtol=1e-6)


def test_fits_go_through_vmap():
    x, _ = line_data()
    many = torch.stack([line_data(seed)[1] for seed in range(3)])

    def fit(y):
        return differentiable.gauss_newton(lambda p: p[0] * x + p[1] - y, torch.zeros(2), steps=2)

    close(vmap(fit)(many), torch.stack([fit(y) for y in many]))


# ---- budgets


def bowl(p):
    return (p - 1).square().sum()


def test_a_budget_counts_and_remembers_the_best():
    budget = Budget(bowl, limit=8, gradient_cost=3)
    assert budget.value(np.array([1.0, 3.0])) == 4.0
    value, slope = budget.gradient([2.0, 1.0])
    assert (value, slope.tolist()) == (1.0, [2.0, 0.0])
    assert budget.value([5.0, 1.0]) == 16.0
    assert (budget.spent, budget.best, budget.best_at.tolist()) == (5, 1.0, [2.0, 1.0])
    assert budget.history == [(1, 4.0), (4, 1.0), (5, 1.0)]


def test_what_was_best_does_not_change_with_the_searcher_s_array():
    budget = Budget(bowl, limit=4)
    array = np.array([1.0, 1.0])
    budget.value(array)
    array[:] = 7
    assert budget.best_at.tolist() == [1.0, 1.0]


def test_a_budget_ends():
    budget = Budget(bowl, limit=4, gradient_cost=3)
    budget.gradient([0.0])
    budget.value([0.0])
    with pytest.raises(BudgetSpent, match="expected to stay within 4 calls, spent 4"):
        budget.value([0.0])
    assert budget.spent == 4


# ---- renderer

HALF = math.log(0.5)
CIRCLE = [0.0, 0.0, HALF, HALF, 0.0, 1.0, 0.5, 0.0]


def test_a_circle_is_half_covered_on_its_edge_and_full_inside():
    image = differentiable.ellipse_image(torch.tensor(CIRCLE), size=9, softness=0.01)
    assert image.shape == (3, 9, 9)
    close(image[0, 4, 6], torch.tensor(0.5), atol=1e-9)  # pixel (0.5, 0): on the edge
    close(image[:, 4, 4], torch.tensor(CIRCLE[5:]), atol=1e-9)
    close(image[0, 0, 0], torch.tensor(0.0), atol=1e-9)


def test_a_sharp_ellipse_has_the_area_of_an_ellipse():
    shape = torch.tensor([0.1, -0.2, HALF, 2 * HALF, 0.7, 1.0, 1.0, 1.0])
    image = differentiable.ellipse_image(shape, size=401, softness=1e-4)
    area = image[0].sum().item() * (2 / 400) ** 2
    # pixels on the edge, about 2.4 / 0.005, are in or out: the error of the sum is some dozens
    assert abs(area - math.pi * 0.5 * 0.25) < 60 * (2 / 400) ** 2


def test_x_is_to_the_right_and_the_angle_turns_x_towards_y():
    right = torch.tensor([0.5, 0.0, -1.6, -1.6, 0.0, 1.0, 1.0, 1.0])
    image = differentiable.ellipse_image(right, size=21, softness=0.02)[0]
    assert image[:, 11:].sum() > 100 * image[:, :10].sum()
    turned = torch.tensor([0.0, 0.0, math.log(0.8), math.log(0.1), math.pi / 4, 1.0, 1.0, 1.0])
    image = differentiable.ellipse_image(turned, size=21, softness=0.02)[0]
    assert image[15, 15] > 0.8 and image[5, 15] < 0.01  # 0.84: on the long axis, near its end


def test_the_renderer_s_gradient_is_that_of_differences():
    shape = torch.tensor([0.1, -0.2, -0.7, -1.2, 0.7, 1.0, 0.5, 0.2], requires_grad=True)

    def image(shape):
        return differentiable.ellipse_image(shape, size=6, softness=0.2)

    assert torch.autograd.gradcheck(image, (shape,))


def test_a_pixel_in_the_center_has_a_finite_gradient():
    shape = torch.tensor(CIRCLE, requires_grad=True)
    differentiable.ellipse_image(shape, size=5, softness=0.1).sum().backward()
    assert bool(shape.grad.isfinite().all())


# ---- planner


def test_a_path_s_cost_by_hand():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0]])
    cost = differentiable.path_cost(
        points, torch.tensor([[1.0, 0.5]]), torch.tensor([0.4]), margin=0.3
    )
    # 2 steps · (1 + 4); only the middle point is within 0.7 of the disk's center: 0.2 deep
    close(cost, torch.tensor(2 * 5 + 200 * 0.2**2))


def test_samples_see_what_lies_between_two_points():
    points = torch.tensor([[0.0, 0.0], [4.0, 0.0], [8.0, 0.0]])
    disk = {"centers": torch.tensor([[2.0, 0.0]]), "radii": torch.tensor([1.0]), "margin": 0.5}
    blind = differentiable.path_cost(points, **disk)
    seeing = differentiable.path_cost(points, **disk, samples=4)
    close(blind, torch.tensor(2 * 32.0))
    # of the places at 0, 1, 2, …, three are within 1.5 of the center: 0.5, 1.5 and 0.5 deep
    close(seeing, torch.tensor(2 * 32.0 + 50 * (0.25 + 2.25 + 0.25)))


# ---- events


@pytest.mark.parametrize(
    ("bounce", "slope"),
    [(differentiable.bounce_at_step, 1.0), (differentiable.bounce_at_event, -1.0)],
)
def test_where_a_ball_is_after_a_bounce(bounce, slope):
    """After a fall of h at speed v, the height at time T is v·T - h: a slope of -1."""
    height = torch.tensor(0.55, requires_grad=True)
    end = bounce(height, speed=1.0, steps=10, dt=0.1)
    (found,) = torch.autograd.grad(end, height)
    assert found.item() == slope
    assert abs(end.item() - 0.45) < (0.11 if slope > 0 else ROUNDING)


@pytest.mark.parametrize("bounce", [differentiable.bounce_at_step, differentiable.bounce_at_event])
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


def test_the_errors_of_a_throw_cover_the_truth_as_often_as_they_say():
    """400 throws with noise: the 95 % intervals hold the truth in 95 % ± 3 standard deviations."""
    truth, start = torch.tensor([9.81, 0.05]), torch.tensor([12.0, 16.0])
    exact = flown(*truth.tolist(), start.tolist(), np.arange(1, 11) * 0.2)
    draw = torch.Generator().manual_seed(77)
    noisy = exact + 0.1 * torch.randn(400, *exact.shape, generator=draw)

    def fit(seen):
        def residuals(p):
            return (differentiable.flight(p, start, steps=40, dt=0.05, every=4) - seen).flatten()

        p = differentiable.gauss_newton(residuals, torch.tensor([5.0, 0.0]), steps=6)
        return p, differentiable.standard_errors(residuals, p)

    found, errors = vmap(fit)(noisy)
    inside = ((found - truth).abs() < stats.t.ppf(0.975, 18) * errors).sum(dim=0)
    spread = math.sqrt(400 * 0.95 * 0.05)
    assert bool(((inside - 380).abs() < 3 * spread).all()), inside


def test_the_gradient_of_heat_is_that_of_differences():
    start = torch.tensor([0.0, 1.0, 0.0, 2.0])

    def temperatures(start, conductivity):
        return differentiable.heat(start, conductivity, steps=4, every=2)

    inputs = (start.requires_grad_(), torch.tensor([0.2, 0.3, 0.1], requires_grad=True))
    assert torch.autograd.gradcheck(temperatures, inputs)
