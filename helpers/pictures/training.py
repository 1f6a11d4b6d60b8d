"""Chapter 06, drawn: the five steps, optimizers on a valley, learning rates, clipping."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle
from torch import Tensor

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PALE

CODE = {
    "forward": "z = model(x)",
    "loss": "loss = loss_fn(z, y)",
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
}


def draw_five_steps(ax: Axes, seen: Mapping[str, Mapping[str, str]], after: str) -> None:
    """Draw what is in memory once one of the five steps is done; what it changed stands out.

    seen: "start", then each of the five steps -> what there is, by name: five short texts.
    """
    stages = list(seen)
    now = stages.index(after)
    before = seen[stages[max(now - 1, 0)]]

    for row, (step, code) in enumerate(CODE.items()):
        face, color = "white", "black"
        if step == after:
            face, color = BLUE, "white"
        elif row < now:
            face = PALE
        ax.add_patch(Rectangle((0, -row), 4.7, 0.8, fc=face, ec=GRAY, lw=0.8))
        _line(ax, row, 0.15, f"{row + 1} {code}", color)

    for row, (name, value) in enumerate(seen[after].items()):
        _line(ax, row, 5.1, name, GRAY)
        _line(ax, row, 7.0, value, "black" if value == before[name] else ORANGE)

    ax.set(xlim=(-0.1, 10.6), ylim=(-4.1, 1))
    ax.axis("off")


def _line(ax: Axes, row: int, left: float, text: str, color: str) -> None:
    ax.text(left, 0.4 - row, text, color=color, va="center", family="monospace")


def draw_descent(ax: Axes, valley: Callable[[Tensor], Tensor], path: Tensor) -> None:
    """Draw a path [T, 2] over the contours of `valley`, lowest at (1, 1); say where it ends."""
    grid = torch.meshgrid(
        torch.linspace(-1.8, 1.8, 43), torch.linspace(-0.9, 2.3, 39), indexing="xy"
    )
    heights = valley(torch.stack(grid, -1))
    ax.contour(*grid, heights, levels=[0.5, 5, 20], colors=GRAY, linewidths=0.5, alpha=0.6)

    shown = path.clamp(-3, 3)  # what has left the picture stays near it
    ax.plot(shown[:, 0], shown[:, 1], color=BLUE, lw=1.2)
    ax.plot(shown[::6, 0], shown[::6, 1], ".", color=BLUE, ms=5)
    ax.plot(*shown[0], "o", color="black", ms=5)
    ax.plot(1, 1, "*", color=GREEN, ms=12)
    ax.plot(*shown[-1], "o", color=ORANGE, ms=7)

    end = valley(path[-1]).item()
    if end < 1e3:
        title = f"loss {end:.0e}"
    else:
        title = f"lost after {len(path) - 1} steps"
    ax.set_title(title, size=10)
    ax.set(xlim=(-1.8, 1.8), ylim=(-0.9, 2.3), xticks=[], yticks=[])


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    dashed: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str,
) -> None:
    """Show six panels of named lines; `dashed` ones lie behind, each with an axis of its own.

    A panel with "log" in its title has a logarithmic axis. x, y: what the axes show.
    """
    figure, axes = plt.subplots(2, 3, figsize=(7.6, 3.7))
    for ax, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for name, values in lines.items():
            ax.plot(values, label=name)
        ax.set_title(title, size=10)
        if "log" in title:
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        if title in dashed:
            behind = ax.twinx()
            behind.plot(dashed[title], color=GRAY, lw=1, ls="--")
            behind.set(yticks=[], ylim=(0, 1.5 * dashed[title][0]))

    if len(axes[0, 0].lines) > 1:
        axes[0, 0].legend(frameon=False)
    figure.supxlabel(x, size=10)
    figure.supylabel(y, size=10)
    plt.show()


def draw_clip(ax: Axes, gradient: Tensor, by_value: Tensor, by_norm: Tensor) -> None:
    """Draw a gradient [2] and what clipping to values of 1 and to norm 1 makes of it."""
    for name, g, color in [
        ("gradient", gradient, GRAY),
        ("by value", by_value, ORANGE),
        ("by norm", by_norm, BLUE),
    ]:
        style = {"arrowstyle": "-|>", "color": color, "lw": 2}
        ax.annotate("", g.tolist(), (0, 0), arrowprops=style)
        ax.plot([], [], color=color, label=name)
    ax.add_patch(Circle((0, 0), 1, fc="none", ec=BLUE, ls="--"))
    ax.add_patch(Rectangle((-1, -1), 2, 2, fc="none", ec=ORANGE, ls="--"))

    turned = torch.rad2deg(_angle(by_value) - _angle(gradient)).abs().item()
    title = f"by value: turned {turned:.0f}°, length {by_value.norm():.1f}"
    ax.set_title(title, color=ORANGE, size=10)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set(xlim=(-1.2, 2.7), ylim=(-1.2, 2.7), aspect="equal", xticks=[], yticks=[])


def _angle(g: Tensor) -> Tensor:
    return torch.atan2(g[1], g[0])
