"""Chapter 15, drawn: what ranks hold, layers in parts, pipelines, and what to choose."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from helpers import budget, pipeline
from helpers.page import calculator as page
from helpers.page.decisions import decision_tree, read_tree
from helpers.pictures import memory
from helpers.pictures.distributed import OF_RANK
from helpers.pictures.draw import (
    BLUE,
    EDGE,
    GRAY,
    GREEN,
    PALE,
    PINK,
    PURPOSES,
    arrow,
    box,
    frame,
)
from helpers.pipeline import Work

PARALLELISM = Path(__file__).with_name("parallelism.yml")

# What each rank holds


def draw_level(ax: Axes, level: int, ranks: int = 4) -> None:
    """Draw what each rank stores under DDP (0) and ZeRO-1, 2, 3; the rest is dashed."""
    frame(ax, (-1.9, ranks + 0.1), (-0.75, 3.6), equal=False)
    sharded = ("optimizer", "gradients", "parameters")[:level]
    for row, name in enumerate(("optimizer", "gradients", "parameters")):
        ax.text(-0.15, row + 0.35, name, ha="right", va="center", size=10)
        for rank in range(ranks):
            for part in range(ranks):
                held = name not in sharded or part == rank
                face = PURPOSES[name] if held else "white"
                place = (rank + 0.02 + (part + 0.5) * 0.94 / ranks, row + 0.35)
                box(ax, place, "", face, size=(0.94 / ranks, 0.7), dashed=not held)
    for rank in range(ranks):
        ax.text(rank + 0.49, 3.3, f"rank {rank}", ha="center", va="center", size=10)
    terms = [f"{size}P/{ranks}" if name in sharded else f"{size}P" for name, size in STORED.items()]
    ax.text(ranks / 2, -0.45, " + ".join(terms), ha="center", va="center", size=10, color=EDGE)


STORED = {"parameters": 4, "gradients": 4, "optimizer": 8}  # bytes for each parameter

# (what happens, the block that computes), in a step with three blocks
MOMENTS = (
    ("", None),
    ("forward", 0),
    ("forward", 1),
    ("forward", 2),
    ("backward", 2),
    ("backward", 1),
    ("backward", 0),
    ("optimizer.step", None),
)


def draw_gathered(ax: Axes, moment: int) -> None:
    """Draw which parts of three blocks two ranks have at one of the `MOMENTS` of a step of FSDP."""
    frame(ax, (-0.7, 3.1), (-1.5, 1.5), equal=False)
    what, computing = MOMENTS[moment]
    for block in range(3):
        for rank in range(2):
            for part in range(2):
                own, gathered = part == rank, block == computing
                face = BLUE if own else PALE if gathered else "white"
                place = (block + 0.28 + 0.42 * part, -rank)
                box(ax, place, "", face, size=(0.42, 0.7), dashed=not (own or gathered))
        color = EDGE if block == computing else GRAY
        weight = "bold" if block == computing else "normal"
        name = f"blocks[{block}]"
        ax.text(block + 0.49, 0.62, name, ha="center", size=10, color=color, weight=weight)
    for rank in range(2):
        ax.text(-0.1, -rank, f"rank {rank}", ha="right", va="center", size=10)
    if what == "forward" or what == "backward":
        ends = (-0.1, 3.05) if what == "forward" else (3.05, -0.1)
        arrow(ax, (ends[0], 1.05), (ends[1], 1.05))
    ax.text(1.48, 1.2, what, ha="center", size=10)


def draw_split(ax: Axes, ranks: int) -> None:
    """Draw two linear layers over ranks: the first by its outputs, the second by its inputs."""
    frame(ax, (-0.4, 10.4), (-0.6, 4.6), equal=False)
    box(ax, (0.6, 2), "x", "white", size=(1.0, 1.6))
    box(ax, (9.6, 2), "y", "white", size=(1.0, 1.6))
    height = 4 / ranks
    for rank in range(ranks):
        y, face = 4 - height * (rank + 0.5), OF_RANK[rank]
        size = (1.5, height - 0.15)
        box(ax, (2.9, y), f"up {rank}", face, size=size)
        box(ax, (4.9, y), f"h {rank}", face, size=(1.0, height - 0.15))
        box(ax, (6.9, y), f"down {rank}", face, size=size)
        arrow(ax, (1.15, 2 + (y - 2) * 0.3), (2.1, y))
        arrow(ax, (3.7, y), (4.35, y))
        arrow(ax, (5.45, y), (6.1, y))
        arrow(ax, (7.7, y), (9.05, 2 + (y - 2) * 0.3))
    if ranks > 1:
        ax.text(8.5, 4.25, "all_reduce", ha="center", va="center", size=10)


# Pipelines


def draw_schedule(ax: Axes, schedule: str, micro_batches: int, stages: int = 4) -> None:
    """Draw `gpipe` or `1f1b`, with its bubble and what stage 0 holds at most."""
    make = {"gpipe": pipeline.gpipe, "1f1b": pipeline.one_forward_one_backward}[schedule]
    orders = make(stages, micro_batches)
    works = pipeline.timeline(orders)
    draw_pipeline(ax, works)
    held = pipeline.most_stored(orders[0])
    ax.set_title(f"bubble = {pipeline.bubble(works):.0%}     most_stored = {held}", fontsize=10)


def draw_pipeline(ax: Axes, works: Sequence[Work]) -> None:
    """Draw who works when: a row for each stage, forward blue, backward green, waiting white."""
    stages = 1 + max(work.stage for work in works)
    end = max(work.end for work in works)
    small = end > 40  # numbers of two digits in narrow boxes
    for work in works:
        width = work.end - work.start
        place = (work.start + width / 2, -work.stage)
        color = GREEN if work.backward else BLUE
        text = {"color": "white", "fontsize": 5.5 if small else 10}
        box(ax, place, str(work.micro_batch), color, size=(width, 0.8), **text)
    for stage in range(stages):
        ax.text(-0.02 * end, -stage, str(stage), ha="right", va="center", size=9)
    frame(ax, (-0.06 * end, 1.01 * end), (-stages + 0.4, 0.6), equal=False)


def calculator() -> None:
    """Show the calculator "will my training fit on n GPUs?": `budget.rank_step_bytes`."""
    page.calculator(
        budget.rank_step_bytes,
        budget.rank_bytes,
        budget.step_bytes,
        budget.block_bytes,
        budget.parameter_count,
        presets=memory.PRESETS,
        sizes={
            **memory.model_sizes("GPT-3 6.7B"),
            "micro_batch": page.Size(
                label="sequences on each GPU | 每个 GPU 上的序列数",
                values=memory.SEQUENCES,
                start=1,
            ),
            "gpus": page.Size(label="GPUs | GPU 数", values=[2**k for k in range(13)], start=8),
        },
        choices={
            "sharding": page.Choice(
                label="sharded | 切分",
                options={
                    "ddp": "nothing: DDP | 不切分：DDP",
                    "zero1": "optimizer state: ZeRO-1 | 优化器状态：ZeRO-1",
                    "zero2": "and gradients: ZeRO-2 | 再加梯度：ZeRO-2",
                    "zero3": "and parameters: ZeRO-3 | 再加参数：ZeRO-3",
                },
                start="ddp",
            ),
            **memory.choices(
                precision="amp",
                mixed="mixed: computing in 16 bits | 混合精度：用 16 位计算",
                optimizer=page.Choice(
                    label="optimizer | 优化器", options=memory.OPTIMIZERS, start="fused adam"
                ),
                checkpointing="blocks",
            ),
        },
        moments=memory.MOMENTS,
        parts={
            "parameters": page.Part(
                label="parameters, or this GPU's part | 参数，或本 GPU 的那一份",
                color=PURPOSES["parameters"],
            ),
            "gathered": page.Part(label="gathered parameters | 收集到的参数", color="#56B4E9"),
            "copies": page.Part(
                label="16-bit copies by autocast | autocast 的 16 位副本", color="#9AD0F5"
            ),
            "optimizer": memory.PARTS["optimizer"],
            "gradients": memory.PARTS["gradients"],
            "buckets": page.Part(label="buffers to send | 通信缓冲区", color=PINK),
            "activations": memory.PARTS["activations"],
            "loss": memory.PARTS["loss"],
            "temporary": memory.PARTS["temporary"],
        },
        facts={"parameter_count": "parameters | 个参数"},
        capacities=(16, 24, 40, 80, 141, 192, 288),
        capacity=80,
        note=(
            "One of equal GPUs; 1 GiB is 2³⁰ bytes. ZeRO-2 and ZeRO-3 are fully_shard for each "
            "block. Mixed precision is autocast with DDP and ZeRO-1; with ZeRO-2 and ZeRO-3 it is "
            "MixedPrecisionPolicy, which computes everything in 16 bits, so activations are "
            "smaller. How long fully_shard's buffers live depends on the network: in backward "
            "they are counted as if all lived at once. CUDA, its libraries and what the caching "
            "allocator cannot use are not included. | "
            "算的是若干相同 GPU 中的一个；1 GiB 等于 2³⁰ 字节。ZeRO-2 和 ZeRO-3 "
            "指对每个 Block 调用 fully_shard。混合精度在 DDP 和 ZeRO-1 下指 autocast，"
            "在 ZeRO-2 和 ZeRO-3 下指 MixedPrecisionPolicy，后者全部用 16 位计算，所以激活值更小。"
            "fully_shard 的通信缓冲区存在多久取决于网络，反向部分按同时存在来计。"
            "CUDA、它的库，以及缓存分配器里用不上的部分都不在内。"
        ),
    )


def parallelism_tree() -> None:
    """Show the decision tree: from what does not fit to the way to divide it."""
    decision_tree(read_tree(PARALLELISM))
