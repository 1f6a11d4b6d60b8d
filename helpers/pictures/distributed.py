"""Chapter 14, drawn: a step on several ranks, who waits for whom, collectives, nodes, buckets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from helpers.pictures.draw import (
    BLUE,
    CREAM,
    EDGE,
    GRAY,
    GREEN,
    MINT,
    ORANGE,
    PALE,
    PEACH,
    arrow,
    box,
    frame,
)

RANKS = 4  # in the picture of the collectives
OF_RANK = (PALE, PEACH, MINT, "#EFD9E7")  # what comes from each rank
SUM = CREAM
Held = list[list[int]]  # the numbers that each rank holds

# One step


def draw_step(ax: Axes, ranks: int) -> None:
    """Draw 8 samples dealt to `ranks` copies of a model, and the average of their gradients."""
    frame(ax, (-0.6, 16.6), (-0.6, 6.6), equal=False)
    width = 16 / ranks
    for sample in range(8):
        face = OF_RANK[sample * ranks // 8]
        box(ax, (2 * sample + 1, 6), sample, face, size=(1.7, 0.8))
    for rank in range(ranks):
        middle = width * (rank + 0.5)
        for sample in range(8 * rank // ranks, 8 * (rank + 1) // ranks):
            arrow(ax, (2 * sample + 1, 5.6), (middle, 4.75), GRAY)
        text = f"rank {rank}: model"
        box(ax, (middle, 4.3), text, OF_RANK[rank], size=(min(width, 8) - 0.4, 0.9))
        arrow(ax, (middle, 3.85), (middle, 3.15))
        box(ax, (middle, 2.7), f"grad {rank}", OF_RANK[rank], size=(2.6, 0.9))
        arrow(ax, (middle, 2.25), (8 + (middle - 8) * 0.3, 0.85))
    terms = " + ".join(f"grad {rank}" for rank in range(ranks))
    mean = f"({terms}) / {ranks}" if ranks > 1 else terms
    box(ax, (8, 0.4), mean, SUM, size=(15.6, 0.9))


# Who waits for whom


@dataclass(frozen=True)
class Call:
    """A call of a process in the picture: in which lane, from which column to which."""

    lane: int
    start: int
    end: int
    text: str
    state: str = "runs"  # or "waits", or "never" for a call that is not reached


@dataclass(frozen=True)
class Scene:
    """The lanes from top to bottom, their calls, and which call waits for which (their indices)."""

    lanes: tuple[str, ...]
    calls: tuple[Call, ...]
    waits_for: tuple[tuple[int, int], ...]


WAITING = {
    "late": Scene(
        lanes=("rank 0", "rank 1"),
        calls=(
            Call(0, 0, 1, "sleep"),
            Call(0, 1, 2, "send to 1"),
            Call(1, 0, 2, "recv from 0", "waits"),
        ),
        waits_for=((2, 1),),
    ),
    "both_receive": Scene(
        lanes=("rank 0", "rank 1"),
        calls=(
            Call(0, 0, 1, "recv from 1", "waits"),
            Call(0, 1, 2, "send to 1", "never"),
            Call(1, 0, 1, "recv from 0", "waits"),
            Call(1, 1, 2, "send to 0", "never"),
        ),
        waits_for=((0, 3), (2, 1)),
    ),
    "mismatch": Scene(
        lanes=("rank 0", "ranks 1, 2"),
        calls=(
            Call(0, 0, 1, "all_reduce", "waits"),
            Call(0, 1, 2, "barrier", "never"),
            Call(1, 0, 1, "(no all_reduce)", "never"),
            Call(1, 1, 2, "barrier", "waits"),
        ),
        waits_for=((0, 2), (3, 1)),
    ),
}


def draw_waiting(ax: Axes, name: str) -> None:
    """Draw a scene of `WAITING`: a lane for each process, time to the right, arrows of waiting.

    Raises ValueError for a name that is none of them.
    """
    if name not in WAITING:
        raise ValueError(f"expected a scene, one of {', '.join(WAITING)}, got {name!r}")
    scene = WAITING[name]
    frame(ax, (-1.6, 10.2), (-0.7, 4.4), equal=False)
    for lane, text in enumerate(scene.lanes):
        ax.text(-0.2, 3.6 - 2.6 * lane, text, ha="right", va="center", color=GRAY)
    middles = []
    for call in scene.calls:
        middle, height = 2.5 * (call.start + call.end), 3.6 - 2.6 * call.lane
        middles.append((middle, height))
        style = {"size": (5.0 * (call.end - call.start) - 0.7, 1.1)}
        if call.state == "never":
            box(ax, (middle, height), call.text, "white", edge=GRAY, dashed=True, **style)
        else:
            face = PEACH if call.state == "waits" else MINT
            text = f"{call.text}: waits" if call.state == "waits" else call.text
            box(ax, (middle, height), text, face, **style)
    for waiting, awaited in scene.waits_for:
        (x, y), (to_x, to_y) = middles[waiting], middles[awaited]
        side = 0.6 if to_y > y else -0.6
        if scene.calls[waiting].end - scene.calls[waiting].start > 1:
            x = to_x  # straight from a long call to the one that it waits for
        arrow(ax, (x, y + side), (to_x, to_y - side), ORANGE)
    ax.text(0.4, -0.5, "→ waits for", va="center", color=ORANGE, size=9)
    ax.text(9.6, -0.5, "time →", ha="right", va="center", color=GRAY, size=9)


# Collectives


def collective(operation: str) -> tuple[Held, Held]:
    """Return what each of four ranks holds before and after `operation`; rank 0 is the root.

    What `reduce` leaves on the ranks that are not the root is not defined, and not listed.
    Raises ValueError for an operation that is none of `COLLECTIVES`.
    """
    if operation not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise ValueError(f"expected a collective, one of {known}, got {operation!r}")
    one = [[10**rank] for rank in range(RANKS)]
    many = [[10**rank * place for place in range(1, RANKS + 1)] for rank in range(RANKS)]
    total = [sum(value for (value,) in one)]
    nothing: Held = [[] for _ in range(RANKS - 1)]
    return {
        "broadcast": (one, [one[0]] * RANKS),
        "scatter": ([many[0], *nothing], [[value] for value in many[0]]),
        "gather": (one, [[value for (value,) in one], *nothing]),
        "reduce": (one, [total, *nothing]),
        "all_reduce": (one, [total] * RANKS),
        "all_gather": (one, [[value for (value,) in one]] * RANKS),
        "reduce_scatter": (many, [[sum(column)] for column in zip(*many, strict=True)]),
        "all_to_all": (many, [list(column) for column in zip(*many, strict=True)]),
    }[operation]


COLLECTIVES = (
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)


def draw_collective(ax: Axes, operation: str) -> None:
    """Draw what four ranks hold before and after; a color for each rank that a number is from."""
    frame(ax, (-0.7, 14.3), (-0.4, 11.2), equal=False)
    before, after = collective(operation)
    highest = 6 + max(map(len, before))
    for rank in range(RANKS):
        ax.text(3.6 * rank + 1.4, highest + 0.9, f"rank {rank}", ha="center", color=GRAY)
    for held, top in ((before, highest), (after, 3.4)):
        for rank, numbers in enumerate(held):
            for row in range(max(map(len, held))):
                at = (3.6 * rank + 1.4, top - row)
                if row < len(numbers):
                    face = OF_RANK[origin(numbers[row])] if single(numbers[row]) else SUM
                    box(ax, at, numbers[row], face, size=(2.4, 0.9))
                else:
                    box(ax, at, "", "white", size=(2.4, 0.9), edge="#BBBBBB", dashed=True)
    arrow(ax, (6.8, 5.75), (6.8, 4.35))
    ax.text(7.2, 5.05, operation, ha="left", va="center", family="monospace")


def single(number: int) -> bool:
    """Whether a number comes from one rank: one digit other than 0."""
    return len(str(number).rstrip("0")) == 1


def origin(number: int) -> int:
    """Return the rank that a number comes from: the power of ten in it."""
    return len(str(number)) - 1


# Where ranks run


def draw_places(ax: Axes, nodes: int, per_node: int) -> None:
    """Draw `nodes` machines with `per_node` processes each: rank above, local rank below."""
    frame(ax, (-0.3, 12.3), (-0.4, 3.4), equal=False)
    width = 12 / nodes
    for node in range(nodes):
        left = width * node
        box(ax, (left + width / 2, 1.35), "", CREAM, size=(width - 0.2, 3.0), rounded=0.1)
        ax.text(left + width / 2, 3.15, f"node {node}", ha="center", color=GRAY)
        part = (width - 0.4) / per_node
        for local in range(per_node):
            middle = left + 0.2 + part * (local + 0.5)
            size = (min(part, 2.6) - 0.08, 1.0)
            box(ax, (middle, 2.05), node * per_node + local, PALE, size=size, fontsize=12)
            box(ax, (middle, 0.7), local, PEACH, size=size, fontsize=12)
    ax.text(-0.15, 2.05, "RANK", rotation=90, va="center", ha="right", size=8, color=BLUE)
    ax.text(-0.15, 0.7, "LOCAL", rotation=90, va="center", ha="right", size=8, color=ORANGE)


# Buckets, in time


def draw_buckets(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the rows of `helpers.data_parallel.trace_step`: backward, and below it each bucket."""
    spans = [(row["start"] / 1e3, (row["end"] - row["start"]) / 1e3) for row in rows]
    names = ["backward"]
    for row, span in zip(rows, spans, strict=True):
        if row["kind"] == "backward":
            ax.broken_barh([span], (-0.4, 0.8), fc=BLUE, ec="white", lw=0.4)
        elif row["kind"] == "reduce":
            ax.broken_barh([span], (len(names) - 0.4, 0.8), fc=GREEN, ec=EDGE, lw=0.4)
            names.append(f"bucket {row['bucket']}")
    ax.set(xlabel="ms", yticks=range(len(names)), yticklabels=names)
    ax.set_xlim(left=0)
    ax.invert_yaxis()
