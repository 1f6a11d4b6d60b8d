"""Chapter 12, drawn: a graph on its way, and when a compilation has paid for itself."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

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

ROWS = 7  # boxes below each other
LETTERS = 24  # in a line of a box
GAP = 0.22  # between two boxes


def draw_stage(ax: Axes, columns: Mapping[str, Sequence[Sequence[str]]], stage: str) -> None:
    """Draw one stage: its lists of operations side by side, forward first, each from the top.

    columns: stage -> one list of names, or two: those of forward and those of backward.
    """
    lists = columns[stage]
    if len(lists) == 2:
        _column(ax, 0.0, "forward", lists[0], PALE)
        _column(ax, 3.2, "backward", lists[1], CREAM)
    elif len(lists[0]) > ROWS:  # one graph, shown in two columns
        half = len(lists[0]) // 2
        _column(ax, 0.0, "", lists[0][:half], MINT)
        _column(ax, 3.2, "", lists[0][half:], MINT)
    else:
        _column(ax, 1.6, "", lists[0], MINT)
    frame(ax, (-1.6, 4.8), (-6.2, 1.4), equal=False)


def _column(ax: Axes, x: float, title: str, names: Sequence[str], face: str) -> None:
    """Boxes below each other, with arrows between them; fused kernels stand out."""
    ax.text(x, 0.95, title, ha="center", color=BLUE if title == "forward" else ORANGE, size=11)
    top = 0.0
    for number, name in enumerate(names):
        lines = _wrapped(name)
        height = 0.44 * len(lines) + GAP
        if number:
            arrow(ax, (x, top + GAP), (x, top))
        style = {"size": (2.8, height), "fontsize": 9, "rounded": 0.1}
        box(
            ax, (x, top - height / 2), "\n".join(lines), PEACH if "fused" in name else face, **style
        )
        top -= height + GAP


def _wrapped(name: str) -> list[str]:
    """The name in lines of at most `LETTERS`, broken after an underscore."""
    if len(name) <= LETTERS:
        return [name]
    return [line.replace("_ ", "_") for line in textwrap.wrap(name.replace("_", "_ "), LETTERS)]


def draw_total(ax: Axes, rows: Sequence[Mapping[str, Any]], calls: int) -> None:
    """Draw total time compiled ÷ eager after `calls` calls, with empty and with full caches.

    rows: of the record, each with workload, cold and warm in s, eager and compiled in ms.
    """
    for i, row in enumerate(rows):
        eager, compiled = row["eager"][1] / 1e3, row["compiled"][1] / 1e3
        steady = compiled / eager
        for start, shift, alpha in [("cold", 0.18, 1.0), ("warm", -0.18, 0.45)]:
            ratio = (row[start] + calls * compiled) / (calls * eager)
            color = BLUE if ratio < 1 else ORANGE
            ax.barh(-i + shift, ratio - 1, 0.32, left=1, color=color, alpha=alpha)
            text = f"{ratio:,.0f}×" if ratio >= 10 else f"{ratio:.2f}×"
            ax.text(max(ratio, 1) * 1.15, -i + shift, text, va="center", size=9, color=color)
        ax.plot([steady] * 2, [-i - 0.42, -i + 0.42], color="black", lw=1.5)
    ax.axvline(1, color=GRAY, lw=0.8)
    ax.set(xscale="log", xlim=(0.1, 1e8), yticks=[-i for i in range(len(rows))])
    ax.set_yticklabels([row["workload"] for row in rows])
    ax.set_xlabel("total time, compiled ÷ eager (1 = it has paid)")
    ax.set_title(f"after {calls:,} calls", loc="left", size=11)
