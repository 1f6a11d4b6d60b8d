"""Every chapter, drawn: the palette, the look of all figures, and boxes, arrows and frames."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

# Okabe-Ito, distinct for colour-blind readers; GREEN is darker, to be legible as text.
BLUE, ORANGE, GREEN, PINK, YELLOW = "#0072B2", "#D55E00", "#00795A", "#CC79A7", "#E69F00"
PALE, PEACH, MINT, CREAM = "#D3E5F2", "#F8DCC4", "#CDE8DF", "#FBF3EA"  # behind black text
GRAY, EDGE = "#666666", "#444444"

# What memory is for has the same color in all chapters.
PURPOSES = {
    "parameters": BLUE,
    "buffers": PINK,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": YELLOW,
    "other": "#BBBBBB",
}

STYLE = {
    "figure.figsize": (6.4, 3.2),
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(
        color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
    ),
    "svg.hashsalt": "book",  # the same figure gives the same bytes
}


def box(
    ax: Axes,
    at: tuple[float, float],
    text: object = "",
    face: object = "white",
    *,
    size: tuple[float, float] = (1.0, 1.0),
    edge: str = EDGE,
    color: str = "black",
    fontsize: float = 10,
    rounded: float = 0.0,
    dashed: bool = False,
    zorder: float = 2,
) -> None:
    """Draw a box of `size` with its centre `at`, `text` in the middle; `rounded`: the radius."""
    (x, y), (width, height) = at, size
    corner = (x - width / 2, y - height / 2)
    style = {"fc": face, "ec": edge, "lw": 0.8, "ls": "--" if dashed else "-", "zorder": zorder}
    if rounded:
        shape = f"round,pad=0,rounding_size={rounded}"
        ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, **style))
    else:
        ax.add_patch(Rectangle(corner, width, height, **style))
    centre = {"ha": "center", "va": "center_baseline" if "\n" not in str(text) else "center"}
    ax.text(x, y, text, color=color, size=fontsize, zorder=zorder + 0.1, **centre)


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = EDGE,
    *,
    bend: float = 0.0,
) -> None:
    """Draw an arrow from `start` to `end`, its tip exactly there; `bend`: curvature, ± to sides."""
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": color, "shrinkA": 0, "shrinkB": 0}
    style["connectionstyle"] = f"arc3,rad={bend}"
    ax.annotate("", end, start, arrowprops=style)


def frame(ax: Axes, x: tuple[float, float], y: tuple[float, float], *, equal: bool = True) -> None:
    """Show the part x by y of the plane, without axes; `equal`: a unit is as long both ways."""
    ax.axis("off")
    ax.set(xlim=x, ylim=y, aspect="equal" if equal else "auto")
