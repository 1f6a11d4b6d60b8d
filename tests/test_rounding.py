"""The bound of rounding errors that the tests of chapter 15 rest on."""

import pytest
import torch
import torch.nn.functional as F

from tests.rounding import EXTRA, SECOND_ORDER, UNIT, bounds


def test_a_product_is_bounded_by_the_product_of_the_sizes():
    a, b = torch.randn(3, 7), torch.randn(7, 4)
    (found,) = bounds(torch.mm, a, b)
    sizes = a.double().abs() @ b.double().abs()
    assert torch.allclose(found, SECOND_ORDER * UNIT * (7 + EXTRA) * sizes)


def test_errors_go_through_what_follows():
    def square_of_sum(x):
        return x.sum() * x.sum()

    x = torch.tensor([1.0, 2.0, -4.0])
    (found,) = bounds(square_of_sum, x)
    # each sum is off by (3 + EXTRA) u 7, times the other sum; and the product rounds once
    want = SECOND_ORDER * UNIT * (2 * (3 + EXTRA) * 7 * 1 + 1)
    assert found.item() == pytest.approx(want)


def test_float32_stays_within_and_a_wrong_formula_does_not():
    def attend(x, weight, bias):
        y = F.softmax(F.layer_norm(x, x.shape[-1:], weight, bias), dim=-1)
        return (y @ F.gelu(x).T).mean(0)

    x, weight, bias = torch.randn(5, 9), torch.randn(9), torch.randn(9)
    (bound,) = bounds(attend, x, weight, bias)
    exact = attend(x.double(), weight.double(), bias.double())
    assert ((attend(x, weight, bias) - exact).abs() <= bound).all()
    assert ((attend(x * (1 + 1e-3), weight, bias) - exact).abs() > bound).any()


def test_an_operation_nobody_has_thought_of_is_refused():
    with pytest.raises(NotImplementedError, match="lgamma: how often does it round"):
        bounds(torch.lgamma, torch.ones(2))
