"""Chapter 03, drawn: graphs forward and backward, error of finite differences, gradient descent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from helpers.autograd import Value

BLUE, PALE, ORANGE, PEACH, GREEN, GRAY = "#0072B2 #D3E5F2 #D55E00 #F8DCC4 #00795A #666666".split()
RULES = {  # what a node sends to its parents
    "+": "g to both",
    "*": "g × the other factor",
    "@": "g @ rightᵀ to the left, leftᵀ @ g to the right",
    "**": "g × n × xⁿ⁻¹",
    "exp": "g × out",
    "log": "g / x",
    "tanh": "g × (1 − out²)",
    "sigmoid": "g × out × (1 − out)",
    "relu": "g where x > 0, else 0",
    "sum": "g to each element",
    "leaf": ".grad += g",
}


def graph_steps(root: Value) -> int:
    """Return how many pictures `draw_graph` has: the leaves, each operation, then all backward."""
    nodes = root.order()
    return 1 + sum(bool(node.parents) for node in nodes) + len(nodes)


def draw_graph(ax: Axes, root: Value, names: Mapping[Value, str], step: int) -> None:
    """Draw the graph behind `root` after `step` steps; `root.backward()` has run before."""
    nodes = root.order()
    places = _places(nodes, lambda node: [parent for parent, _ in node.parents])
    operations = [node for node in nodes if node.parents]
    backward = nodes[::-1][: max(step - len(operations), 0)]
    active = backward[-1] if backward else operations[step - 1] if step else None
    ready = {*operations[:step], *(node for node in nodes if not node.parents)}
    for node, (x, y) in places.items():
        for parent, _ in node.parents:
            color = (ORANGE if backward else BLUE) if node is active else "#BBBBBB"
            _arrow(ax, places[parent], (x, y), color, reverse=bool(backward) and node is active)
        face = (PEACH if backward else PALE) if node is active else "white"
        _box(ax, (x, y), names.get(node, node.op), face)
        if node in ready:
            ax.text(x - 0.62, y, _numbers(node.data), color=BLUE, ha="right", va="center", size=10)
        if node in backward:
            ax.text(x + 0.62, y, _numbers(node.grad), color=ORANGE, ha="left", va="center", size=10)
    name = names.get(active, active.op) if active else ""
    rule = f":  {RULES[active.op]}" if backward else ""
    title = f"{'backward' if backward else 'forward'}, {name}{rule}" if active else "leaves"
    bottom = min(y for _, y in places.values())
    ax.text(0, 0.6, title, ha="center", size=11)
    ax.text(-3.4, bottom, "value", color=BLUE, va="center", size=11)
    ax.text(3.4, bottom, "gradient g", color=ORANGE, ha="right", va="center", size=11)
    _frame(ax, (-3.5, 3.5), (bottom - 0.35, 0.9))


def draw_recorded(ax: Axes, root: Tensor) -> None:
    """Draw the graph that PyTorch recorded behind `root`, with the tensors each node has saved."""
    nodes, seen = [], set()

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
                _arrow(ax, places[parent], (x, y), ORANGE, reverse=True)
        leaf = hasattr(fn, "variable")
        _box(ax, (x, y), "", PALE if leaf else "white", 3.1)
        ax.text(x, y + 0.03, fn.name().removeprefix("torch::autograd::"), ha="center", size=10)
        text = f"leaf {tuple(fn.variable.shape)}" if leaf else _saved(fn)
        ax.text(x, y - 0.19, text, color=BLUE if leaf else GRAY, ha="center", size=8)
    _frame(ax, (-3.5, 3.5), (min(y for _, y in places.values()) - 0.3, 0.3))


def draw_differences(ax: Axes, f: Callable, slope: float, at: float) -> None:
    """Draw the error of forward and central differences of `f` over the step h, in two dtypes."""
    steps = [10.0**-k for k in np.arange(0, 16.1, 0.25)]
    for dtype, color in [(np.float32, ORANGE), (np.float64, BLUE)]:
        for kind, style in [("forward", "--"), ("central", "-")]:
            errors = []
            for h in map(dtype, steps):
                low, width = (dtype(at), h) if kind == "forward" else (dtype(at) - h, h + h)
                got = (f(dtype(at) + h) - f(low)) / width
                errors.append(abs(float(got) - slope) / abs(slope))
            best = int(np.argmin(errors))
            ax.loglog(steps, errors, style, color=color, label=f"{dtype.__name__}, {kind}")
            ax.plot(steps[best], max(errors[best], 1e-16), "o", color=color, markersize=5)
    ax.set(xlabel="step h", ylabel="relative error", ylim=(1e-14, 30))
    ax.legend(frameon=False, fontsize=8, loc="lower left")


def draw_descent(ax: Axes, x: Tensor, y: Tensor, path: Sequence, best: tuple, title: str) -> None:
    """Draw a path [(w, b), …] on the surface of mean((w x + b - y)²), and the loss by step."""
    ax.axis("off")
    ax.set_title(title, fontsize=11)
    surface, curve = map(ax.inset_axes, [[0.03, 0.14, 0.54, 0.84], [0.71, 0.14, 0.29, 0.74]])
    columns, angles = np.stack([x.numpy(), np.ones(len(x))], 1), np.linspace(0, 2 * np.pi, 60)
    axes = np.linalg.inv(np.linalg.cholesky(columns.T @ columns / len(x))).T
    for i, level in enumerate(np.geomspace(0.05, 70, 8)):  # ellipses: the loss is quadratic
        ring = np.array(best)[:, None] + level**0.5 * axes @ [np.cos(angles), np.sin(angles)]
        surface.plot(*ring, color=BLUE, alpha=1 - 0.09 * i, linewidth=0.7)
    surface.plot(*zip(*path, strict=True), ".-", color=ORANGE, linewidth=1, markersize=4)
    surface.plot(*best, "*", color=GREEN, markersize=11)
    surface.set(xlim=(-0.5, 7.5), ylim=(-2.5, 6), xlabel="w", ylabel="b")
    w, b = np.array([*path, best]).T[..., None]
    losses = ((w * x.numpy() + b - y.numpy()) ** 2).mean(1)
    excess = np.maximum(losses[:-1] - losses[-1], 1e-9)
    curve.semilogy(excess, ".-", color=ORANGE, linewidth=1, markersize=3)
    curve.set(xlabel="step", ylim=(1e-5, 1e4), yticks=[1e-4, 1e-2, 1, 100])
    curve.minorticks_off()
    curve.set_title("loss − minimum", fontsize=9)


def _places(nodes: Sequence, parents: Callable, spread: float = 1.75) -> dict[Any, tuple]:
    """The root at the bottom, each node above all that use it, the nodes of a row side by side."""
    height = {nodes[-1]: 0}
    for node in reversed(nodes):  # children first
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
    found = {name[7:]: getattr(fn, name) for name in dir(fn) if name.startswith("_saved_")}
    tensors = [f"{k} {tuple(v.shape)}" for k, v in found.items() if isinstance(v, torch.Tensor)]
    return "saved: " + ", ".join(tensors) if tensors else "saves no tensor"


def _numbers(array: np.ndarray) -> str:
    rows = np.atleast_2d(np.round(array, 2) + 0.0)  # + 0.0: no minus before a zero
    return "\n".join("  ".join(f"{value:.2f}" for value in row) for row in rows)


def _arrow(ax: Axes, start: tuple, end: tuple, color: str, *, reverse: bool) -> None:
    (x0, y0), (x1, y1) = (start[0], start[1] - 0.27), (end[0], end[1] + 0.27)
    tail, head = ((x1, y1), (x0, y0)) if reverse else ((x0, y0), (x1, y1))
    ax.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": color, "shrinkA": 0})


def _box(ax: Axes, at: tuple, text: str, face: str, width: float = 1.1) -> None:
    corner, style = (at[0] - width / 2, at[1] - 0.25), {"fc": face, "ec": "#444444", "lw": 0.8}
    ax.add_patch(Rectangle(corner, width, 0.5, **style))
    ax.text(*at, text, ha="center", va="center", size=10)


def _frame(ax: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.axis("off")
    ax.set(xlim=x, ylim=y, aspect="equal")
