import ast
import math
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import autograd
from helpers.autograd import Value, topological_order, unbroadcast

ROOT = Path(__file__).resolve().parents[1]
ON_THE_PAGE = ("autograd-order-topological", "autograd-unbroadcast-code", "autograd-whole-class")

SHAPES = [(), (3,), (1, 3), (2, 1), (2, 3), (3, 2), (4, 2, 1), (4, 1, 3), (4, 2, 3)]
UNARY = {
    "exp": lambda x: x.tanh().exp(),  # kept small: a chain of exponentials overflows
    "log": lambda x: (x * x + 0.5).log(),
    "tanh": lambda x: x.tanh(),
    "relu": lambda x: x.relu(),
    "square": lambda x: x**2,
    "root": lambda x: (x * x + 1) ** 0.5,
    "negative": lambda x: -x,
    "constant": lambda x: 2 - x / 3 + 1 / (x * x + 1),
    "sum": lambda x: x.sum(),
}
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a.tanh() * b,
    "div": lambda a, b: a / (b * b + 1),
}
STEP = st.tuples(
    st.sampled_from([*UNARY, *BINARY, "matmul"]), st.integers(0, 10**6), st.integers(0, 10**6)
)


def plain(tree):
    """The code without docstrings and types: what the page shows."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            self.generic_visit(node)
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            node.body = without_docstring(node.body)
            return node

        def visit_ClassDef(self, node):
            self.generic_visit(node)
            node.body = without_docstring(node.body)
            return node

    return [ast.unparse(Strip().visit(node)) for node in tree.body if is_definition(node)]


def without_docstring(body):
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_text else body


def is_definition(node):
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def test_the_engine_on_the_page_is_this_one():
    notebook = nbformat.read(ROOT / "notebooks" / "03_autograd.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in notebook.cells}
    page = ast.parse("\n".join(cells[name] for name in ON_THE_PAGE))
    package = ast.parse((ROOT / "helpers" / "autograd.py").read_text(encoding="utf-8"))
    assert plain(page) == plain(package)
    lines = [line for line in "\n".join(plain(page)).split("\n") if line.strip()]
    assert len(lines) <= 115  # "about a hundred", as the claim says


def fits(a, b):
    return len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]


def adds_up(a, b):
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def run(program, leaves):
    """Evaluate the same random expression on Values or on tensors; later steps reuse earlier."""
    pool = list(leaves)
    for name, i, j in program:
        a = pool[i % len(pool)]
        if name in UNARY:
            pool.append(UNARY[name](a))
            continue
        suits = fits if name == "matmul" else adds_up
        partners = [b for b in pool if suits(a, b)]
        if partners:
            b = partners[j % len(partners)]
            pool.append(a.tanh() @ b if name == "matmul" else BINARY[name](a, b))
    total = pool[0].sum()
    for one in pool[1:]:
        total = total + one.sum()
    return total.tanh() + pool[-1].sum()


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
    got = run(program, mine)
    with torch.no_grad():
        expected = run(program, [t.detach() for t in theirs])
    want = run(program, theirs)
    np.testing.assert_allclose(got.data, expected, rtol=1e-9, atol=1e-9)
    got.backward()
    want.backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad.shape == a.data.shape
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("left", "right"), [((2, 3), (3, 4)), ((1, 3), (3, 1)), ((0, 3), (3, 2)), ((2, 0), (0, 2))]
)
def test_matmul_agrees_with_torch(left, right):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=left), rng.normal(size=right)
    x, y = Value(a), Value(b)
    s, t = (torch.tensor(m, requires_grad=True) for m in (a, b))
    product = x @ y
    weights = rng.normal(size=product.data.shape)
    product.backward(weights)
    (s @ t).backward(torch.tensor(weights))
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


def test_an_array_on_the_left_of_each_operator():
    array = np.array([2.0, 4.0])
    for got, want in [
        (array + Value(1), [3, 5]),
        (array - Value(1), [1, 3]),
        (array * Value(3), [6, 12]),
        (array / Value(2), [1, 2]),
    ]:
        assert isinstance(got, Value)
        assert got.data.tolist() == want


@given(st.floats(-700, 700))
def test_elementary_functions_far_from_zero(x):
    for name in ("tanh", "relu"):
        mine, theirs = Value(x), torch.tensor(x, dtype=torch.float64, requires_grad=True)
        with np.errstate(all="raise", under="ignore"):
            out = getattr(mine, name)()
            out.backward()
        want = getattr(theirs, name)()
        want.backward()
        np.testing.assert_allclose(out.data, want.item(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(mine.grad, theirs.grad.item(), rtol=1e-9, atol=1e-15)


def test_the_slope_of_relu_at_zero_is_that_of_torch():
    mine, theirs = Value(0.0), torch.tensor(0.0, requires_grad=True)
    mine.relu().backward()
    theirs.relu().backward()
    assert mine.grad == theirs.grad == 0


def test_a_reused_node_collects_the_gradient_of_every_use():
    x = Value(3.0)
    y = x * x
    (y * y + y + x).backward()  # x**4 + x**2 + x
    assert x.grad == 4 * 27 + 6 + 1
    assert y.grad == 2 * 9 + 1


def test_the_diamond_of_the_chapter():
    x = Value(3.0)
    a = x * x
    b = a + 1
    (a * b).backward()
    assert (x.grad, a.grad, b.grad) == (114, 19, 9)


def test_a_second_backward_adds_to_leaves_and_does_not_count_twice():
    x = Value([1.0, 2.0])
    y = (x * x).exp()
    z = y.sum()
    z.backward()
    first = x.grad.copy()
    z.backward()
    assert np.array_equal(x.grad, 2 * first)
    x.grad = np.zeros(2)
    y.backward(np.ones(2))
    assert np.array_equal(x.grad, first)


def test_gradients_of_two_nodes_do_not_share_memory():
    a, b = Value([1.0, 2.0]), Value([3.0, 4.0])
    (a + b).backward(np.ones(2))
    a.grad *= 5
    assert np.array_equal(b.grad, [1, 1])


def test_a_gradient_is_zero_until_there_is_one():
    x, unused = Value([3.0]), Value([4.0, 5.0])
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2] and unused.grad.tolist() == [0, 0]


def test_unbroadcast_undoes_broadcasting():
    g = np.arange(12.0).reshape(2, 2, 3)
    assert unbroadcast(g, (2, 2, 3)) is g
    assert unbroadcast(g, (3,)).tolist() == g.sum((0, 1)).tolist()
    assert unbroadcast(g, (2, 1)).tolist() == g.sum(0).sum(1, keepdims=True).tolist()
    assert unbroadcast(g, ()) == g.sum()


def test_depth_has_no_limit():
    x = Value(1.0)
    y = x
    for _ in range(10_000):
        y = y * 1.0001 + x * 1e-4
    y.backward()
    power = 1.0001**10_000
    assert math.isclose(x.grad, power + 1e-4 * (power - 1) / 1e-4, rel_tol=1e-9)


def test_order_has_users_first_and_each_node_once():
    x = Value(1.0)
    y = x.exp()
    z = (y + x) * (y - x) + y
    nodes = topological_order(z)
    place = {node: i for i, node in enumerate(nodes)}
    assert len(place) == len(nodes) and nodes[0] is z
    assert all(place[p] > place[n] for n in nodes for p in n.inputs)


def test_backward_with_a_gradient_is_a_vector_jacobian_product():
    x = np.array([0.5, -1.0, 2.0])
    value, tensor = Value(x), torch.tensor(x)
    weights = np.array([1.0, -2.0, 0.5])
    (value.tanh() * value).backward(weights)
    jacobian = torch.func.jacrev(lambda t: t.tanh() * t)(tensor)
    np.testing.assert_allclose(value.grad, torch.tensor(weights) @ jacobian, rtol=1e-12)


def test_errors_name_expected_and_got():
    with pytest.raises(ValueError, match=r"need shape \(2,\), got \(\)"):
        Value([1.0, 2.0]).backward()
    with pytest.raises(ValueError, match=r"need shape \(2,\), got \(3,\)"):
        Value([1.0, 2.0]).backward(np.ones(3))
    with pytest.raises(ValueError, match=r"@ needs matrices, got \(2,\) and \(2, 2\)"):
        Value([1.0, 2.0]) @ np.eye(2)
    with pytest.raises(ValueError, match="broadcast"):
        Value(np.ones(2)) + np.ones(3)


def test_data_are_float64():
    assert autograd.Value(1).data.dtype == np.float64
