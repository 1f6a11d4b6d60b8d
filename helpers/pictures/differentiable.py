"""Chapter 20, drawn: a throw while it is being fitted, and what searches spend."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from torch import Tensor

from helpers.pictures.draw import BLUE, GRAY, ORANGE


def draw_flight(ax: Axes, seen: Tensor, computed: Tensor, title: str) -> None:
    """Draw measured positions [n, 2] as dots and computed ones [m, 2] as a line, in meters."""
    ax.plot(*computed.T.tolist(), color=BLUE, label="simulator")
    ax.plot(*seen.T.tolist(), "o", color=ORANGE, ms=4, label="measured")
    ax.axhline(0, color=GRAY, lw=0.8)
    ax.set(xlim=(0, 24), ylim=(-2, 24), xlabel="x [m]", ylabel="y [m]")
    ax.set_title(title, size=10)
    ax.legend(frameon=False, loc="upper left")


def draw_budget(
    ax: Axes, histories: Mapping[str, Sequence[tuple[float, float]]], goal: float
) -> None:
    """Draw for each search the best loss so far over the simulator calls spent, both log."""
    for name, history in histories.items():
        ax.step(*zip(*history, strict=True), where="post", label=name)
    ax.axhline(goal, color=GRAY, lw=0.8, ls="--")
    ax.set(xscale="log", yscale="log", xlabel="simulator calls", ylabel="best loss so far")
    ax.legend(frameon=False, fontsize=9)
