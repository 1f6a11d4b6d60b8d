"""Chapter 18, drawn: a pause, latency rising with the rate, and what servers held."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PINK, YELLOW


def draw_pause(ax: Axes, gap: float, waiting: Sequence[float], timetable: Sequence[float]) -> None:
    """Draw the latencies of both clients in seconds; request n was to be sent at n × `gap`."""
    scheduled = [gap * number for number in range(len(waiting))]
    ax.plot(scheduled, timetable, color=ORANGE, marker=".", ms=4, lw=0.8, label="timetable")
    ax.plot(scheduled, waiting, color=BLUE, marker=".", ms=4, lw=0.8, label="waiting client")
    ax.set_xlabel("time at which the request was to be sent, s")
    ax.set_ylabel("latency, s")
    ax.legend(frameon=False)


def draw_rise(
    ax: Axes, latencies: Mapping[str, Sequence[tuple[float, float]]], limit: float
) -> None:
    """Draw latencies in ms against the rate, a line for each percentile, up to the limit.

    latencies: name -> (requests/s, ms). limit: requests/s, a dashed line.
    """
    for (name, points), color in zip(latencies.items(), cycle((BLUE, ORANGE, GREEN))):
        rates, ms = zip(*sorted(points), strict=True)
        ax.plot(rates, ms, marker="o", ms=4, color=color, label=name)
    ax.axvline(limit, color=GRAY, lw=0.8, ls="--")
    ax.set_title(f"limit: {limit:.0f} requests/s", fontsize=10, color=GRAY)
    ax.set_xlim(0, 1.05 * limit)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("requests/s")
    ax.set_ylabel("ms")
    ax.legend(frameon=False, loc="upper left")


def draw_rates(
    ax: Axes, measured: Mapping[str, Sequence[tuple[float, float]]], limit: float
) -> None:
    """Draw p99 in ms against the rate of arrival, a line for each server, and the limit."""
    colors = (GRAY, BLUE, ORANGE, GREEN, YELLOW, PINK, "#56B4E9", "black")
    for (name, points), color, marker in zip(measured.items(), cycle(colors), cycle("os^vD")):
        rates, p99 = zip(*sorted(points), strict=True)
        ax.plot(rates, p99, marker=marker, ms=4, color=color, label=name)
    ax.axhline(limit, color=GRAY, lw=0.8, ls="--")
    ax.set_yscale("log")
    ax.set_xlabel("requests/s")
    ax.set_ylabel("p99, ms")
    ax.legend(frameon=False, fontsize=8)
