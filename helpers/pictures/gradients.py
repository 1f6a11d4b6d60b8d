"""Chapter 08, drawn: gradients layer by layer, a staircase and its surrogate, an attack."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE

COLORS = (BLUE, ORANGE, GREEN)


def draw_sizes(ax: Axes, sizes: Mapping[str, Sequence[float]]) -> None:
    """Draw one line for each network: the size of a gradient at layer 0, 2, … on a log scale."""
    for (name, values), color in zip(sizes.items(), COLORS, strict=False):
        layers = range(0, 2 * len(values), 2)  # every other layer is a linear one
        ax.semilogy(layers, values, "o-", color=color, markersize=4, label=name)
    ax.set(xlabel="layer", ylabel="largest |gradient|", xticks=layers)
    ax.legend(frameon=False)


def draw_staircase(ax: Axes, x: Tensor, lines: Mapping[str, Tensor]) -> None:
    """Draw a quantizer, and the function whose gradient is used in its place."""
    for (name, values), color, style in zip(lines.items(), COLORS, ("-", "--"), strict=False):
        ax.plot(x.numpy(), values.numpy(), style, color=color, linewidth=1.6, label=name)
    ax.set(xlabel="w", ylabel="value")
    ax.legend(frameon=False)


def draw_attack(
    ax: Axes, image: Tensor, attacked: Tensor, before: Tensor, after: Tensor, title: str
) -> None:
    """Draw an image [28, 28], what was added, the sum, and the probabilities of the ten digits.

    before, after: probabilities [10] for the image and for the attacked one.
    """
    ax.axis("off")
    ax.set_title(title, fontsize=11)
    pictures = [(image, "gray", 0, 1), (attacked - image, "RdBu_r", -0.3, 0.3)]
    pictures.append((attacked, "gray", 0, 1))
    before, after = before.numpy(), after.numpy()
    for i, (values, colors, low, high) in enumerate(pictures):
        panel = ax.inset_axes([0.235 * i, 0.1, 0.2, 0.8])
        panel.imshow(values.numpy(), cmap=colors, vmin=low, vmax=high)
        panel.axis("off")
        if i:
            ax.text(0.235 * i - 0.0175, 0.5, "+="[i - 1], ha="center", va="center", size=15)
    bars = ax.inset_axes([0.79, 0.25, 0.21, 0.55])
    places = np.arange(10)
    bars.bar(places - 0.2, before, width=0.4, color=BLUE, label="before")
    bars.bar(places + 0.2, after, width=0.4, color=ORANGE, label="after")
    bars.set(xticks=places, ylim=(0, 1), yticks=[0, 0.5, 1])
    bars.set_xlabel("digit", fontsize=8, color=GRAY)
    bars.set_ylabel("probability", fontsize=8, color=GRAY)
    bars.tick_params(labelsize=8, colors=GRAY)
    place = {"loc": "lower right", "bbox_to_anchor": (1.05, 1.0), "borderpad": 0}
    bars.legend(frameon=False, fontsize=8, ncols=2, handlelength=1.0, columnspacing=1.0, **place)
    ax.set(xlim=(0, 1), ylim=(0, 1))
