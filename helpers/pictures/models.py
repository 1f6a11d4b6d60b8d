"""Chapter 04, drawn: where a model's numbers are, a convolution's windows, a signal's way."""

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from helpers.layers import conv_size

BLUE, PALE, ORANGE, PEACH, GREEN, GRAY = "#0072B2 #D3E5F2 #D55E00 #F8DCC4 #009E73 #666666".split()


def draw_model(ax: Axes, model: nn.Sequential, example: Tensor) -> None:
    """Draw one row for each part of `model`: its name, output shape, parameters, activations."""
    x, rows = example, []
    with torch.no_grad():
        for name, part in model.named_children():
            x = part(x)
            words = " ".join(type(m).__name__ for m in part.modules() if not [*m.children()])
            count = sum(p.numel() for p in part.parameters())
            rows.append((f"{name}  {words}", " × ".join(map(str, x.shape[1:])), count, x.numel()))
    for column, (left, color, title) in enumerate(
        [(7.9, BLUE, "parameters"), (11.2, ORANGE, "numbers returned")]
    ):
        largest = max(row[2 + column] for row in rows)
        ax.text(left, 0.9, title, color=color)
        for y, row in enumerate(rows):
            count = row[2 + column]
            ax.barh(-y, 1.8 * count / largest, 0.72, left, color=color)
            ax.text(left + 1.8 * count / largest + 0.1, -y, f"{count:,}", va="center", size=9)
    for y, (label, shape, *_) in enumerate(rows):
        ax.text(0, -y, label, va="center")
        ax.text(7.6, -y, shape, va="center", ha="right")
    ax.text(0, 0.9, "part")
    ax.text(7.6, 0.9, "output", ha="right")
    ax.axis("off")
    ax.set(xlim=(0, 14.6), ylim=(0.6 - len(rows), 1.5))


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
    ax.axis("off")
    ax.set(xlim=(-0.2, 24.2), ylim=(12.6, -1.3), aspect="equal")


def draw_signal(ax: Axes, forward: Sequence[float], backward: Sequence[float]) -> None:
    """Draw powers of ten: the mean square of activations and of gradients over the layers."""
    powers = [[math.log10(v) if v > 0 else -math.inf for v in vs] for vs in (forward, backward)]
    for values, color, name in [
        (powers[0], BLUE, "activations →"),
        (powers[1], ORANGE, "← gradients"),
    ]:
        shown = [min(max(v, -12.3), 12.3) for v in values]
        ax.plot(shown, color=color, lw=2, label=name)
    ax.axhspan(-1, 1, color=GREEN, alpha=0.15, lw=0)
    ends = (f"1e{round(v):+d}" if math.isfinite(v) else "0" for v in (powers[0][-1], powers[1][0]))
    ax.set_title("last activations {}, first gradients {}".format(*ends), size=10)
    ticks = [-12, -6, 0, 6, 12]
    ax.set_yticks(ticks, [f"1e{tick:+d}" for tick in ticks])
    ax.set(xlabel="layer", ylabel="mean square", ylim=(-13, 13), xticks=range(0, len(forward), 5))
    ax.legend(frameon=False, loc="upper left", fontsize=8)


def _rectangle(ax: Axes, corner: tuple, width: float, height: float, face: str, **style) -> None:
    style = {"ec": "#444444", "lw": 0.8} | style
    ax.add_patch(Rectangle(corner, width, height, fc=face, **style))


def _grid(ax: Axes, corner: tuple[float, float], n: int) -> None:
    (x, y), path = corner, []
    for k in range(n + 1):  # one path for all lines: half the bytes of a frame
        path += [
            (x + k, y),
            (x + k, y + n),
            (math.nan, 0),
            (x, y + k),
            (x + n, y + k),
            (math.nan, 0),
        ]
    ax.plot(*zip(*path, strict=True), color="#999999", lw=0.5)
