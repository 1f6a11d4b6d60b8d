"""Chapter 20, drawn: a throw while it is being fitted, and what searches spend."""

from collections.abc import Mapping

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


def draw_scaling(ax: Axes, counts: Mapping[str, Mapping[int, float]]) -> None:
    """Draw for each method how many simulator calls it takes by the number of unknowns, both log.

    counts: method -> {unknowns: calls}; a count that is missing is left out.
    """
    ticks = sorted({unknowns for calls in counts.values() for unknowns in calls})
    for name, calls in counts.items():
        ax.plot(list(calls), list(calls.values()), "o-", ms=4, label=name)
    ax.set(xscale="log", yscale="log", xlabel="unknowns", ylabel="simulator calls")
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=9)


def draw_estimates(ax: Axes, estimates: Tensor, truth: Tensor) -> None:
    """Draw many estimates [n, 2] of g and k as dots and the truth [2] as a cross."""
    ax.plot(*estimates.T.tolist(), ".", color=BLUE, ms=3)
    ax.plot(*truth.tolist(), "+", color=ORANGE, ms=16, mew=2.5)
    ax.set(xlabel="g [m/s²]", ylabel="k [1/m]")
