"""Chapter 10, drawn: how formats divide their bits, gradients against fp16's range, memory."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from helpers.memory import Breakdown
from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PALE, PURPOSES, YELLOW, box, frame
from helpers.precision import FORMATS

MEGABYTE = 1e6


def draw_layouts(ax: Axes, names: Sequence[str]) -> None:
    """Draw the bits of each format, a row a format: sign, exponent, mantissa."""
    for row, name in enumerate(names):
        number_format = FORMATS[name]
        faces = [ORANGE] + [GREEN] * number_format.exponent + [BLUE] * number_format.mantissa
        for place, face in enumerate(faces):
            box(ax, (place, -1.5 * row), "", face, edge="white")
        ax.text(-0.9, -1.5 * row, number_format.name, ha="right", va="center", size=11)
        counts = f"1 + {number_format.exponent} + {number_format.mantissa}"
        ax.text(len(faces) - 0.2, -1.5 * row, counts, va="center", size=9, color=GRAY)
    frame(ax, (-4.2, 36.5), (-1.5 * len(names) + 0.7, 0.8))


def draw_ranges(ax: Axes, names: Sequence[str]) -> None:
    """Draw the positive numbers of each format on a scale of powers of two."""
    for row, name in enumerate(names):
        number_format = FORMATS[name]
        lowest = _power(number_format.smallest_subnormal)
        normal = _power(number_format.smallest_normal)
        highest = _power(number_format.max)
        ax.barh(row, highest - normal, left=normal, height=0.5, color=BLUE)
        ax.barh(row, normal - lowest, left=lowest, height=0.5, color=PALE)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(0, color=GRAY, lw=0.8)
    ticks = [-149, -126, -14, 0, 16, 128]
    ax.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks], size=9)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def draw_fate(ax: Axes, shares: dict[int, float], power: int) -> None:
    """Draw numbers times 2**power over the zones of fp16.

    shares: the share of the numbers in [2**k, 2**(k + 1)), for each k (`powers_of_two`).
    """
    fp16 = FORMATS["fp16"]
    lost, normal = _power(fp16.smallest_subnormal) - 1, _power(fp16.smallest_normal)
    above = fp16.bias + 1
    left, right = -60, 32
    zones = [
        (left, lost, ORANGE),
        (lost, normal, YELLOW),
        (normal, above, GREEN),
        (above, right, BLUE),
    ]
    for start, end, color in zones:
        ax.axvspan(start, end, color=color, alpha=0.12, lw=0)

    def zone_color(at: int) -> str:
        if at < lost:
            return ORANGE
        if at < normal:
            return YELLOW
        return GREEN if at < above else BLUE

    totals = dict.fromkeys([ORANGE, YELLOW, GREEN, BLUE], 0.0)
    for k, share in sorted(shares.items()):
        color = zone_color(k + power)
        totals[color] += share
        ax.bar(k + power + 0.5, 100 * share, width=0.9, color=color)
    for at in (lost, normal, above):
        ax.axvline(at, color=GRAY, lw=0.8)
    ticks = [left, -45, lost, normal, 0, above, right]
    ax.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
    ax.set_ylabel("%")
    ax.set(xlim=(left, right), ylim=(0, 16))
    parts = [
        f"= 0: {totals[ORANGE]:.1%}",
        f"subnormal: {totals[YELLOW]:.1%}",
        f"inf: {totals[BLUE]:.1%}",
    ]
    ax.set_title(f"scale $2^{{{power}}}$     " + "     ".join(parts), size=10)


STEP_PARTS = ("parameters", "gradients", "optimizer", "activations")


def draw_step_memory(
    ax: Axes, batches: Sequence[int], steps: dict[str, Sequence[Breakdown]], batch: int
) -> None:
    """Draw the bytes of a step for one batch size, a bar for each precision, in megabytes.

    steps: precision -> the bytes of a step for each of `batches`; the title compares the first
    precision with the last. The axis is the same for all batches, so that what stays the same
    stays as long.
    """
    at = list(batches).index(batch)
    every = [step for row in steps.values() for step in row]
    longest = max(max(step.peak, _sum_of_parts(step)) for step in every) / MEGABYTE
    for row, found in enumerate(steps.values()):
        step = found[at]
        left = 0.0
        for part in STEP_PARTS:
            width = getattr(step, part) / MEGABYTE
            label = None if row else part
            ax.barh(row, width, left=left, height=0.55, color=PURPOSES[part], label=label)
            left += width
        peak = step.peak / MEGABYTE
        label = None if row else "peak"
        ax.plot([peak, peak], [row - 0.38, row + 0.38], color="black", lw=2, label=label)
        ax.text(max(left, peak), row, f"  {peak:.1f}", va="center")
    peaks = [found[at].peak for found in steps.values()]
    ax.set_yticks(range(len(steps)), list(steps))
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.15 * longest), xlabel="MB")
    change = f"{peaks[-1] / peaks[0] - 1:+.0%}".replace("-", "−")
    ax.set_title(f"batch {batch}:  peak {change}")
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
        ncols=5,
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        columnspacing=1.2,
    )


def _sum_of_parts(step: Breakdown) -> int:
    return sum(getattr(step, part) for part in STEP_PARTS)


def _power(number: float) -> int:
    """The power of two that is nearest to `number`."""
    return round(float(np.log2(number)))
