"""Chapter 13, drawn: programs, sectors, occupancy, the online softmax, tiles, the record."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from helpers.page.records import Record
from helpers.pictures.draw import BLUE, EDGE, GRAY, GREEN, ORANGE, PALE, PEACH, box, frame


def draw_programs(ax: Axes, program: int, BLOCK: int, N: int = 13) -> None:
    """Draw which of N elements one program of the grid loads, and which places the mask stops."""
    grid = -(-N // BLOCK)
    at = [program * BLOCK + place for place in range(BLOCK)]

    for k in range(grid):
        face, color = (BLUE, "white") if k == program else ("white", "black")
        box(ax, (4 * k + 2, 3), f"program {k}", face, size=(3.4, 1), color=color, fontsize=9)
    for k in range(N):
        box(ax, (k + 0.5, 0), k, PALE if k in at else "white", fontsize=9)

    if program < grid:
        for k in at:
            if k >= N:
                box(ax, (k + 0.5, 0), k, PEACH, fontsize=9, dashed=True)
        corners = [(4 * program + 0.3, 2.5), (4 * program + 3.7, 2.5), (at[-1] + 1, 0.5)]
        ax.add_patch(Polygon([*corners, (at[0], 0.5)], fc=PALE, alpha=0.5, zorder=0))
        mask = [int(k < N) for k in at]
        ax.text(0, -1.2, f"at = {program} × {BLOCK} + arange = {_row(at)}")
        ax.text(0, -2.0, f"mask = at < {N} = {_row(mask)}")
        ax.text(0, -2.8, f"{sum(mask)} of {BLOCK} elements load and store", color=GRAY)
    else:
        ax.text(0, -1.2, f"not launched: {N} elements in blocks of {BLOCK}", color=ORANGE)
        ax.text(0, -2.0, f"take {grid} programs, 0 to {grid - 1}", color=ORANGE)

    ax.text(16.2, 3, "grid", va="center", color=GRAY)
    ax.text(16.2, 0, "memory", va="center", color=GRAY)
    frame(ax, (-0.2, 18.6), (-3.2, 3.8))


def draw_sectors(ax: Axes, sectors: Sequence[int], used: int) -> None:
    """Draw 4 KiB of memory, 32 lines of 4 sectors of 32 bytes; `used`: bytes the warp asked for."""
    for row in range(4):
        y, lines = -1.7 * row, range(8 * row, 8 * row + 8)
        ax.broken_barh([(4.8 * (k % 8), 4) for k in lines], (y, 1), fc="white", ec="#999999")
        touched = [(4.8 * (s // 4 % 8) + s % 4, 1) for s in sectors if s // 4 in lines]
        ax.broken_barh(touched, (y, 1), fc=ORANGE, ec="white", lw=0.8)
        ax.text(-0.8, y + 0.5, f"{1024 * row} B", ha="right", va="center", size=8, color=GRAY)
    moved, lines = 32 * len(sectors), len({s // 4 for s in sectors})
    ax.text(0, 2.9, f"sectors of 32 B: {len(sectors)}, lines of 128 B: {lines}", size=11)
    ax.text(0, 1.7, f"{used} B asked for, {moved} B moved: {used / moved:.0%} useful", color=GREEN)
    frame(ax, (-5.5, 38), (-5.4, 4))


def draw_occupancy(ax: Axes, limits: dict[str, int], warps: int) -> None:
    """Draw how many programs each resource admits on one SM, and the 64 warp slots they fill."""
    fit = min(limits.values())
    for row, (name, programs) in enumerate(limits.items()):
        tight, width = programs == fit, 1.4 * min(programs, 40)
        ax.broken_barh([(0, width)], (-row - 0.35, 0.7), fc=ORANGE if tight else PALE)
        ax.text(-1, -row, name, ha="right", va="center", weight="bold" if tight else "normal")
        ax.text(width + 0.6, -row, programs, va="center", color=ORANGE if tight else GRAY)
    ax.broken_barh([(0, 64)], (-5, 0.7), fc="white", ec=GRAY)
    busy = [(k * warps, warps) for k in range(fit)]
    ax.broken_barh(busy, (-5, 0.7), fc=BLUE, ec="white", lw=0.8)
    ax.text(-1, -4.65, "64 warps", ha="right", va="center")
    ax.text(0, 0.65, "programs that fit, by resource", color=GRAY)
    line = f"{fit} × {warps} warps resident: occupancy {fit * warps / 64:.0%}"
    ax.text(0, -6, line, color=BLUE, size=11)
    frame(ax, (-20, 65), (-6.2, 1.2), equal=False)


def draw_online(
    ax: Axes, x: Sequence[float], states: Sequence[tuple], block: int, step: int
) -> None:
    """Draw the scores x, the blocks read so far, and the running (maximum, sum, factor)."""
    seen = step * block
    for k, score in enumerate(x):
        color = "#DDDDDD"  # not read yet
        if k < seen:
            color = ORANGE if k >= seen - block else BLUE
        ax.bar(k, score, color=color, width=0.8)
        ax.text(k, score + 0.1, f"{score:g}", ha="center", size=8, color=GRAY)
    for edge in range(block, len(x), block):
        ax.axvline(edge - 0.5, color=GRAY, lw=0.6, ls=":")
    if step:
        top, total, factor = states[step - 1]
        ax.axhline(top, color=GREEN, lw=1.5)
        old = f"old sum was multiplied by {factor:.3f}" if step > 1 else "first block"
        lines = [f"maximum so far  {top:g}", f"sum so far  {total:.3f}", old]
    else:
        lines = ["nothing read yet", "maximum −∞, sum 0"]
    ax.text(len(x) + 0.3, max(x), "\n".join(lines), va="top", linespacing=1.7)
    ax.set(xlim=(-0.7, len(x) + 9.5), ylim=(0, max(x) + 0.8), xticks=[], yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)


def draw_tiles(ax: Axes, tiles: Sequence[tuple[int, int]], size: int, wave: int) -> None:
    """Draw C as size × size tiles, those of the first wave colored, and the strips they read.

    tiles: (row, column) of each program in order of its id; a wave is what runs at one time.
    """
    running = tiles[:wave]
    rows, columns = ({tile[axis] for tile in running} for axis in (0, 1))
    ax.broken_barh([(3 + min(columns), len(columns))], (size + 1, 2), fc=ORANGE)
    for row in sorted(rows):
        ax.broken_barh([(0, 2)], (size - 1 - row, 1), fc=BLUE, ec="white", lw=0.4)
        across = [c for r, c in running if r == row]  # neighbours in every order of the book
        place = [(3 + min(across), len(across))]
        ax.broken_barh(place, (size - 1 - row, 1), fc=GREEN, ec="white", lw=0.4)
    frames = {"A": (0, 0, 2, size), "B": (3, size + 1, size, 2), "C": (3, 0, size, size)}
    for name, (x, y, width, height) in frames.items():
        ax.add_patch(Rectangle((x, y), width, height, fill=False, ec="#999999"))
        at = (x + width + 0.8, y + 1) if name == "B" else (x + width / 2, -2.2)
        ax.text(*at, name, ha="center", va="center", size=12)
    lines = [f"{len(rows)} strips of A", f"+ {len(columns)} strips of B"]
    lines += [f"= {len(rows) + len(columns)} strips read", f"for {len(running)} tiles of C"]
    for k, line in enumerate(lines):
        ax.text(size + 7, 0.7 * size - 3 * k, line, weight="bold" if k == 2 else "normal")
    frame(ax, (-0.3, 1.95 * size), (-3, size + 3.6))


def draw_shares(ax: Axes, record: Record) -> None:
    """Draw for each kernel and pass, at its largest size, the share of the ceiling in percent.

    A line from the slowest to the fastest contender; the passes of one kernel on one ground.
    """
    rows = record.provenance["summary"]["shares"]
    contenders = ("eager", "compile", "liger", "cudnn", "ours")  # the last one on top
    colors = (GRAY, BLUE, GREEN, "black", ORANGE)
    for who, marker, color in zip(contenders, "Ds^vo", colors, strict=True):
        points = [(100 * row[who], at) for at, row in enumerate(rows) if row[who]]
        if points:
            face = color if who == "ours" else "none"
            ax.plot(*zip(*points, strict=True), marker, color=color, label=who, mfc=face, ms=7)

    labels = []
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for at, row in enumerate(rows):
        found = [100 * row[who] for who in contenders if row[who]]
        ax.plot([min(found), max(found)], [at, at], color=EDGE, lw=0.8, zorder=1)
        if kernels.index(row["kernel"]) % 2 == 0:
            ax.axhspan(at - 0.5, at + 0.5, color="#F1F1F1", zorder=0, lw=0)
        first = at == 0 or rows[at - 1]["kernel"] != row["kernel"]
        label = f"{row['kernel']}, {row['pass']}" if first else row["pass"]
        labels.append(textwrap.fill(label.replace("_", " "), 19))

    ax.set_yticks(range(len(rows)), labels)
    ax.tick_params(axis="y", length=0)
    ax.axvline(100, color=EDGE, lw=1, ls=":")
    ax.set(xlabel="% of the ceiling, measured in the same run", xlim=(0, 108))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    handles, names = ax.get_legend_handles_labels()
    ax.legend(  # ours first
        [*handles[-1:], *handles[:-1]],
        [*names[-1:], *names[:-1]],
        loc="lower right",
        bbox_to_anchor=(1.02, 1),
        ncols=5,
        frameon=False,
        handletextpad=0,
        columnspacing=1,
    )
    caption = textwrap.fill(record.caption(), 50)
    ax.set_title(caption, loc="right", fontsize=8, color=GRAY, pad=26)


def _row(values: Sequence[int]) -> str:
    return "[" + " ".join(map(str, values)) + "]"
