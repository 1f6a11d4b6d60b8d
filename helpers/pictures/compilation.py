"""Chapter 12, drawn: the pipeline of torch.compile, a graph on its way, when a compile has paid."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

BLUE, PALE, ORANGE, PEACH, GREEN, MINT, GRAY, CREAM = (
    "#0072B2 #D3E5F2 #D55E00 #F8DCC4 #00795A #CDE8DF #666666 #FBF3EA".split()
)
ROWS = 7  # boxes below each other
STEPS = [
    ("your Python", "bytecode of\none function", "white"),
    ("Dynamo", "FX graph\n+ guards", PALE),
    ("AOTAutograd", "forward and\nbackward graph", MINT),
    ("Inductor", "fused kernels:\nC++ or Triton", PEACH),
]


def draw_pipeline(ax: Axes) -> None:
    """Draw what the first call goes through, and what decides on each later one."""
    for i, (name, product, color) in enumerate(STEPS):
        _box(ax, (2.75 * i, 2.2), f"{name}\n\n{product}", color, size=(2.1, 1.9))
        if i:
            _arrow(ax, (2.75 * i - 1.65, 2.2), (2.75 * i - 1.1, 2.2), "#444444")
    for x, text in [
        (0, "every later call"),
        (2.75, "do the guards\nhold?"),
        (8.25, "compiled code"),
    ]:
        _box(ax, (x, -0.6), text, "white", size=(2.1, 0.9))
    _arrow(ax, (1.1, -0.6), (1.65, -0.6), "#444444")
    _arrow(ax, (3.85, -0.6), (7.15, -0.6), GREEN)
    ax.text(5.5, -0.5, "yes: no Python in between", color=GREEN, ha="center", va="bottom")
    _arrow(ax, (2.75, -0.1), (2.75, 1.2), ORANGE)
    ax.text(2.9, 0.55, "no: compile again, for this case, too", color=ORANGE, va="center")
    _arrow(ax, (8.25, 1.2), (8.25, -0.1), "#444444")
    bend = {"arrowstyle": "-|>", "mutation_scale": 9, "color": GRAY}
    bend |= {"connectionstyle": "arc3,rad=0.35", "shrinkA": 2, "shrinkB": 2}
    ax.annotate("", (0, 3.2), (2.75, 3.2), arrowprops=bend)
    ax.text(1.4, 3.85, "graph break: Python runs this line", color=GRAY, ha="left", va="bottom")
    _frame(ax, (-1.2, 9.5), (-1.2, 4.3))


def draw_stage(ax: Axes, columns: Mapping[str, Sequence[Sequence[str]]], stage: str) -> None:
    """Draw one stage: its lists of operations side by side, forward first, each from the top.

    columns: stage -> one list of names, or two: those of forward and those of backward.
    """
    lists = columns[stage]
    titles = ["forward", "backward"] if len(lists) == 2 else ["", ""]
    whole = len(lists) == 1
    if whole and len(lists[0]) > ROWS:  # one graph, shown in two columns
        lists = [lists[0][: len(lists[0]) // 2], lists[0][len(lists[0]) // 2 :]]
    for i, (names, title) in enumerate(zip(lists, titles, strict=False)):
        x = 3.2 * i + (0 if len(lists) == 2 else 1.6)
        ax.text(x, 0.95, title, ha="center", color=(BLUE, ORANGE)[i], size=11)
        y = 0.0
        for k, name in enumerate(names):
            lines = textwrap.wrap(name.replace("_", "_ "), 24) if len(name) > 24 else [name]
            height = 0.44 * max(len(lines), 1) + 0.22
            color = PEACH if "fused" in name else MINT if whole else (PALE, CREAM)[i]
            text = "\n".join(line.replace("_ ", "_") for line in lines)
            _box(ax, (x, y - height / 2), text, color, size=(2.8, height), fontsize=9)
            if k:
                _arrow(ax, (x, y + 0.22), (x, y), "#444444")
            y -= height + 0.22
    _frame(ax, (-1.6, 4.8), (-6.2, 1.4))


def draw_total(ax: Axes, rows: Sequence[Mapping[str, Any]], calls: int) -> None:
    """Draw total time compiled ÷ eager after `calls` calls, with empty and with full caches.

    rows: of the record, each with workload, cold and warm in s, eager and compiled in ms.
    """
    for i, row in enumerate(rows):
        eager, compiled = (row[name][1] / 1e3 for name in ("eager", "compiled"))
        steady = compiled / eager
        for start, shift, strong in [("cold", 0.18, True), ("warm", -0.18, False)]:
            ratio = (row[start] + calls * compiled) / (calls * eager)
            color = BLUE if ratio < 1 else ORANGE
            ax.barh(-i + shift, ratio - 1, 0.32, left=1, color=color, alpha=1.0 if strong else 0.45)
            text = f"{ratio:,.0f}×" if ratio >= 10 else f"{ratio:.2f}×"
            ax.text(max(ratio, 1) * 1.15, -i + shift, text, va="center", size=9, color=color)
        ax.plot([steady] * 2, [-i - 0.42, -i + 0.42], color="black", lw=1.5)
    ax.axvline(1, color=GRAY, lw=0.8)
    ax.set(xscale="log", xlim=(0.1, 1e8), yticks=[-i for i in range(len(rows))])
    ax.set_yticklabels([row["workload"] for row in rows])
    ax.set_xlabel("total time, compiled ÷ eager (1 = it has paid)")
    ax.set_title(f"after {calls:,} calls", loc="left", size=11)


def _box(
    ax: Axes, at: tuple, text: str, face: str, size: tuple[float, float], fontsize: float = 10
) -> None:
    (x, y), (width, height) = at, size
    style = {"fc": face, "ec": "#444444", "lw": 0.8, "boxstyle": "round,pad=0,rounding_size=0.1"}
    ax.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, **style))
    ax.text(x, y, text, ha="center", va="center", size=fontsize, linespacing=1.15)


def _arrow(ax: Axes, start: tuple, end: tuple, color: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": color, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style)


def _frame(ax: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.axis("off")
    ax.set(xlim=x, ylim=y)
