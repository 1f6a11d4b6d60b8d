import numpy as np
import pytest
import torch

from helpers.pictures import autograd as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.fixture
def graph():
    w = torch.tensor([[0.5, -1.0], [1.5, 0.5]], requires_grad=True)
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    z = w @ x
    a = z.sigmoid()
    error = a - torch.tensor([[1.0], [0.0]])
    square = error**2
    loss = square.sum()
    tensors = {"W": w, "x": x, "z = W @ x": z, "a": a, "error": error, "e²": square, "loss": loss}
    for tensor in (z, a, error, square, loss):
        tensor.retain_grad()
    loss.backward()
    return tensors


def test_first_only_the_leaves_have_values(ax, graph):
    pictures.draw_graph(ax, graph, step=0)
    found = texts(ax)
    assert {*graph, "leaves"} <= set(found)
    assert "0.50  -1.00\n1.50  0.50" in found and "1.00\n2.00" in found
    assert "-1.50\n2.50" not in found


def test_forward_shows_one_more_value_at_each_step(ax, graph):
    pictures.draw_graph(ax, graph, step=1)
    assert "forward, z = W @ x" in texts(ax)
    assert "-1.50\n2.50" in texts(ax)  # W @ x by hand
    assert "0.18\n0.92" not in texts(ax)  # its sigmoid comes next


def test_backward_shows_complete_gradients_and_the_rule(ax, graph):
    steps = pictures.graph_steps(graph)
    assert steps == 1 + 5 + 7
    pictures.draw_graph(ax, graph, step=steps - 2)
    found = texts(ax)
    for tensor in list(graph.values())[1:]:
        assert pictures._numbers(tensor.grad) in found
    assert pictures._numbers(graph["W"].grad) not in found  # that is the last step
    assert "backward, x:  .grad += g" in found


def test_backward_begins_at_the_loss(ax, graph):
    pictures.draw_graph(ax, graph, step=6)
    assert "backward, loss:  g to each element" in texts(ax)


def test_the_inputs_are_those_that_pytorch_recorded(graph):
    assert pictures._inputs(graph, "z = W @ x") == ["W", "x"]
    assert pictures._inputs(graph, "error") == ["a"]  # the target is a constant
    assert pictures._inputs(graph, "W") == []


def test_a_graph_with_reuse_places_each_node_once_and_below_its_inputs(ax):
    x = torch.tensor(3.0, requires_grad=True)
    a = x * x
    b = a + 1
    y = a * b
    tensors = {"x": x, "a": a, "b": b, "y": y}
    for tensor in (a, b, y):
        tensor.retain_grad()
    y.backward()
    for step in range(pictures.graph_steps(tensors)):
        ax.clear()
        pictures.draw_graph(ax, tensors, step)
    assert "114.00" in texts(ax)
    inputs = {name: pictures._inputs(tensors, name) for name in tensors}
    assert inputs["y"] == ["a", "b"]
    places = pictures._places(list(tensors), inputs.get)
    assert len(set(places.values())) == len(tensors)
    assert all(places[p][1] > places[n][1] for n in tensors for p in inputs[n])


def square_of(w):
    return (w - 2) ** 2


@pytest.mark.parametrize(("w", "arrows"), [(0.0, 1), (2.0, 0), (5.0, 1)])
def test_the_knob_shows_loss_gradient_and_the_way_down(ax, w, arrows):
    pictures.draw_knob(ax, square_of, w)
    assert ax.get_title() == f"w = {w:g}   loss = {(w - 2) ** 2:.2f}   gradient = {2 * w - 4:.2f}"
    tangent = ax.lines[1].get_xydata()
    slope = (tangent[1] - tangent[0])[1] / (tangent[1] - tangent[0])[0]
    assert slope == pytest.approx(2 * w - 4)
    assert len(ax.texts) == arrows  # an arrow is an annotation
    for arrow in ax.texts:
        assert (arrow.xy[0] - w) * (2 - w) > 0  # towards the minimum


def test_the_recorded_graph_names_nodes_leaves_and_saved_tensors(ax):
    w = torch.ones(2, 3, requires_grad=True)
    c = torch.ones(3, 1)
    pictures.draw_recorded(ax, (w @ c).sigmoid().sum() + w.sum())
    found = texts(ax)
    assert found.count("AccumulateGrad") == 1 and "leaf (2, 3)" in found
    assert "saved: mat2 (3, 1)" in found and "saved: result (2, 1)" in found
    assert found.count("SumBackward0") == 2 and "saves no tensor" in found


def test_no_minus_before_zero():
    assert pictures._numbers(torch.tensor([-1e-9, 1.0])) == "0.00  1.00"


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
