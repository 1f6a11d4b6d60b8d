"""Chapter 05, drawn: workers over time, the orders of samplers, augmentations, copies."""

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from helpers import loading
from helpers.pictures.draw import BLUE, GRAY, MINT, ORANGE, PALE, PEACH, box, frame


def draw_workers(ax: Axes, load: float, workers: int, step: float = 1.0, until: float = 16) -> None:
    """Draw loading and steps over time, the waits hatched, and the stall in steady state."""
    spans = loading.simulate_workers([load] * 60, step, workers)
    ax.add_patch(Rectangle((0, 3.6), until, 0.8, fc="white", ec=GRAY, hatch="////", lw=0))
    for span in spans:
        if span.start < until:
            row = 4 if span.lane == loading.MAIN else 3 - span.lane
            blue = matplotlib.colormaps["Blues"](0.25 + 0.15 * (span.batch % 4))
            face = ORANGE if span.kind == "step" else blue
            _block(ax, span, row, face, until=until, least=0.3)

    steps = [span.start for span in spans if span.kind == "step"]
    pace = (steps[59] - steps[19]) / 40  # by step 19 it has settled
    ax.set_title(
        f"a step every {pace:.2f}; it waits for {1 - step / pace:.0%} of the time", size=11
    )
    names = ["main process", *(f"worker {n}" for n in range(workers))]
    _time_axis(ax, names, until)


def draw_samplers(ax: Axes, orders: dict[str, Sequence[int]], classes: Sequence[int]) -> None:
    """Draw the order of indices that each sampler gives, colored by the class of the sample."""
    colors = [PALE, PEACH, MINT]
    for row, (name, order) in enumerate(orders.items()):
        ax.text(-0.8, -1.5 * row, name, ha="right", va="center_baseline", size=8)
        for x, i in enumerate(order):
            box(ax, (x, -1.5 * row), int(i), colors[classes[i]], fontsize=9)
    longest = max(len(order) for order in orders.values())
    frame(ax, (-9.5, longest - 0.4), (-1.5 * len(orders) + 0.7, 0.7), equal=False)


def draw_boxed(ax: Axes, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Draw images [1, H, W] in 0..1, three in a row, each with a box [1, 4] of corners XYXY."""
    rows = -(-len(samples) // 3)
    for n, (image, corners) in enumerate(samples):
        place = [n % 3 / 3, 1 - (n // 3 + 1) / rows, 0.32, 0.96 / rows]
        small = ax.inset_axes(place)
        small.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="none")
        left, top, right, bottom = corners[0].tolist()
        corner = (left - 0.5, top - 0.5)  # imshow puts the middle of a pixel at its index
        edge = {"fc": "none", "ec": ORANGE, "lw": 1.5}
        small.add_patch(Rectangle(corner, right - left, bottom - top, **edge))
        small.set(xticks=[], yticks=[])
    ax.axis("off")


def draw_copies(ax: Axes, way: str) -> None:
    """Draw `simulate_copies` over time: loading takes 0.5, a copy 1, a step 1.5."""
    spans = loading.simulate_copies(way, 0.5, 1.0, 1.5)
    faces = {"load": PALE, "copy": BLUE, "step": ORANGE}
    for span in spans:
        _block(ax, span, 4 - span.lane, faces.get(span.kind))
    ax.set_title(f"batch 3 is done at {spans[-1].end:g}", size=11)
    _time_axis(ax, ["CPU: load, launch", "GPU: copies", "GPU: the step"], 16)
    ax.set(ylim=(1.4, 4.6), xlabel="time")


def _block(
    ax: Axes,
    span: loading.Span,
    row: float,
    face: object,
    *,
    until: float = float("inf"),
    least: float = 0.0,
) -> None:
    """Draw a span in its row, cut at `until`; with its number if wider than `least`."""
    width = min(span.end, until) - span.start
    corner = (span.start, row - 0.4)
    if span.kind == "wait":
        style = {"fc": "white", "ec": GRAY, "hatch": "////"}
    else:
        style = {"fc": face, "ec": "white"}
    ax.add_patch(Rectangle(corner, width, 0.8, lw=0.8, **style))
    if span.kind != "wait" and width > least:
        middle = span.start + width / 2
        ax.text(middle, row, span.batch, ha="center", va="center_baseline", size=8)


def _time_axis(ax: Axes, names: Sequence[str], until: float) -> None:
    ax.set(xlim=(0, until), ylim=(-0.6, 4.6), xlabel="time, in steps")
    ax.set_yticks([4 - n for n in range(len(names))], names)
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False)
