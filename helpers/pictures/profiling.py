"""Chapter 11, drawn: a Chrome trace, rooflines, where the time goes, a waiting device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE
from helpers.profiling import Roofline

DEPTH = 5  # calls within calls that are drawn, one below the other
LETTER = 0.0135  # width of a letter at 7 points, as a share of the figure's


def draw_trace(ax: Axes, slices: Sequence[Mapping[str, Any]], inside: str) -> None:
    """Draw the slices that lie within the first range called `inside`; below it, what it called."""
    outer = next((s for s in slices if s["name"] == inside), None)
    if outer is None:
        known = sorted({s["name"] for s in slices if s["kind"] == "user_annotation"})
        raise ValueError(f"no range {inside!r} in the trace; expected one of {known}")

    width = outer["end"] - outer["start"]
    deepest = 0
    for s in slices:
        start, long = s["start"] - outer["start"], s["end"] - s["start"]
        depth = s["depth"] - outer["depth"]
        inside_it = start >= 0 and start + long <= width * 1.001 and 0 <= depth <= DEPTH
        if not inside_it or long < width / 400:  # thinner than a line of ink
            continue
        deepest = max(deepest, depth)
        name = s["name"].removeprefix("aten::").split("#")[0]
        color = GRAY if s["kind"] == "user_annotation" else _color(s["name"])
        ax.broken_barh([(start, long)], (-depth - 0.9, 0.85), color=color, ec="white", lw=0.4)
        if long > LETTER * width * (len(name) + 1):
            centre = {"ha": "center", "va": "center", "clip_on": True}
            ax.text(start + long / 2, -depth - 0.48, name, color="white", fontsize=7, **centre)

    ax.set(xlim=(0, width), ylim=(-deepest - 1, 0.1), yticks=[])
    ax.set(xlabel="µs since the start of the range; downwards: what called what")
    ax.spines["left"].set_visible(False)


def draw_roofline(ax: Axes, roof: Roofline, points: Sequence[tuple], chosen: tuple) -> None:
    """Draw the roofs and points (name, n, flops, bytes, seconds); `chosen` is a (name, n)."""
    ridge = roof.peak_flops / roof.bandwidth  # FLOP per byte at which the two roofs meet
    heights = [roof.bandwidth * 0.02 / 1e9, roof.peak_flops / 1e9, roof.peak_flops / 1e9]
    ax.loglog([0.02, ridge, 3000], heights, color="black", lw=1.5)
    ax.axvline(ridge, color=GRAY, lw=0.8, ls=":")

    names = list(dict.fromkeys(point[0] for point in points))
    colors = dict(zip(names, (BLUE, ORANGE, GREEN), strict=False))
    for name, n, flops, moved, seconds in points:
        intensity, rate = flops / moved, flops / seconds / 1e9
        if (name, n) != chosen:
            ax.plot(intensity, rate, "o", color=colors[name], ms=4, alpha=0.35)
            continue
        ax.plot(intensity, rate, "o", color=colors[name], ms=9)
        kind, least = roof.bound(flops, moved)
        ax.plot([intensity] * 2, [rate, flops / least / 1e9], color=colors[name], ls="--", lw=1)
        share = f"{least / seconds:.0%} of its {kind} roof"
        if least > 1.15 * seconds:
            share = f"above its {kind} roof: cached"
        ax.set_title(f"{name}, n = {n}: {intensity:.3g} FLOP/B, {rate:.3g} GFLOP/s, {share}")

    for name, color in colors.items():
        ax.plot([], [], "o", color=color, label=name)
    ax.legend(frameon=False, loc="lower right")
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="GFLOP/s")
    ax.title.set_fontsize(9)
    ax.minorticks_off()  # a frame of half the size


def draw_ranges(ax: Axes, ranges: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each range: its share of the time, and its calls written beside it."""
    total = sum(found["us"] for found in ranges.values())
    for row, found in enumerate(ranges.values()):
        share = found["us"] / total
        ax.barh(row, share, color=BLUE, height=0.65)
        ax.text(share + 0.01, row, f"{share:.0%}, {found['calls']:,} calls", va="center")
    ax.set(yticks=range(len(ranges)), yticklabels=list(ranges), xlim=(0, 1))
    ax.set_xlabel("share of the profiled time")
    ax.invert_yaxis()


def draw_stall(ax: Axes, seen: Mapping[int, float], model: Callable[[int], float]) -> None:
    """Draw the share of time spent waiting, as seen by workers and as `model(workers)` says."""
    at = range(len(seen))
    ax.bar(at, seen.values(), color=BLUE, width=0.55, label="from the profile")
    ax.plot(at, [model(w) for w in seen], "D", color=ORANGE, ms=8, label="from the model")
    ax.set(xticks=at, xticklabels=list(seen), ylim=(0, 1))
    ax.set(xlabel="num_workers", ylabel="share of time waiting")
    ax.legend(frameon=False)


def _color(name: str) -> str:
    if any(word in name for word in ("mm", "linear", "matmul", "conv", "Addmm")):
        return BLUE
    return ORANGE if "Adam" in name else GREEN
