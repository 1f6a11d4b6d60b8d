"""Chapter 05, drawn: the way of a batch, workers over time, samplers, augmentations, copies."""

from collections.abc import Sequence

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

BLUE, ORANGE, GREEN, GRAY, PALE, PEACH = "#0072B2 #D55E00 #00795A #666666 #D3E5F2 #F8DCC4".split()
Span = tuple[int, int, float, float]  # lane (-1: main process), batch, start, end


def draw_pipeline(ax: Axes) -> None:
    """Draw which process does what to a batch, and what travels between them."""
    ax.add_patch(Rectangle((-0.2, 2.75), 11.4, 2.1, fc="#F4F4F4", ec="none"))
    ax.text(-0.05, 4.55, "main process", color=GRAY, va="center")
    boxes = {(0.1, 3.05): "sampler\n[7, 2, 5, 0]", (8.9, 3.05): "your loop\nstep(batch)"}
    boxes |= {(3.1, y): f"worker {n}\ncollate(dataset[i] …)" for n, y in enumerate((1.35, 0.0))}
    boxes[5.9, 3.05] = "pin_memory\n(if asked for)"
    for (x, y), text in boxes.items():
        width, face = (3.4, PALE) if "worker" in text else (2.1, "white")
        style = {"boxstyle": "round,pad=0.08", "fc": face, "ec": "#444444", "lw": 0.9}
        ax.add_patch(FancyBboxPatch((x, y), width, 1.0, **style))
        ax.text(x + width / 2, y + 0.5, text, ha="center", va="center", size=9)
    arrows = [((1.1, 2.95), (3.0, 2.0)), ((1.1, 2.95), (3.0, 0.6)), ((6.6, 1.9), (6.9, 2.95))]
    arrows += [((6.6, 0.6), (6.9, 2.95)), ((8.1, 3.55), (8.8, 3.55))]
    for start, end in arrows:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#444444"})
    ax.text(0.1, 1.3, "index queues:\na list of indices\nfor each batch", color=GRAY, size=9)
    ax.text(7.4, 1.3, "result queue:\nbatches in\nshared memory", color=GRAY, size=9)
    _frame(ax, (-0.3, 11.3), (-0.3, 4.95))


def simulate(loads: Sequence[float], step: float, workers: int, prefetch: int = 2) -> list[Span]:
    """Play the DataLoader's protocol with a core for each worker; return what happens when.

    Batch b is the job of worker b % workers. At most prefetch * workers batches are on order or
    waiting; to take one is to order one more. Batches are taken in order.
    """
    spans: list[Span] = []
    ready, taken, done, free = [], [], [0.0] * workers, 0.0
    for b, load in enumerate(loads):
        lane, ahead = (b % workers, prefetch * workers) if workers else (-1, 0)
        start = max(taken[b - ahead] if b >= ahead else 0.0, done[lane]) if workers else free
        ready.append(start + load)
        if workers:
            done[lane] = ready[b]
        taken.append(max(free, ready[b]))
        free = taken[b] + step
        spans += [(lane, b, start, ready[b]), (-1, b, taken[b], free)]
    return spans


def draw_workers(ax: Axes, load: float, workers: int, step: float = 1.0, until: float = 16) -> None:
    """Draw loading and steps over time, the waits hatched, and the stall in steady state."""
    spans = simulate([load] * 60, step, workers)
    ax.add_patch(Rectangle((0, 3.6), until, 0.8, fc="white", ec=GRAY, hatch="////", lw=0))
    for i, (lane, b, start, end) in enumerate(spans):
        if start < until:
            row, width = (4 if lane < 0 else 3 - lane), min(end, until) - start
            face = ORANGE if i % 2 else matplotlib.colormaps["Blues"](0.25 + 0.15 * (b % 4))
            ax.add_patch(Rectangle((start, row - 0.4), width, 0.8, fc=face, ec="white", lw=0.8))
            if width > 0.3:
                ax.text(start + width / 2, row, b, ha="center", va="center_baseline", size=8)
    each = (spans[-1][2] - spans[39][2]) / 40  # from step 19 to step 59
    names = ["main process", *(f"worker {n}" for n in range(workers))]
    title = f"a step every {each:.2f}; it waits for {1 - step / each:.0%} of the time"
    _time(ax, names, until, title)


def draw_samplers(ax: Axes, orders: dict[str, Sequence[int]], classes: Sequence[int]) -> None:
    """Draw the order of indices that each sampler gives, colored by the class of the sample."""
    colors = [PALE, PEACH, "#CDE8DF"]
    for row, (name, order) in enumerate(orders.items()):
        ax.text(-0.8, -1.5 * row, name, ha="right", va="center_baseline", size=9)
        for x, i in enumerate(order):
            face = colors[classes[i]]
            corner = (x - 0.5, -1.5 * row - 0.5)
            ax.add_patch(Rectangle(corner, 1, 1, fc=face, ec="#444444", lw=0.7))
            ax.text(x, -1.5 * row, i, ha="center", va="center_baseline", size=9)
    longest = max(map(len, orders.values()))
    _frame(ax, (-9.5, longest - 0.4), (-1.5 * len(orders) + 0.7, 0.7))


KINDS = {
    "rotate": lambda s: v2.RandomAffine(15 * s, interpolation=v2.InterpolationMode.BILINEAR),
    "shift": lambda s: v2.RandomAffine(0, translate=(0.08 * s, 0.08 * s)),
    "zoom": lambda s: v2.RandomAffine(0, scale=(1 - 0.15 * s, 1 + 0.15 * s)),
    "perspective": lambda s: v2.RandomPerspective(0.2 * s, p=1),
    "erase": lambda s: v2.RandomErasing(1, scale=(0.03 * s, 0.06 * s)),
    "noise": lambda s: v2.GaussianNoise(sigma=0.12 * s),
}


def draw_augmented(ax: Axes, image: Tensor, kind: str, strength: int) -> None:
    """Draw six random draws of one augmentation of `image` [1, H, W] and of the box around it."""
    ink = (image[0] > 0).nonzero()
    (top, left), (bottom, right) = ink.amin(0).tolist(), (ink.amax(0) + 1).tolist()
    corners = torch.tensor([[left, top, right, bottom]])
    box = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=tuple(image.shape[1:]))
    box = corners if kind == "erase" else box  # erasing warns of boxes that it leaves alone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = [KINDS[kind](strength)(tv_tensors.Image(image), box) for _ in range(6)]
    for n, (picture, moved) in enumerate(draws):
        small = ax.inset_axes([n % 3 / 3, 0.5 - n // 3 / 2, 0.32, 0.48])
        small.imshow(picture[0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="none")
        x0, y0, x1, y1 = moved[0].tolist()
        edge = {"fc": "none", "ec": ORANGE, "lw": 1.5}
        small.add_patch(Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, **edge))
        small.set(xticks=[], yticks=[])
    ax.axis("off")


def copy_spans(way: str, prepare: float, copy: float, step: float, n: int = 4) -> list[Span]:
    """When the CPU (lane 0), the copy engine (1) and the compute engine (2) are busy.

    Work on one stream runs in order. Without `non_blocking` the CPU waits for its copy.
    """
    spans, cpu, copied, computed = [], 0.0, 0.0, 0.0
    waits = way in ("pageable", "pinned")
    for b in range(n):
        spans.append((0, b, cpu, cpu + prepare))
        behind = copied if way == "side stream" else computed  # one stream: behind the last step
        start = max(cpu + prepare, behind)
        copied = start + copy * (2 if way == "pageable" else 1)  # pageable: through a buffer
        if waits:
            spans.append((0, b, cpu + prepare, copied))
        cpu = copied if waits else cpu + prepare
        computed = max(copied, computed) + step
        spans += [(1, b, start, copied), (2, b, computed - step, computed)]
    return spans


def draw_copies(ax: Axes, way: str) -> None:
    """Draw `copy_spans` over time."""
    for k, (lane, b, start, end) in enumerate(spans := copy_spans(way, 0.5, 1.0, 1.5)):
        waiting = lane == 0 and k and spans[k - 1][:2] == (0, b)
        face = "white" if waiting else (PALE, BLUE, ORANGE)[lane]
        style = {"fc": face, "ec": GRAY if waiting else "white", "hatch": "////" * waiting}
        ax.add_patch(Rectangle((start, 3.6 - lane), end - start, 0.8, lw=0.8, **style))
        if not waiting:
            ax.text((start + end) / 2, 4 - lane, b, ha="center", va="center_baseline", size=9)
    names = ["CPU: load, launch", "GPU: copies", "GPU: the step"]
    _time(ax, names, 16, f"batch 3 is done at {spans[-1][3]:g}")
    ax.set(ylim=(1.4, 4.6), xlabel="time")


def _time(ax: Axes, names: Sequence[str], until: float, title: str) -> None:
    ax.set(xlim=(0, until), ylim=(-0.6, 4.6), xlabel="time, in steps")
    ax.set_yticks([4 - n for n in range(len(names))], names)
    ax.set_title(title, size=11)
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False)


def _frame(ax: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.axis("off")
    ax.set(xlim=x, ylim=y)
