"""Chapter 19, drawn: who writes which part of training, two distributions and the gap between."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE

PARTS = (
    "model and loss",
    "order of the loop",
    "zero_grad, backward, step",
    "device of the batch",
    "precision",
    "accumulation",
    "clipping",
    "several processes",
    "checkpoints",
    "logging",
)
YOU, ARGUMENT, LIBRARY = "you write it", "you call or name it", "it is done for you"
OWNERS: Mapping[str, Sequence[str]] = {
    "bare": (YOU,) * 10,
    "Fabric": (YOU, YOU, YOU, LIBRARY, ARGUMENT, YOU, ARGUMENT, ARGUMENT, ARGUMENT, ARGUMENT),
    "Accelerate": (
        (YOU, YOU, YOU, LIBRARY, ARGUMENT, ARGUMENT, ARGUMENT, ARGUMENT, ARGUMENT, ARGUMENT)
    ),
    "DeepSpeed": (
        YOU,
        YOU,
        LIBRARY,
        YOU,
        ARGUMENT,
        ARGUMENT,
        ARGUMENT,
        ARGUMENT,
        ARGUMENT,
        ARGUMENT,
    ),
    "Trainer (chapter 6)": (
        (YOU, LIBRARY, LIBRARY, LIBRARY, ARGUMENT, ARGUMENT, ARGUMENT, YOU, ARGUMENT, ARGUMENT)
    ),
    "Lightning": (
        (YOU, LIBRARY, LIBRARY, LIBRARY, ARGUMENT, ARGUMENT, ARGUMENT, ARGUMENT, LIBRARY, ARGUMENT)
    ),
}
COLORS = {YOU: GRAY, ARGUMENT: ORANGE, LIBRARY: BLUE}


def draw_owners(ax: Axes, library: str) -> None:
    """Draw the parts of a training program and who is responsible for each."""
    for row, (part, owner) in enumerate(zip(PARTS, OWNERS[library], strict=True)):
        ax.barh(row, 1, height=0.8, color=COLORS[owner])
        ax.text(0.5, row, owner, ha="center", va="center", color="white", fontsize=9)
        ax.text(-0.03, row, part, ha="right", va="center", fontsize=9)
    ax.set_xlim(-1, 1)
    ax.invert_yaxis()
    ax.set_axis_off()
    ax.set_title(library, fontsize=11, loc="right")


def draw_gap(ax: Axes, reference: Tensor, window: Tensor, *, label: str) -> None:
    """Draw two cumulative distributions and mark where they are farthest apart."""
    values = torch.cat([reference, window]).double().sort().values
    lines = []
    for sample, color, name in ((reference, BLUE, "reference"), (window, ORANGE, "window")):
        below = torch.searchsorted(sample.double().sort().values, values, right=True) / len(sample)
        ax.step(values, below, where="post", color=color, label=name)
        lines.append(below)
    gaps = (lines[0] - lines[1]).abs()
    at = int(gaps.argmax())
    ax.vlines(values[at], lines[0][at], lines[1][at], color=GREEN, lw=3)
    ax.set_title(f"{label}: largest gap {gaps[at]:.2f}", fontsize=10)
    ax.set_ylabel("share at or below")
    ax.legend(frameon=False, loc="lower right")
