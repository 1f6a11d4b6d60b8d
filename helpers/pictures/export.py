"""Chapter 17, drawn: the routes out of PyTorch, an ONNX graph step by step, latencies, advice."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from helpers.export import GraphNode
from helpers.page.decisions import decision_tree, read_tree
from helpers.pictures.draw import (
    BLUE,
    CREAM,
    GRAY,
    MINT,
    ORANGE,
    PALE,
    PEACH,
    arrow,
    box,
    frame,
)

TARGETS = Path(__file__).with_name("export_targets.yml")

# What is written, and what runs it.
ROUTES = (
    ("model.pt2", "PyTorch, in Python"),
    ("model.onnx", "ONNX Runtime, TensorRT, OpenVINO"),
    ("AOTInductor package", "C++ or Python, with libtorch"),
    ("model.pte", "ExecuTorch, on phones"),
)


def draw_routes(ax: Axes) -> None:
    """Draw nn.Module, the ExportedProgram, and the files that are made from it."""
    middle = (len(ROUTES) - 1) / 2
    box(ax, (0.0, -middle), "nn.Module", PALE, size=(1.7, 0.7), rounded=0.1)
    box(ax, (2.75, -middle), "Exported\nProgram", MINT, size=(1.7, 0.9), rounded=0.1)
    arrow(ax, (0.85, -middle), (1.9, -middle))
    ax.text(1.37, -middle + 0.12, "export", ha="center", size=8, color=GRAY)
    for row, (file, runs) in enumerate(ROUTES):
        box(ax, (5.75, -row), file, CREAM, size=(2.3, 0.6), rounded=0.1, fontsize=9)
        arrow(ax, (3.6, -middle), (4.6, -row))
        ax.text(7.05, -row, runs.replace(", ", ",\n", 1), va="center", size=8.5, color=GRAY)
    frame(ax, (-0.95, 9.3), (-len(ROUTES) + 0.4, 0.6), equal=False)


def draw_graph(ax: Axes, nodes: Sequence[GraphNode], step: int) -> None:
    """Draw the operations below each other; number `step`, from 1, with its shape and weights."""
    for row, node in enumerate(nodes):
        chosen = row == step - 1
        face = PEACH if chosen else "white"
        edge = ORANGE if chosen else GRAY
        style = {"size": (1.9, 0.68), "edge": edge, "rounded": 0.1, "fontsize": 9}
        box(ax, (0.0, -row), f"{row + 1}  {node.operator}", face, **style)
        if row:
            arrow(ax, (0.0, -row + 0.66), (0.0, -row + 0.34))
        if chosen:
            _details(ax, node, -row, len(nodes))
    frame(ax, (-1.1, 6.3), (-len(nodes) + 0.4, 0.7), equal=False)


def _details(ax: Axes, node: GraphNode, y: float, rows: int) -> None:
    """The result and the weights of the chosen node, at its height, inside the frame."""
    lines = [f"{name}: {_shape(shape)}" for name, shape in node.outputs.items()]
    ax.text(1.2, y + 0.15, "writes  " + "; ".join(lines), va="center", size=9, color=ORANGE)
    reads = ", ".join(node.inputs)
    ax.text(1.2, y - 0.3, "reads  " + reads, va="center", size=9, color=GRAY)
    below = y > -rows / 2  # where there is room for the boxes of the weights
    for number, (name, shape) in enumerate(node.weights.items(), 1):
        at = y - 0.35 - 0.75 * number if below else y + 0.15 + 0.75 * number
        text = f"{_short(name)}  {_shape(shape)}"
        box(ax, (3.6, at), text, PALE, size=(4.7, 0.62), edge=BLUE, rounded=0.1, fontsize=9)


def _short(name: str, letters: int = 26) -> str:
    return name if len(name) <= letters else f"…{name[-letters + 1 :]}"


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]" if shape else "one number"


def draw_latency(ax: Axes, rows: Sequence[Mapping[str, Any]], model: str, batch: int) -> None:
    """Draw p50 as a dot and p99 as a line, in ms on a log scale, for each engine.

    rows: of the record `export`. The thin line through a dot spans p20 to p80 of the medians of
    the blocks; the fastest engine's dot is orange.
    """
    chosen = [row for row in rows if row["model"] == model and row["batch"] == batch]
    fastest = min(row["p50"][1] for row in chosen)
    for place, row in enumerate(chosen):
        low, middle, high = row["p50"]
        p99 = row["p99"][1]
        ax.plot([low, high], [place, place], color="black", lw=1.5, zorder=2)
        color = ORANGE if middle == fastest else BLUE
        ax.plot(middle, place, "o", color=color, ms=7, zorder=3)
        ax.plot([p99, p99], [place - 0.25, place + 0.25], color=GRAY, lw=2)
        ax.text(middle, place - 0.28, f"{middle:.3g}", ha="center", va="bottom", size=8.5)
        ax.text(p99, place - 0.28, f"{p99:.3g}", ha="center", va="bottom", size=8.5, color=GRAY)
    ax.set_yticks(range(len(chosen)), [row["engine"] for row in chosen])
    ax.set(ylim=(len(chosen) - 0.5, -0.9), xscale="log", xlabel="ms per call (log scale)")
    smallest, largest = min(r["p50"][0] for r in chosen), max(r["p99"][1] for r in chosen)
    low, high = smallest / 1.4, largest * 1.4
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [first * 10.0**power for power in decades for first in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]  # Matplotlib's own labels overlap
    ax.set_xticks(shown, [f"{tick:g}" for tick in shown])
    ax.minorticks_off()
    ax.set_xlim(low, high)
    ax.set_title(f"{model}, batch {batch}:  dot p50,  gray line p99", loc="left", size=10)


def targets_tree() -> None:
    """Show the decision tree: from where the model has to run to the format for it."""
    decision_tree(read_tree(TARGETS))
