"""Chapter 10, drawn: how formats divide their bits, gradients against fp16's range, memory."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PEACH, PURPOSES, YELLOW, box, frame
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
        lowest, normal = (
            _power(number_format.smallest_subnormal),
            _power(number_format.smallest_normal),
        )
        highest = _power(number_format.max)
        ax.barh(row, highest - normal, left=normal, height=0.5, color=BLUE)
        ax.barh(row, normal - lowest, left=lowest, height=0.5, color=PEACH)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(0, color=GRAY, lw=0.8)
    ticks = [-149, -126, -14, 0, 16, 128]
    ax.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks], size=9)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def draw_fate(ax: Axes, counts: dict[int, float], power: int) -> None:
    """Draw numbers times 2**power over the zones of fp16.

    counts: the share of the numbers in [2**k, 2**(k + 1)), for each k (`powers_of_two`).
    """
    fp16 = FORMATS["fp16"]
    lost, normal = _power(fp16.smallest_subnormal) - 1, _power(fp16.smallest_normal)
    above = fp16.bias + 1
    left, right = -60, 32
    zones = [
        (left, lost, ORANGE),
        (lost, normal, YELLOW),
        (normal, above, GREEN),
        (above, right, ORANGE),
    ]
    for start, end, color in zones:
        ax.axvspan(start, end, color=color, alpha=0.12, lw=0)
    shares = dict.fromkeys([ORANGE, YELLOW, GREEN], 0.0)
    for k, share in sorted(counts.items()):
        at = k + power
        color = next(color for start, end, color in zones if at < end or end == right)
        shares[color] += share
        ax.bar(at + 0.5, 100 * share, width=0.9, color=color)
    for at in (lost, normal, above):
        ax.axvline(at, color=GRAY, lw=0.8)
    ticks = [left, -45, lost, normal, 0, above, right]
    ax.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
    ax.set_ylabel("%")
    ax.set(xlim=(left, right), ylim=(0, 16))
    lost_here = sum(s for k, s in counts.items() if k + power < lost)
    high = sum(s for k, s in counts.items() if k + power >= above)
    parts = [f"= 0: {lost_here:.1%}", f"subnormal: {shares[YELLOW]:.1%}", f"inf: {high:.1%}"]
    ax.set_title(f"scale $2^{{{power}}}$     " + "     ".join(parts), size=10)


def draw_step_memory(
    ax: Axes,
    batches: Sequence[int],
    parts: dict[str, dict[str, Sequence[int]]],
    peaks: dict[str, Sequence[int]],
    batch: int,
) -> None:
    """Draw the bytes of a step for one batch size, a bar for each of two precisions, in megabytes.

    parts: precision -> purpose -> bytes for each of `batches`. peaks: precision -> bytes.
    The axis is the same for all batches, so that what stays the same stays as long.
    """
    at = list(batches).index(batch)
    sums = [sum(sizes) for one in parts.values() for sizes in zip(*one.values(), strict=True)]
    longest = max(*sums, *(size for one in peaks.values() for size in one)) / MEGABYTE
    for row, (name, purposes) in enumerate(parts.items()):
        left = 0.0
        for purpose, values in purposes.items():
            width = values[at] / MEGABYTE
            style = {"color": PURPOSES[purpose], "label": None if row else purpose}
            ax.barh(row, width, left=left, height=0.55, **style)
            left += width
        peak = peaks[name][at] / MEGABYTE
        label = None if row else "peak"
        ax.plot([peak, peak], [row - 0.38, row + 0.38], color="black", lw=2, label=label)
        ax.text(max(left, peak), row, f"  {peak:.1f}", va="center")
    before, after = (values[at] for values in peaks.values())
    ax.set_yticks(range(len(parts)), list(parts))
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.15 * longest), xlabel="MB")
    change = f"{after / before - 1:+.0%}".replace("-", "−")
    ax.set_title(f"batch {batch}:  peak {change}")
    order = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": 5}
    ax.legend(frameon=False, fontsize=9, handlelength=1.0, columnspacing=1.2, **order)


def _power(number: float) -> int:
    """The power of two that is nearest to `number`."""
    return round(float(np.log2(number)))
