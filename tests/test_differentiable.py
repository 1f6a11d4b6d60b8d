"""Simulators against closed forms and SciPy, gradients against float64 differences and theory."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.integrate import solve_ivp
from torch.func import vmap

from helpers import differentiable
from helpers.differentiable import Budget, BudgetSpent

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


def test_a_loss_that_writes_into_its_input_harms_nobody():
    """Neither the searcher's array nor what the budget remembers."""

    def untidy(p):
        loss = bowl(p)
        with torch.no_grad():
            p.zero_()
        return loss

    budget = Budget(untidy, limit=4)
    array = np.array([2.0, 1.0])
    assert budget.value(array) == 1.0
    assert array.tolist() == budget.best_at.tolist() == [2.0, 1.0]


def test_a_loss_may_keep_its_input():
    """As `vector_to_parameters` does: the search goes on, and what was kept stays."""
    kept = []

    def keeping(p):
        kept.append(p)
        return bowl(p)

    budget = Budget(keeping, limit=4)
    array = np.array([2.0, 1.0])
    budget.value(array)
    budget.gradient(array)
    array[:] = 7
    assert [p.tolist() for p in kept] == [[2.0, 1.0], [2.0, 1.0]]
    kept[1].detach().zero_()
    assert budget.best_at.tolist() == [2.0, 1.0]


def test_a_budget_knows_when_a_goal_was_reached():
    budget = Budget(bowl, limit=20, gradient_cost=2.5)
    assert budget.calls_until(100.0) is None
    for x in (3.0, 2.0, 2.5, 1.0):
        budget.gradient([x])  # losses 4, 1, 2.25, 0 after 2.5, 5, 7.5, 10 calls
    found = [budget.calls_until(goal) for goal in (5.0, 4.0, 1.0, 0.0)]
    assert found == [3, 5, 10, None]  # whole calls, and below the goal, not at it
    assert isinstance(found[0], int)


def test_a_budget_ends():
    budget = Budget(bowl, limit=4, gradient_cost=3)
    budget.gradient([0.0])
    budget.value([0.0])
    with pytest.raises(BudgetSpent, match="expected to stay within 4 calls, spent 4"):
        budget.value([0.0])
    assert budget.spent == 4


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
