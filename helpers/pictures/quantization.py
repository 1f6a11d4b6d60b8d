"""Chapter 16, drawn: a weight's histogram on its grid."""

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from helpers.pictures.draw import ORANGE, PALE
from helpers.quantization import grid_of, relative_error

BINS = 60


def draw_grid(ax: Axes, weight: Tensor, bits: int, outlier: float) -> None:
    """Draw the weights [out, in] but the first row, and the numbers of one grid for all of them.

    outlier: what the first row is multiplied by before the grid is chosen. The title has the
    relative error of the other rows, with one scale for all rows and with a scale for each row.
    """
    stretched = weight.clone()
    stretched[0] *= outlier
    rest = stretched[1:]
    shared = grid_of(stretched, bits)
    own = grid_of(stretched, bits, channel=0)

    edge = rest.abs().max().item()
    counts, edges = np.histogram(rest.flatten().numpy(), bins=BINS, range=(-edge, edge))
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=PALE, edgecolor="white", lw=0.3)

    numbers = torch.arange(shared.low, shared.high + 1) * shared.scale
    seen = numbers[numbers.abs() <= 1.02 * edge]
    ax.vlines(seen.tolist(), 0, counts.max(), color=ORANGE, lw=1.0)
    ax.set(xlim=(-1.05 * edge, 1.05 * edge), yticks=[], xlabel="weight")
    ax.spines["left"].set_visible(False)

    error_shared = relative_error(rest, shared.round_trip(stretched)[1:])
    error_own = relative_error(rest, own.round_trip(stretched)[1:])
    title = f"error: one scale {error_shared:.0%}   a scale per row {error_own:.1%}"
    ax.set_title(title, size=10)
