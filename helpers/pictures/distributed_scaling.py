"""Chapter 14, drawn: a ring all-reduce step by step, and buckets between backward and network."""

from collections.abc import Callable

from matplotlib.axes import Axes

from helpers.collectives import holdings, ring_schedule
from helpers.distributed_scaling import bucket_spans, equal_buckets
from helpers.pictures.draw import (
    BLUE,
    CREAM,
    EDGE,
    GRAY,
    GREEN,
    MINT,
    ORANGE,
    PALE,
    arrow,
    box,
    frame,
)

# The ring


def draw_ring(ax: Axes, k: int, ranks: int = 4) -> None:
    """Draw what each rank holds before round `k`, and which chunks that round will send.

    Rank r begins with 10**r in each chunk, so that the digits of a sum tell what is in it. Rounds
    count from 0; the one after the last shows the end.
    """
    schedule = ring_schedule(ranks)
    held = holdings(schedule, ranks, ranks)[k]
    width = 3.4
    frame(ax, (-1.0, width * ranks + 0.5), (-0.8, ranks + 1.4), equal=False)
    for rank in range(ranks):
        x = width * rank + 1.2
        ax.text(x, ranks + 0.7, f"rank {rank}", ha="center", color=GRAY)
        for chunk in range(ranks):
            parts = held[rank][chunk]
            face = CREAM if len(parts) > 1 else PALE
            if len(parts) == ranks:
                face = MINT
            total = sum(10**part for part in parts)
            box(ax, (x, ranks - chunk - 0.5), total, face, size=(1.7, 0.8))
    for t in schedule:
        if t.round == k:
            color = ORANGE if t.adds else GREEN
            y = ranks - t.chunk - 0.5
            start = width * t.sender + 1.2 + 0.85
            arrow(ax, (start, y), (start + width - 1.7, y), color)
            if t.receiver < t.sender:  # it comes in again on the left
                arrow(ax, (0.35 - width + 1.7, y), (0.35, y), color)
    phase = "reduce-scatter" if k < ranks - 1 else "all-gather"
    if k == 2 * (ranks - 1):
        phase = ""
    ax.text(-0.9, -0.5, phase, ha="left", family="monospace", size=9)


# Buckets


def draw_overlap(
    ax: Axes,
    buckets: int,
    *,
    forward: float,
    backward: float,
    size: int,
    reduce: Callable[[int], float],
) -> None:
    """Draw a step whose `size` bytes of gradients are cut into equal buckets; times in seconds.

    reduce(bytes) -> seconds of an all-reduce. The rules are those of `step_seconds`.
    """
    spans = bucket_spans(forward, backward, equal_buckets(size, buckets), reduce)
    ax.broken_barh([(0, forward * 1e3)], (-0.4, 0.8), fc=PALE, ec=EDGE, lw=0.4)
    ax.broken_barh([(forward * 1e3, backward * 1e3)], (-0.4, 0.8), fc=BLUE, ec=EDGE, lw=0.4)
    bars = [(start * 1e3, (end - start) * 1e3) for start, end in spans]
    ax.broken_barh(bars, (0.6, 0.8), fc=GREEN, ec="white", lw=0.4)
    end = spans[-1][1]
    ax.axvline(end * 1e3, color=GRAY, lw=0.8, ls=":")
    ax.text(end * 1e3 + 1, -0.1, f"{end * 1e3:.1f} ms", color=GRAY, va="center")
    ax.set(xlabel="ms", yticks=(0, 1), yticklabels=("compute", "network"), xlim=(0, 120))
    ax.invert_yaxis()
