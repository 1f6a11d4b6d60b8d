"""Chapter 20, drawn: bounces, images and paths while they are being fitted, temperatures."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Circle
from torch import Tensor

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PEACH


def draw_ends(
    ax: Axes,
    heights: Sequence[float],
    ends: Sequence[float],
    marked: Sequence[float],
    marked_ends: Sequence[float],
) -> None:
    """Draw where a ball ends over the height it falls from, the right line 1 - h, and some dots."""
    ax.plot(heights, [1 - height for height in heights], color=GRAY, lw=3.5, label="right: 1 − h")
    ax.plot(heights, ends, color=BLUE, label="program")
    ax.plot(marked, marked_ends, "o", color=ORANGE)
    ax.set(xlabel="height h [m]", ylabel="height at the end [m]")
    ax.legend(frameon=False)


def draw_temperatures(ax: Axes, truth: Tensor, found: Tensor, title: str) -> None:
    """Draw two temperatures [cells] along a rod."""
    ax.step(range(len(truth)), truth.tolist(), where="mid", color=GRAY, label="truth")
    ax.plot(range(len(found)), found.tolist(), color=BLUE, label="recovered")
    ax.set(ylim=(-1, 2), xlabel="cell", ylabel="temperature at the start")
    ax.set_title(title, size=10)
    ax.legend(frameon=False, loc="upper right")


def draw_swings(ax: Axes, seconds: Tensor, curves: Mapping[str, Tensor], title: str) -> None:
    """Draw angles over time [n], the first of `curves` gray and wide, as the truth."""
    colors = (GRAY, ORANGE, BLUE)
    for (name, angles), color in zip(curves.items(), colors, strict=False):
        width = 3.5 if color == GRAY else 1.5
        ax.plot(seconds.tolist(), angles.tolist(), color=color, lw=width, label=name)
    ax.set(xlabel="time [s]", ylabel="angle [rad]")
    ax.set_title(title, size=10)
    ax.legend(frameon=False, loc="upper right")


def draw_images(ax: Axes, seen: Tensor, rendered: Tensor, title: str) -> None:
    """Draw two images [3, size, size] side by side: measured, rendered."""
    size = seen.shape[-1]
    for at, image, name in ((0, seen, "photo"), (size + 3, rendered, "rendered")):
        pixels = image.clamp(0, 1).permute(1, 2, 0).numpy()
        ax.imshow(pixels, extent=(at, at + size, size, 0), interpolation="nearest")
        ax.text(at + size / 2, size + 1, name, ha="center", va="top")
    ax.set(xlim=(-1, 2 * size + 4), ylim=(size + 4, -1), aspect="equal")
    ax.axis("off")
    ax.set_title(title, size=10)


def draw_path(ax: Axes, points: Tensor, centers: Tensor, radii: Tensor, title: str) -> None:
    """Draw a path [n, 2] with its points among disks."""
    for center, radius in zip(centers.tolist(), radii.tolist(), strict=True):
        ax.add_patch(Circle(center, radius, fc=PEACH, ec=ORANGE))
    ax.plot(*points.T.tolist(), "o-", color=BLUE, ms=3)
    ax.plot(*points[[0, -1]].T.tolist(), "s", color=GREEN, ms=7)
    ax.set(xlim=(-0.05, 1.05), ylim=(0.05, 0.95), aspect="equal")
    ax.set_title(title, size=10)
