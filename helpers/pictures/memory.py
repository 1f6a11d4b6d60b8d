"""Chapter 09, drawn: live bytes over a training step, a card's memory, segments and blocks."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from helpers.allocator import IN_USE, CachingAllocator
from helpers.memory import PeakMemory
from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE, PALE, PINK, YELLOW, box, frame

MIB = 2**20
CENTRE = {"ha": "center", "va": "center", "size": 9}
COLORS = {
    "parameters": BLUE,
    "buffers": PINK,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": YELLOW,
    "other": "#BBBBBB",
}


def draw_timeline(ax: Axes, memory: PeakMemory, top: float | None = None) -> None:
    """Draw the live bytes of a training step after each operation, stacked by purpose.

    top: the upper end of the axis in MiB, so that several pictures can be compared.
    """
    places = range(len(memory.timeline))
    found = [memory.by_category(at) for at in places]
    names = [name for name in COLORS if any(parts[name] for parts in found)]
    heights = [[parts[name] / MIB for parts in found] for name in names]
    colors = [COLORS[name] for name in names]
    ax.stackplot(places, heights, labels=names, colors=colors, step="post", linewidth=0)

    live = [count for _, count in memory.timeline]
    at = live.index(memory.peak)
    ax.plot(at, memory.peak / MIB, "o", color="black", markersize=5)
    if top is None:
        top = 1.15 * memory.peak / MIB
    ends = [start for _, start in memory.marks[1:]] + [len(live)]
    for (name, start), end in zip(memory.marks, ends, strict=True):
        ax.axvline(start, color=GRAY, linewidth=0.8, linestyle=":")
        ax.text((start + end) / 2, 0.985 * top, name, ha="center", va="top", size=10)

    phase = [name for name, start in memory.marks if start <= at][-1]
    ax.set(xlim=(0, len(live) - 1), ylim=(0, top), ylabel="MiB")
    ax.set_title(f"peak {memory.peak / MIB:.1f} MiB, in {phase}", fontsize=10)
    order = {"reverse": True, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    ax.legend(frameon=False, fontsize=9, handlelength=1.0, **order)


def draw_bar(ax: Axes, parts: Mapping[str, float], unit: str) -> None:
    """Draw a bar of `parts`, sizes in `unit`; below it, enlarged, all parts but the first."""
    colors = dict(zip(parts, [BLUE, GREEN, YELLOW, PINK, "white"], strict=False))
    first, *rest = parts
    total, small = sum(parts.values()), sum(parts[name] for name in rest)
    border = parts[first] / total

    left = 0.0
    for name, size in parts.items():
        place = (left + size / total / 2, 2.0)
        box(ax, place, "", colors[name], size=(size / total, 0.6))
        left += size / total
    ax.text(border / 2, 2.0, f"{first} {parts[first]:.2f} {unit}", color="white", **CENTRE)

    for start, end in ((border, 0.0), (1.0, 1.0)):
        ax.plot([start, end], [1.7, 0.8], color=GRAY, linewidth=0.8, linestyle=":")

    left = 0.0
    for k, name in enumerate(rest):
        width = parts[name] / small
        box(ax, (left + width / 2, 0.5), "", colors[name], size=(width, 0.6))
        lower = 0.55 * (k % 2)  # neighbours on two lines: the last parts are narrow
        ax.text(left + width / 2, 0.05 - lower, f"{name} {parts[name]:.2f}", **CENTRE)
        left += width
    frame(ax, (-0.02, 1.06), (-0.8, 2.4), equal=False)


def draw_segments(ax: Axes, memory: CachingAllocator, names: Mapping[int, str], title: str) -> None:
    """Draw the memory of a device in a row: its segments with their blocks, sizes in MiB.

    names: of the blocks in use, by address. White blocks are free: reserved, but not allocated.
    What is gray at the right end is not reserved.
    """
    scale, left = memory.capacity, 0.0
    for segment in memory.segments:
        for block in segment.blocks:
            used = block.state == IN_USE
            text = f"{block.size / MIB:g}"
            if used:
                text = f"{names[block.address]}  {text}"
            width = block.size / scale
            face = PALE if used else "white"
            box(ax, (left + width / 2, 0.4), text, face, size=(width, 0.8), dashed=not used)
            left += width
        ax.plot([left, left], [-0.15, 0.95], color="black", linewidth=2)  # ends a segment

    rest = (memory.capacity - memory.reserved) / scale
    if rest:
        text = f"{(memory.capacity - memory.reserved) / MIB:g}"
        box(ax, (left + rest / 2, 0.4), text, "#EEEEEE", size=(rest, 0.8), edge="#EEEEEE")
    sums = {"allocated": memory.allocated, "reserved": memory.reserved, "capacity": memory.capacity}
    line = "    ".join(f"{name} {size / MIB:g}" for name, size in sums.items())
    ax.text(0, 1.3, line, size=10)
    ax.text(0, 1.9, title, size=10, weight="bold")
    frame(ax, (-0.01, 1.01), (-0.2, 2.3), equal=False)
