import numpy as np
import pytest
import torch

from helpers.autograd import Value
from helpers.pictures import autograd as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.fixture
def graph():
    w, x = Value([[0.5, -1.0], [1.5, 0.5]]), Value([[1.0], [2.0]])
    z = w @ x
    a = z.sigmoid()
    loss = ((a - np.array([[1.0], [0.0]])) ** 2).sum()
    loss.backward()
    return loss, {w: "W", x: "x", z: "z = W @ x", a: "a", loss: "loss"}


def test_first_only_the_leaves_have_values(ax, graph):
    pictures.draw_graph(ax, *graph, step=0)
    found = texts(ax)
    assert {"W", "x", "z = W @ x", "a", "+", "**", "loss", "leaves"} <= set(found)
    assert "0.50  -1.00\n1.50  0.50" in found and "1.00\n2.00" in found
    assert "-1.50\n2.50" not in found


def test_forward_shows_one_more_value_at_each_step(ax, graph):
    pictures.draw_graph(ax, *graph, step=1)
    assert "forward, z = W @ x" in texts(ax)
    assert "-1.50\n2.50" in texts(ax)  # W @ x by hand
    assert "0.18\n0.92" not in texts(ax)  # its sigmoid comes next


def test_backward_shows_complete_gradients_and_the_rule(ax, graph):
    loss, names = graph
    steps = pictures.graph_steps(loss)
    assert steps == 1 + 5 + 7
    pictures.draw_graph(ax, loss, names, step=steps - 1)
    found = texts(ax)
    for node in loss.order():
        assert pictures._numbers(node.grad) in found
    assert "backward, W:  .grad += g" in found


def test_every_operation_of_the_engine_has_a_rule():
    x = Value([[0.5, 1.0]])
    y = (x + 1) * x @ np.eye(2) / 2
    for name in ("exp", "tanh", "sigmoid", "relu"):
        y = y + getattr(x, name)()
    used = {node.op for node in ((y**2) + 1).log().sum().order()}
    assert used == set(pictures.RULES)


def test_a_graph_with_reuse_places_each_node_once_and_below_its_parents(ax):
    x = Value(2.0)
    y = x.exp()
    root = y * x + y
    root.backward()
    for step in range(pictures.graph_steps(root)):
        ax.clear()
        pictures.draw_graph(ax, root, {}, step)
    nodes = root.order()
    places = pictures._places(nodes, lambda node: [p for p, _ in node.parents])
    assert len(set(places.values())) == len(nodes)
    assert all(places[p][1] > places[n][1] for n in nodes for p, _ in n.parents)


def test_the_recorded_graph_names_nodes_leaves_and_saved_tensors(ax):
    w = torch.ones(2, 3, requires_grad=True)
    c = torch.ones(3, 1)
    pictures.draw_recorded(ax, (w @ c).sigmoid().sum() + w.sum())
    found = texts(ax)
    assert found.count("AccumulateGrad") == 1 and "leaf (2, 3)" in found
    assert "saved: mat2 (3, 1)" in found and "saved: result (2, 1)" in found
    assert found.count("SumBackward0") == 2 and "saves no tensor" in found


def test_no_minus_before_zero():
    assert pictures._numbers(np.array([-1e-9, 1.0])) == "0.00  1.00"


def test_the_descent_figure_shows_the_path_and_the_excess_loss(ax):
    x = torch.linspace(0, 2, 9, dtype=torch.float64)
    path = [(6.0, 0.0), (4.0, 1.0), (3.0, 2.0)]
    excess = [((3 * x - 2) ** 2).mean().item(), 0.5, 0.0]
    pictures.draw_descent(ax, x, path, excess, (3.0, 2.0), "a title")
    surface, curve = ax.child_axes
    assert ax.get_title() == "a title"
    *rings, walk, star = surface.lines
    assert np.array_equal(np.array(walk.get_xydata()), path)
    for ring in rings:  # level lines: the loss is the same all around
        w, b = (torch.tensor(side)[:, None] for side in ring.get_data())
        losses = ((w * x + b - 3 * x - 2) ** 2).mean(1)
        assert torch.allclose(losses, losses[0])
    assert curve.lines[0].get_ydata().tolist() == [excess[0], 0.5, 1e-9]
