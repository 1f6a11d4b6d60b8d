"""Chapter 03, drawn: a loss and its slope, graphs forward and backward, gradient descent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PALE, PEACH, arrow, box, frame

NODE = (1.5, 0.5)  # width and height of a node
FAINT = "#BBBBBB"  # edges that rest
RULES = {  # what a node passes on to its inputs, by the name of its grad_fn
    "AddBackward0": "g to both",
    "SubBackward0": "g, unchanged",
    "MulBackward0": "g × the other factor",
    "MmBackward0": "g @ xᵀ to W, Wᵀ @ g to x",
    "SigmoidBackward0": "g × a × (1 − a)",
    "PowBackward0": "g × 2 × input",
    "SumBackward0": "g to each element",
    None: ".grad += g",
}


def draw_knob(ax: Axes, loss_at: Callable, w: float) -> None:
    """Draw a loss of one parameter, and at `w` its tangent and the way downhill."""
    knob = torch.tensor(float(w), requires_grad=True)
    loss = loss_at(knob)
    loss.backward()
    height, slope = loss.item(), knob.grad.item()

    turns = np.linspace(-1, 6, 71)
    heights = [float(loss_at(turn)) for turn in turns]
    ax.plot(turns, heights, color=BLUE, linewidth=1.2)
    near = np.array([w - 0.6, w + 0.6])
    ax.plot(near, height + slope * (near - w), color=ORANGE, linewidth=2)
    ax.plot(w, height, "o", color=ORANGE)
    if abs(slope) > 0.5:
        arrow(ax, (w, -8), (w - 0.06 * slope, -8), GREEN)
    ax.axhline(0, color=FAINT, linewidth=0.6)
    ax.set(xlim=(-1, 6), ylim=(-14, 62), xlabel="w", ylabel="loss")
    ax.set_title(f"w = {w:g}   loss = {height:.2f}   gradient = {slope:.2f}", fontsize=10)


def graph_steps(tensors: Mapping[str, Tensor]) -> int:
    """Return how many pictures `draw_graph` has: the leaves, each operation, then all backward."""
    return 1 + sum(not t.is_leaf for t in tensors.values()) + len(tensors)


def draw_graph(ax: Axes, tensors: Mapping[str, Tensor], step: int) -> None:
    """Draw the graph of `tensors` after `step` steps, forward first and then backward.

    tensors: all of the graph by name, in the order in which they were computed. Each has its
    gradient: `backward` has run, and all but the leaves have called `retain_grad` before.
    """
    names = list(tensors)
    inputs = {name: _inputs(tensors, name) for name in names}
    operations = [name for name in names if inputs[name]]
    backward = names[::-1][: max(step - len(operations), 0)]  # those whose gradient is known
    computed = {*operations[:step], *(name for name in names if not inputs[name])}

    active, color, face, title = None, BLUE, PALE, "leaves"
    if backward:
        active, color, face = backward[-1], ORANGE, PEACH
        grad_fn = tensors[active].grad_fn
        title = f"backward, {active}:  {RULES[grad_fn.name() if grad_fn else None]}"
    elif step:
        active = operations[step - 1]
        title = f"forward, {active}"

    places = _places(names, inputs.get)
    for name, (x, y) in places.items():
        for parent in inputs[name]:
            lit = name == active
            edge = color if lit else FAINT
            _edge(ax, places[parent], (x, y), edge, reverse=lit and bool(backward))
        box(ax, (x, y), name, face if name == active else "white", size=NODE)
        if name in computed:
            text = _numbers(tensors[name])
            ax.text(x - 0.82, y, text, color=BLUE, ha="right", va="center", size=10)
        if name in backward:
            text = _numbers(tensors[name].grad)
            ax.text(x + 0.82, y, text, color=ORANGE, ha="left", va="center", size=10)

    bottom = min(y for _, y in places.values())
    ax.text(0, 0.6, title, ha="center", size=11)
    ax.text(-3.4, bottom, "value", color=BLUE, va="center", size=11)
    ax.text(3.4, bottom, "gradient g", color=ORANGE, ha="right", va="center", size=11)
    frame(ax, (-3.5, 3.5), (bottom - 0.35, 0.9))


def _inputs(tensors: Mapping[str, Tensor], name: str) -> list[str]:
    """Name the tensors that `tensors[name]` was computed from, as PyTorch recorded them."""
    if tensors[name].is_leaf:
        return []
    found = []
    for fn, _ in tensors[name].grad_fn.next_functions:
        for other, t in tensors.items():
            of_leaf = t.is_leaf and getattr(fn, "variable", None) is t
            if of_leaf or (fn is not None and t.grad_fn is fn):
                found.append(other)
    return found


def draw_recorded(ax: Axes, root: Tensor) -> None:
    """Draw the graph that PyTorch recorded behind `root`, with the tensors each node has saved."""
    nodes: list[Any] = []
    seen: set[Any] = set()

    def visit(fn: Any) -> None:
        if fn is not None and fn not in seen:
            seen.add(fn)
            for parent, _ in fn.next_functions:
                visit(parent)
            nodes.append(fn)

    visit(root.grad_fn)
    places = _places(nodes, lambda fn: [p for p, _ in fn.next_functions if p is not None])
    for fn, (x, y) in places.items():
        for parent, _ in fn.next_functions:
            if parent is not None:  # None: a constant
                _edge(ax, places[parent], (x, y), ORANGE, reverse=True)
        leaf = hasattr(fn, "variable")
        box(ax, (x, y), "", PALE if leaf else "white", size=(3.1, NODE[1]))
        ax.text(x, y + 0.03, fn.name().removeprefix("torch::autograd::"), ha="center", size=10)
        text = f"leaf {tuple(fn.variable.shape)}" if leaf else _saved(fn)
        ax.text(x, y - 0.19, text, color=BLUE if leaf else GRAY, ha="center", size=8)
    frame(ax, (-3.5, 3.5), (min(y for _, y in places.values()) - 0.3, 0.3))


def draw_descent(
    ax: Axes, x: Tensor, path: Sequence, excess: Sequence, best: Sequence, title: str
) -> None:
    """Draw a path [(w, b), …] over the level lines of mean((w x + b - y)²), and its loss by step.

    x: the inputs, [N]. best: (w, b) of the lowest loss. excess: loss - lowest loss, by step.
    """
    ax.axis("off")
    ax.set_title(title, fontsize=11)
    surface, curve = map(ax.inset_axes, [[0.03, 0.14, 0.54, 0.84], [0.71, 0.14, 0.29, 0.74]])

    for i, level in enumerate(np.geomspace(0.05, 70, 8)):
        surface.plot(*_level_line(x, best, level), color=BLUE, alpha=1 - 0.09 * i, linewidth=0.7)
    surface.plot(*zip(*path, strict=True), ".-", color=ORANGE, linewidth=1, markersize=4)
    surface.plot(*best, "*", color=GREEN, markersize=11)
    surface.set(xlim=(-0.5, 7.5), ylim=(-2.5, 6), xlabel="w", ylabel="b")

    shown = np.maximum(excess, 1e-9)  # the scale is logarithmic
    curve.semilogy(shown, ".-", color=ORANGE, linewidth=1, markersize=3)
    curve.set(xlabel="step", ylim=(1e-5, 1e4), yticks=[1e-4, 1e-2, 1, 100])
    curve.minorticks_off()
    curve.set_title("loss − minimum", fontsize=9)


def _level_line(x: Tensor, best: Sequence, level: float) -> np.ndarray:
    """Points [2, 60] where the loss is `level` above its minimum: an ellipse around `best`.

    With A = [x, 1] the loss exceeds its minimum by dᵀ (AᵀA / N) d at the distance d from `best`,
    and with the Cholesky factor AᵀA / N = L Lᵀ that is |Lᵀ d|²: a circle, seen through L⁻ᵀ.
    """
    columns = np.stack([x.numpy(), np.ones(len(x))], axis=1)
    factor = np.linalg.cholesky(columns.T @ columns / len(x))
    angles = np.linspace(0, 2 * np.pi, 60)
    circle = level**0.5 * np.array([np.cos(angles), np.sin(angles)])
    return np.array(best)[:, None] + np.linalg.solve(factor.T, circle)


def _places(nodes: Sequence, parents: Callable, spread: float = 1.75) -> dict[Any, tuple]:
    """The root at the bottom, each node above all that use it, the nodes of a row side by side."""
    height = {nodes[-1]: 0}
    for node in reversed(nodes):  # users first
        for parent in parents(node):
            height[parent] = max(height.get(parent, 0), height[node] + 1)
    rows: dict[int, list] = {}
    for node in nodes:
        rows.setdefault(height[node], []).append(node)
    return {
        node: (spread * (2 * i - len(row) + 1), 0.95 * (level - max(rows)))
        for level, row in rows.items()
        for i, node in enumerate(row)
    }


def _saved(fn: Any) -> str:
    """Name what an operation of PyTorch saved for backward; it shows in attributes _saved_…"""
    tensors = []
    for name in dir(fn):
        if name.startswith("_saved_") and isinstance(getattr(fn, name), Tensor):
            shape = tuple(getattr(fn, name).shape)
            tensors.append(f"{name.removeprefix('_saved_')} {shape}")
    return "saved: " + ", ".join(tensors) if tensors else "saves no tensor"


def _numbers(tensor: Tensor) -> str:
    rows = np.atleast_2d(np.round(tensor.detach().numpy(), 2) + 0.0)  # + 0.0: no minus before 0
    return "\n".join("  ".join(f"{value:.2f}" for value in row) for row in rows)


def _edge(
    ax: Axes,
    parent: tuple[float, float],
    node: tuple[float, float],
    color: str,
    *,
    reverse: bool = False,
) -> None:
    """Draw the edge between a node and its parent above it; `reverse`: the way of gradients."""
    top, bottom = (parent[0], parent[1] - 0.27), (node[0], node[1] + 0.27)
    if reverse:
        arrow(ax, bottom, top, color)
    else:
        arrow(ax, top, bottom, color)
