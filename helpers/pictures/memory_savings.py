"""Chapter 09, drawn: live bytes of training steps, peaks by group size, steps against cards."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from helpers.memory_savings import group_peak
from helpers.page.decisions import decision_tree, read_tree
from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PINK, YELLOW

COLORS = (BLUE, ORANGE, GREEN, PINK, YELLOW)
OUT_OF_MEMORY = Path(__file__).with_name("out_of_memory.yml")


def draw_steps(ax: Axes, timelines: Mapping[str, Sequence[tuple[str, int]]]) -> None:
    """Draw the live bytes of each training step from its start (0) to its end (1).

    timelines: name -> `PeakMemory.timeline`. The steps have different numbers of operations, so
    that the place of an operation is its share of the step.
    """
    for (name, timeline), color in zip(timelines.items(), COLORS, strict=False):
        megabytes = [live / 1e6 for _, live in timeline]
        place = [i / (len(megabytes) - 1) for i in range(len(megabytes))]
        ax.plot(place, megabytes, color=color, linewidth=1, label=name)
        top = max(megabytes)
        ax.plot(place[megabytes.index(top)], top, "o", color=color, markersize=4)
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="operations of one step", ylabel="MB")
    ax.set_xticks([0, 1], ["first", "last"])
    ax.legend(frameon=False, fontsize=9)


def draw_groups(ax: Axes, layers: int, ratio: int, *, most: tuple[int, int] = (256, 16)) -> None:
    """Draw `group_peak` and its two parts for all sizes, and mark the best.

    most: the largest `layers` and `ratio` to be compared; they give the axes.
    """
    sizes = list(range(1, layers + 1))
    inputs = [group_peak(layers, 0, size) for size in sizes]
    inside = [size * ratio for size in sizes]
    total = [group_peak(layers, ratio, size) for size in sizes]
    best = total.index(min(total))

    ax.plot(sizes, inputs, "--", color=BLUE, linewidth=1, label="inputs")
    ax.plot(sizes, inside, "--", color=ORANGE, linewidth=1, label="one group")
    ax.plot(sizes, total, color=GRAY, linewidth=1.6, label="peak")
    ax.plot(sizes[best], total[best], "o", color=GREEN)
    ax.axhline(layers * ratio, color=PINK, linewidth=1, label="plain")
    top = most[0] * most[1]
    ax.set(xscale="log", yscale="log", xlabel="k", xlim=(0.9, most[0] * 1.1), ylim=(0.8, top * 1.6))
    ax.minorticks_off()
    powers = [2**i for i in range(most[0].bit_length())]
    ax.set_xticks(powers, [str(size) for size in powers])
    tens = [10**i for i in range(5) if 10**i <= top]
    ax.set_yticks(tens, [str(size) for size in tens])
    title = f"layers n = {layers}     ratio r = {ratio}     best k = {sizes[best]}"
    ax.set_title(title, fontsize=10)
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_fit(ax: Axes, steps: Mapping[str, float], cards: Sequence[int]) -> None:
    """Draw the peak after each step as a bar, from top to bottom, and each card as a line.

    steps: name -> bytes. cards: gigabytes. A bar is green if it is below the smallest card, blue
    if it is below any, and gray if it fits nowhere.
    """
    gigabytes = [peak / 1e9 for peak in steps.values()]
    colors = []
    for peak in gigabytes:
        fitting = [card for card in cards if peak <= card]
        colors.append(GREEN if len(fitting) == len(cards) else BLUE if fitting else GRAY)
    bars = ax.barh(range(len(steps)), gigabytes, color=colors)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    ax.bar_label(bars, [f"{peak:.1f}" for peak in gigabytes], padding=4, fontsize=9, bbox=white)
    for card in cards:
        ax.axvline(card, color=PINK, linewidth=1, linestyle="--", zorder=0)
    ax.set_yticks(range(len(steps)), list(steps), fontsize=9)
    ax.invert_yaxis()
    ax.set(xlabel="GB", xlim=(0, max(gigabytes) * 1.12))
    ax.set_xticks([0, *cards, 120])


def out_of_memory_tree() -> None:
    """Show the decision tree: from the moment of the error to what helps."""
    decision_tree(read_tree(OUT_OF_MEMORY))
