"""Chapter 04, drawn: where a model's numbers are, a convolution's windows, a signal's way."""

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import nn

from helpers.layers import conv_size
from helpers.pictures.draw import BLUE, GREEN, ORANGE, PALE, frame


def draw_parts(ax: Axes, parts: Sequence[tuple[str, Sequence[int], int, int]]) -> None:
    """Draw one row for each part of a model: label, output shape, parameters, activations."""
    columns = [(7.9, BLUE, "parameters"), (11.2, ORANGE, "numbers returned")]
    for column, (left, color, title) in enumerate(columns):
        counts = [part[2 + column] for part in parts]
        ax.text(left, 0.9, title, color=color)
        for row, count in enumerate(counts):
            length = 1.8 * count / max(counts)
            ax.barh(-row, length, 0.72, left, color=color)
            ax.text(left + length + 0.1, -row, f"{count:,}", va="center", size=9)

    ax.text(0, 0.9, "part")
    ax.text(7.6, 0.9, "output", ha="right")
    for row, (label, shape, *_) in enumerate(parts):
        ax.text(0, -row, label, va="center")
        ax.text(7.6, -row, " × ".join(str(n) for n in shape), va="center", ha="right")
    frame(ax, (0, 14.6), (0.6 - len(parts), 1.5), equal=False)


def draw_conv(ax: Axes, kernel: int, stride: int, padding: int, size: int = 7) -> None:
    """Draw a square input with its padding, the windows of a kernel, and the output.

    The number of outputs comes from a real nn.Conv2d; the formula is written below it.
    """
    conv = nn.Conv2d(1, 1, kernel, stride, padding, device="meta")
    out = conv(torch.empty(1, 1, size, size, device="meta")).shape[-1]
    total = size + 2 * padding
    unread = {*range(total)} - {place * stride + i for place in range(out) for i in range(kernel)}
    _rectangle(ax, (0, 0), total, total, PALE, ls="--")
    _rectangle(ax, (padding, padding), size, size, "white")
    for line in unread:  # rows and columns that no window reads
        _rectangle(ax, (line, 0), 1, total, "#CCCCCC", lw=0)
        _rectangle(ax, (0, line), total, 1, "#CCCCCC", lw=0)
    _grid(ax, (0, 0), total)
    for place, color in [(1, BLUE), (0, ORANGE)]:
        if place < out:
            _rectangle(ax, (place * stride, 0), kernel, kernel, "none", ec=color, lw=2.5)
    left = 13.5
    _rectangle(ax, (left, 0), out, out, "white")
    for place, color in [(1, BLUE), (0, ORANGE)]:
        if place < out:
            _rectangle(ax, (left + place, 0), 1, 1, color)
    _grid(ax, (left, 0), out)
    ax.text(0, -0.5, f"input {size}, padded {total}")
    ax.text(left, -0.5, f"output {out}")
    line = f"⌊({size} + 2·{padding} − {kernel}) / {stride}⌋ + 1 = "
    ax.text(0, 12.2, f"{line}{conv_size(size, kernel, stride, padding)}", size=12)
    ax.text(left, 12.2, f"rows and columns not read: {len(unread)}" if unread else "", size=9)
    frame(ax, (-0.2, 24.2), (12.6, -1.3))


def draw_signal(ax: Axes, forward: Sequence[float], backward: Sequence[float]) -> None:
    """Draw powers of ten: the mean square of activations and of gradients over the layers."""
    there, back = ([_power_of_ten(v) for v in values] for values in (forward, backward))
    for powers, color, name in [(there, BLUE, "activations →"), (back, ORANGE, "← gradients")]:
        shown = [min(max(power, -12.3), 12.3) for power in powers]
        ax.plot(shown, color=color, lw=2, label=name)
    ax.axhspan(-1, 1, color=GREEN, alpha=0.15, lw=0)

    last, first = _as_power(there[-1]), _as_power(back[0])
    ax.set_title(f"last activations {last}, first gradients {first}", size=10)
    ticks = [-12, -6, 0, 6, 12]
    ax.set_yticks(ticks, [_as_power(tick) for tick in ticks])
    ax.set(xlabel="layer", ylabel="mean square", ylim=(-13, 13), xticks=range(0, len(forward), 5))
    ax.legend(frameon=False, loc="upper left", fontsize=8)


def _power_of_ten(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _as_power(power: float) -> str:
    return f"1e{round(power):+d}" if math.isfinite(power) else "0"


def _rectangle(ax: Axes, corner: tuple, width: float, height: float, face: str, **style) -> None:
    style = {"ec": "#444444", "lw": 0.8} | style
    ax.add_patch(Rectangle(corner, width, height, fc=face, **style))


def _grid(ax: Axes, corner: tuple[float, float], n: int) -> None:
    """Draw the lines of n x n cells, as one path: half the bytes of a frame."""
    x, y = corner
    lines = []
    for k in range(n + 1):
        lines += [(x + k, y), (x + k, y + n), (math.nan, 0)]  # nan: lift the pen
        lines += [(x, y + k), (x + n, y + k), (math.nan, 0)]
    xs, ys = zip(*lines, strict=True)
    ax.plot(xs, ys, color="#999999", lw=0.5)
