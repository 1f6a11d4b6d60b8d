"""Chapter 11, drawn: the loop of measuring, a Chrome trace, rooflines, stages, a waiting device."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from helpers.profiling import Roofline

BLUE, ORANGE, GREEN, PINK, YELLOW, GRAY = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #777777".split()
BOUNDS = [
    ("device idle, the loop\nwaits for a batch", "data", "workers,\nwork by the batch", YELLOW),
    ("device idle between\nshort kernels", "overhead", "fuse, compile,\nno syncs", PINK),
    ("device busy, on the\nslanted roof", "memory", "move fewer bytes,\nfuse", BLUE),
    ("device busy, on the\nflat roof", "compute", "fewer FLOPs,\nlower precision", GREEN),
]


def draw_loop(ax: Axes) -> None:
    """Draw measure → find the bound → change one thing → measure again."""
    _box(ax, 3.0, 2.35, 6.2, 0.55, "measure: warm up, take the median, profile", GRAY)
    for x, title in [
        (0, "what the profile shows"),
        (2.55, "the bound"),
        (4.35, "change one thing"),
    ]:
        ax.text(x, 1.78, title, color=GRAY, fontsize=9)
    for row, (sign, bound, cure, color) in enumerate(BOUNDS):
        y = 1.25 - 0.85 * row
        ax.text(0, y, sign, va="center", fontsize=9)
        _arrow(ax, (2.05, y), (2.5, y))
        _box(ax, 3.1, y, 1.1, 0.6, bound, color)
        _arrow(ax, (3.72, y), (4.25, y))
        ax.text(4.35, y, cure, va="center", fontsize=9)
    _box(ax, 3.0, -2.05, 6.2, 0.55, "same result? then measure again", GRAY)
    ax.plot([6.1, 6.45, 6.45, 6.3], [-2.05, -2.05, 2.35, 2.35], color=GRAY, lw=1)
    _arrow(ax, (6.4, 2.35), (6.1, 2.35))
    ax.set(xlim=(-0.15, 6.5), ylim=(-2.4, 2.7))
    ax.axis("off")


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """Read a Chrome trace into slices: name, kind, start and end in µs, depth of nesting.

    kind: ``cpu_op``, ``user_annotation`` (a named range), ``kernel`` (on a GPU).
    """
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    kept = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation", "kernel")]
    kept.sort(key=lambda e: (e["ts"], -e["dur"]))
    found, open_until = [], {}
    for e in kept:
        start = e["ts"] - kept[0]["ts"]
        above = [end for end in open_until.get(e["tid"], []) if end > start]
        open_until[e["tid"]] = [*above, start + e["dur"]]
        where = {"start": start, "end": start + e["dur"], "depth": len(above)}
        found.append({"name": e["name"], "kind": e["cat"], **where})
    return found


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
        if start < 0 or start + long > width * 1.001 or depth < 0 or depth > 5:
            continue
        if long < width / 400:  # thinner than a line of ink
            continue
        deepest = max(deepest, depth)
        color = GRAY if s["kind"] == "user_annotation" else _color(s["name"])
        ax.broken_barh([(start, long)], (-depth - 0.9, 0.85), color=color, ec="white", lw=0.4)
        name = s["name"].removeprefix("aten::").split("#")[0]
        if long > 0.0135 * width * (len(name) + 1):
            ax.text(start + long / 2, -depth - 0.48, name, ha="center", va="center", fontsize=7,
                    color="white", clip_on=True)  # fmt: skip
    ax.set(xlim=(0, width), ylim=(-deepest - 1, 0.1), yticks=[])
    ax.set(xlabel="µs since the start of the range; downwards: what called what")
    ax.spines["left"].set_visible(False)


def draw_roofline(ax: Axes, roof: Roofline, points: Sequence[tuple], chosen: tuple) -> None:
    """Draw the roofs and points (name, n, flops, bytes, seconds); `chosen` is a (name, n)."""
    ridge = roof.rate / roof.bandwidth
    heights = [roof.bandwidth * 0.02 / 1e9, roof.rate / 1e9, roof.rate / 1e9]
    ax.loglog([0.02, ridge, 3000], heights, color="black", lw=1.5)
    ax.axvline(ridge, color=GRAY, lw=0.8, ls=":")
    colors = dict(zip(dict.fromkeys(p[0] for p in points), (BLUE, ORANGE, GREEN), strict=False))
    for name, n, flops, moved, seconds in points:
        at, mine = (flops / moved, flops / seconds / 1e9), (name, n) == chosen
        ax.plot(*at, "o", color=colors[name], ms=9 if mine else 4, alpha=1 if mine else 0.35)
        if mine:
            word, least = roof.bound(flops, moved)
            ax.plot([at[0]] * 2, [at[1], flops / least / 1e9], color=colors[name], ls="--", lw=1)
            share = f"{least / seconds:.0%} of its {word} roof"
            if least > 1.15 * seconds:
                share = f"above its {word} roof: cached"
            ax.set_title(f"{name}, n = {n}: {at[0]:.3g} FLOP/B, {at[1]:.3g} GFLOP/s, {share}")
    for name, color in colors.items():
        ax.plot([], [], "o", color=color, label=name)
    ax.legend(frameon=False, loc="lower right")
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="GFLOP/s")
    ax.title.set_fontsize(9)
    ax.minorticks_off()  # a frame of half the size


def draw_stages(ax: Axes, stages: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each stage: its share of the time, and its calls written beside it."""
    total = sum(stage["us"] for stage in stages.values())
    for row, stage in enumerate(stages.values()):
        share = stage["us"] / total
        ax.barh(row, share, color=BLUE, height=0.65)
        ax.text(share + 0.01, row, f"{share:.0%}, {stage['calls']:,} calls", va="center")
    ax.set(yticks=range(len(stages)), yticklabels=list(stages), xlim=(0, 1))
    ax.set_xlabel("share of the profiled time")
    ax.invert_yaxis()


def draw_stall(ax: Axes, seen: Mapping[int, Mapping], model: Callable[[int], float]) -> None:
    """Draw the share of time spent waiting: workers -> stages, and what `model(workers)` says."""
    total = [sum(stage["us"] for stage in stages.values()) for stages in seen.values()]
    waits = [s["data"]["us"] / t for s, t in zip(seen.values(), total, strict=True)]
    at = range(len(seen))
    ax.bar(at, waits, color=BLUE, width=0.55, label="from the profile")
    ax.plot(at, [model(w) for w in seen], "D", color=ORANGE, ms=8, label="from the model")
    ax.set(xticks=at, xticklabels=list(seen), ylim=(0, 1))
    ax.set(xlabel="num_workers", ylabel="share of time waiting")
    ax.legend(frameon=False)


def _color(name: str) -> str:
    product = ("mm", "linear", "matmul", "conv", "Addmm")
    return BLUE if any(word in name for word in product) else ORANGE if "Adam" in name else GREEN


def _box(ax: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    corner, style = (x - width / 2, y - height / 2), "round,pad=0,rounding_size=0.1"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc=color, ec="none"))
    ax.text(x, y, text, ha="center", va="center", color="white")


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GRAY, "shrinkA": 0})
