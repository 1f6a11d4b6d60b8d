import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import autograd
from helpers.autograd import Value

SHAPES = [(), (3,), (1, 3), (2, 1), (2, 3), (4, 2, 1), (4, 1, 3), (4, 2, 3)]  # add up in any pair
UNARY = {
    "exp": lambda x: x.tanh().exp(),  # kept small: a chain of exponentials overflows
    "log": lambda x: (x * x + 0.5).log(),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: x.relu(),
    "square": lambda x: x**2,
    "root": lambda x: (x * x + 1) ** 0.5,
    "negative": lambda x: -x,
    "constant": lambda x: 2 - x / 3 + 1 / (x * x + 1),
    "array": lambda x: np.array([[0.5], [-1.5]]) * x if isinstance(x, Value) else ARRAY * x,
    "sum": lambda x: x.sum(),
    "times_matrix": lambda x: x @ like(SQUARE, x) if multiplies(x, SQUARE) else x,
    "matrix_times": lambda x: like(ROTATION, x) @ x if multiplies(ROTATION, x) else x,
}
SQUARE = np.array([[0.5, -1.0, 0.0], [0.2, 0.3, -0.4], [1.0, 0.0, 0.7]])
ROTATION = np.array([[0.6, -0.8], [0.8, 0.6]])
ARRAY = torch.tensor([[0.5], [-1.5]], dtype=torch.float64)
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a.tanh() * b,
    "div": lambda a, b: a / (b * b + 1),
    "matmul": lambda a, b: a.tanh() @ b if multiplies(a, b) else a - b,
}


def like(constant, x):
    return constant if isinstance(x, Value) else torch.tensor(constant)


def multiplies(a, b):
    """Whether a @ b is a product of matrices, alone or in batches that broadcast."""
    if min(len(a.shape), len(b.shape)) < 2 or a.shape[-1] != b.shape[-2]:
        return False
    batches = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    return all(m == n or 1 in (m, n) for m, n in batches)


STEP = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 10**6), st.integers(0, 10**6))


def run(program, leaves):
    """Evaluate the same random expression on Values or on tensors; later steps reuse earlier."""
    pool = list(leaves)
    for name, i, j in program:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        pool.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
    total = sum(one.sum() for one in pool)
    return total.tanh() if total.shape == () else total


Value.shape = property(lambda self: self.data.shape)  # for `run` alone


@settings(deadline=None, max_examples=150)
@given(
    st.lists(STEP, min_size=1, max_size=12),
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_random_graphs_agree_with_torch(program, shapes, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-1, 1, shape) for shape in shapes]
    mine = [Value(a) for a in arrays]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    got, want = run(program, mine), run(program, theirs)
    np.testing.assert_allclose(got.data, want.detach(), rtol=1e-9, atol=1e-9)
    got.backward()
    want.backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad.shape == a.data.shape
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3), (3, 4)),
        ((1, 3), (3, 1)),
        ((0, 3), (3, 2)),
        ((2, 0), (0, 2)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (7, 3, 4)),
    ],
)
def test_matmul_with_batches_agrees_with_torch(left, right):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=left), rng.normal(size=right)
    x, y = Value(a), Value(b)
    s, t = (torch.tensor(m, requires_grad=True) for m in (a, b))
    product = x @ y
    seed = rng.normal(size=product.data.shape)
    product.backward(seed)
    (s @ t).backward(torch.tensor(seed))
    for mine, theirs in [(x.grad, s.grad), (y.grad, t.grad)]:
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


def test_operands_may_be_transposed_views_and_constants():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, 2)), rng.normal(size=(3, 4))
    value, tensor = Value(w.T), torch.tensor(w.T, requires_grad=True)
    (value @ x).tanh().sum().backward()
    (tensor @ torch.tensor(x)).tanh().sum().backward()
    np.testing.assert_allclose(value.grad, tensor.grad, atol=1e-12)
    right = Value(x)
    (w.T @ right).sum().backward()  # the array may stand on the left, too
    np.testing.assert_allclose(right.grad, w @ np.ones((2, 4)))


@given(st.floats(-700, 700))
def test_elementary_functions_far_from_zero(x):
    for name in ("tanh", "sigmoid", "relu"):
        mine, theirs = Value(x), torch.tensor(x, dtype=torch.float64, requires_grad=True)
        with np.errstate(all="raise", under="ignore"):
            out = getattr(mine, name)()
            out.backward()
        want = getattr(theirs, name)()
        want.backward()
        np.testing.assert_allclose(out.data, want.item(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(mine.grad, theirs.grad.item(), rtol=1e-9, atol=1e-15)


def test_a_reused_node_collects_the_gradient_of_every_use():
    x = Value(3.0)
    y = x * x
    (y * y + y + x).backward()  # x**4 + x**2 + x
    assert x.grad == 4 * 27 + 6 + 1
    assert y.grad == 2 * 9 + 1


def test_a_second_backward_adds_to_leaves_and_does_not_count_twice():
    x = Value([1.0, 2.0])
    y = (x * x).exp()
    z = y.sum()
    z.backward()
    first = x.grad.copy()
    z.backward()
    assert np.array_equal(x.grad, 2 * first)
    x.grad = None
    y.backward(np.ones(2))
    assert np.array_equal(x.grad, first)


def test_gradients_of_two_nodes_do_not_share_memory():
    a, b = Value([1.0, 2.0]), Value([3.0, 4.0])
    (a + b).backward(np.ones(2))
    a.grad *= 5
    assert np.array_equal(b.grad, [1, 1])


def test_constants_are_not_parents():
    x = Value([1.0, 2.0])
    y = 3 * x + np.ones(2) - 1
    assert [node.op for node in y.order()] == ["leaf", "*", "+", "+"]


def test_no_gradient_is_none_until_there_is_one():
    """As in PyTorch: zero would say that something was computed."""
    x, unused = Value(3.0), Value(4.0)
    assert x.grad is None
    (x * 2).backward()
    assert x.grad == 2 and unused.grad is None


def test_depth_has_no_limit():
    x = Value(1.0)
    y = x
    for _ in range(10_000):
        y = y * 1.0001 + x * 1e-4
    y.backward()
    power = 1.0001**10_000
    assert math.isclose(x.grad, power + 1e-4 * (power - 1) / 1e-4, rel_tol=1e-9)
    assert len(y.order()) == 1 + 3 * 10_000


def test_order_has_parents_first_and_each_node_once():
    x = Value(1.0)
    y = x.exp()
    z = (y + x) * (y - x) + y
    nodes = z.order()
    place = {node: i for i, node in enumerate(nodes)}
    assert len(place) == len(nodes) and nodes[-1] is z
    assert all(place[p] < place[n] for n in nodes for p, _ in n.parents)


def test_backward_with_a_seed_is_a_vector_jacobian_product():
    x = np.array([0.5, -1.0, 2.0])
    value, tensor = Value(x), torch.tensor(x)
    seed = np.array([1.0, -2.0, 0.5])
    (value.tanh() * value).backward(seed)
    jacobian = torch.func.jacrev(lambda t: t.tanh() * t)(tensor)
    np.testing.assert_allclose(value.grad, torch.tensor(seed) @ jacobian, rtol=1e-12)


def test_errors_name_expected_and_got():
    with pytest.raises(ValueError, match=r"seed: expected \(2,\), got \(\)"):
        Value([1.0, 2.0]).backward()
    with pytest.raises(ValueError, match=r"seed: expected \(2,\), got \(3,\)"):
        Value([1.0, 2.0]).backward(np.ones(3))
    with pytest.raises(ValueError, match=r"@ expects matrices, got \(2,\) @ \(2, 2\)"):
        Value([1.0, 2.0]) @ np.eye(2)
    with pytest.raises(ValueError, match="broadcast"):
        Value(np.ones(2)) + np.ones(3)


def test_a_value_says_what_it_is():
    assert repr(Value([1, 2]) * 2) == "* [2.0, 4.0]"
    assert autograd.Value(1).data.dtype == np.float64
