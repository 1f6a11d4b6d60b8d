"""Chapter 09, drawn: live bytes over a training step, a card's memory, segments and blocks."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from helpers import budget
from helpers.allocator import IN_USE, CachingAllocator
from helpers.memory import PeakMemory
from helpers.page import calculator as page
from helpers.pictures.draw import (
    BLUE,
    GRAY,
    GREEN,
    PALE,
    PINK,
    PURPOSES,
    YELLOW,
    box,
    frame,
)

MIB = 2**20
CENTRE = {"ha": "center", "va": "center", "size": 9}
# GPT-2: Radford et al. 2019, table 2. GPT-3: Brown et al. 2020, table 2.1; its attention is partly
# sparse, which is not counted here.
SHAPES = {
    "GPT-2 small": (50257, 1024, 12, 12, 768),
    "GPT-2 medium": (50257, 1024, 24, 16, 1024),
    "GPT-2 large": (50257, 1024, 36, 20, 1280),
    "GPT-2 XL": (50257, 1024, 48, 25, 1600),
    "GPT-3 6.7B": (50257, 2048, 32, 32, 4096),
    "GPT-3 175B": (50257, 2048, 96, 96, 12288),
}
SHAPE = ("vocabulary", "context", "layers", "heads", "width")


def draw_timeline(ax: Axes, memory: PeakMemory, top: float | None = None) -> None:
    """Draw the live bytes of a training step after each operation, stacked by purpose.

    top: the upper end of the axis in MiB, so that several pictures can be compared.
    """
    places = range(len(memory.timeline))
    found = [memory.by_category(at) for at in places]
    names = [name for name in PURPOSES if any(parts[name] for parts in found)]
    heights = [[parts[name] / MIB for parts in found] for name in names]
    colors = [PURPOSES[name] for name in names]
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
    ax.set(xlim=(0, len(live) - 1), ylim=(0, top), xlabel="operations", ylabel="MiB")
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

    left, low = 0.0, 0
    for name in rest:
        width = parts[name] / small
        middle = left + width / 2
        box(ax, (middle, 0.5), "", colors[name], size=(width, 0.6))
        text = f"{name} {parts[name]:.2f}"
        if width > 0.02 * len(text):
            color = "white" if colors[name] == GREEN else "black"
            ax.text(middle, 0.5, text, color=color, **CENTRE)
        else:  # too narrow for its name, which stands below; the next one's still lower
            height = -0.15 - 0.5 * (low % 2)
            ax.plot([middle, middle], [0.2, height + 0.2], color=GRAY, linewidth=0.8)
            at_end = middle > 0.95  # clear of its neighbour's line
            ax.text(middle, height, text, **CENTRE | ({"ha": "left"} if at_end else {}))
            low += 1
        left += width
    frame(ax, (-0.02, 1.1), (-0.8, 2.4), equal=False)


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


# What both calculators offer, here and in chapter 15
OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD with momentum | 带动量的 SGD",
    "adam": "Adam, AdamW | Adam、AdamW",
    "fused adam": "AdamW(fused=True)",
}
ATTENTION = {"fused": "fused kernel | 融合内核", "matrix": "matrix in memory | 矩阵存进显存"}
CHECKPOINTING = {"none": "off | 不用", "blocks": "every block | 每一块都用"}
MOMENTS = {
    "forward": "end of forward | 前向结束时",
    "loss": "backward: loss | 反向：损失",
    "head": "backward: output layer | 反向：输出层",
    "last block": "backward: last block | 反向：最后一块",
    "first block": "backward: first block | 反向：第一块",
    "embeddings": "backward: embedding | 反向：嵌入",
    "update": "optimizer step | 优化器更新",
}
PARTS = {
    "parameters": page.Part(label="parameters | 参数", color=PURPOSES["parameters"]),
    "copies": page.Part(label="16-bit copies of weights | 权重的 16 位副本", color="#56B4E9"),
    "optimizer": page.Part(label="optimizer state | 优化器状态", color=PURPOSES["optimizer"]),
    "gradients": page.Part(label="gradients | 梯度", color=PURPOSES["gradients"]),
    "buckets": page.Part(label="DDP buckets | DDP 的桶", color=PINK),
    "activations": page.Part(label="activations | 激活值", color=PURPOSES["activations"]),
    "loss": page.Part(label="logits and loss | logits 和损失", color="#F0E442"),
    "temporary": page.Part(label="temporary | 临时张量", color="#8A8A8A"),
}
SEQUENCES = [*range(1, 17), *range(20, 65, 4), *range(80, 257, 16)]
PRESETS = {name: dict(zip(SHAPE, shape, strict=True)) for name, shape in SHAPES.items()}


def model_sizes(preset: str) -> dict[str, page.Size]:
    """Return the sliders for the sizes of a GPT; they start with those of a preset."""
    start = PRESETS[preset]
    vocabularies = [256, 1000, 2000, 5000, 10000, 20000, 32000, 50257, 100000, 128000, 256000]
    contexts = [*range(64, 1024, 64), *range(1024, 4096, 256), *range(4096, 16385, 1024)]
    widths = [*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16385, 512)]
    return {
        "vocabulary": page.Size(
            label="vocabulary | 词表大小", values=vocabularies, start=start["vocabulary"]
        ),
        "context": page.Size(
            label="tokens in a sequence | 序列长度", values=contexts, start=start["context"]
        ),
        "layers": page.Size(label="layers | 层数", values=range(1, 129), start=start["layers"]),
        "heads": page.Size(label="heads | 注意力头数", values=range(1, 129), start=start["heads"]),
        "width": page.Size(
            label="width | 宽度", values=widths, start=start["width"], multiple_of="heads"
        ),
    }


def choices(
    *, precision: str, mixed: str, optimizer: page.Choice, checkpointing: str
) -> dict[str, page.Choice]:
    """Return the lists of both calculators.

    precision, checkpointing: where the lists start; mixed: what mixed precision is called.
    """
    return {
        "precision": page.Choice(
            label="precision | 精度",
            options={"fp32": "float32", "amp": mixed, "bf16": "all bfloat16 | 全部 bfloat16"},
            start=precision,
        ),
        "optimizer": optimizer,
        "attention": page.Choice(label="attention | 注意力", options=ATTENTION, start="fused"),
        "checkpointing": page.Choice(
            label="activation checkpointing | 激活检查点",
            options=CHECKPOINTING,
            start=checkpointing,
        ),
    }


def calculator() -> None:
    """Show the calculator "will my training fit?": `budget.step_bytes` for any GPT."""
    powers = [2**k for k in range(13)]
    page.calculator(
        budget.step_bytes,
        budget.block_bytes,
        budget.parameter_count,
        budget.tokens_per_update,
        presets=PRESETS,
        sizes={
            **model_sizes("GPT-2 small"),
            "micro_batch": page.Size(
                label="sequences in a micro-batch | 微批次中的序列数", values=SEQUENCES, start=8
            ),
            "accumulation": page.Size(
                label="micro-batches per update | 每次更新的微批次数",
                values=powers[:10],
                start=1,
            ),
            "gpus": page.Size(label="GPUs, with DDP | GPU 数（DDP）", values=powers, start=1),
        },
        choices=choices(
            precision="fp32",
            mixed="mixed: autocast to 16 bits | 混合精度：autocast 到 16 位",
            optimizer=page.Choice(
                label="optimizer | 优化器",
                options={"none": "none | 无", **OPTIMIZERS},
                start="adam",
            ),
            checkpointing="none",
        ),
        moments=MOMENTS,
        parts=PARTS,
        facts={
            "parameter_count": "parameters | 个参数",
            "tokens_per_update": "tokens per update | 个词元（每次更新）",
        },
        capacities=(8, 16, 24, 40, 80, 141),
        capacity=16,
        note=(
            "The model is this book's GPT without dropout, and the step is not the first one. "
            "1 GiB is 2³⁰ bytes; a card sold with 80 GB has about 80 GiB (the dashed line). "
            "The bytes of all tensors are counted. CUDA itself, its libraries and what the caching "
            "allocator cannot use are not included, so leave some room. | "
            "模型是本书的 GPT，不用 Dropout，算的不是训练的第一步。1 GiB 等于 2³⁰ 字节；"
            "标称 80 GB 的显卡大约有 80 GiB（虚线处）。这里统计的是所有张量的字节数。"
            "CUDA 本身、它的库，以及缓存分配器里用不上的部分都不在内，所以要留一些余量。"
        ),
    )
