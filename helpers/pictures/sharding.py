"""Chapter 15, drawn: pipeline schedules, and the calculator of what one of several GPUs holds."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from helpers import budget
from helpers.page import calculator as page
from helpers.pictures.draw import BLUE, GREEN, PINK, PURPOSES, box, frame
from helpers.pictures.memory import SHAPE, SHAPES
from helpers.pipeline import Work


def draw_pipeline(ax: Axes, works: Sequence[Work]) -> None:
    """Draw who works when: a row for each stage, forward blue, backward green, waiting white."""
    stages = 1 + max(work.stage for work in works)
    end = max(work.end for work in works)
    for work in works:
        width = work.end - work.start
        place = (work.start + width / 2, -work.stage)
        color = GREEN if work.backward else BLUE
        box(ax, place, str(work.micro_batch), color, size=(width, 0.8))
    for stage in range(stages):
        ax.text(-0.02 * end, -stage, str(stage), ha="right", va="center", size=9)
    frame(ax, (-0.06 * end, 1.01 * end), (-stages + 0.4, 0.6), equal=False)


def calculator() -> None:
    """Show the calculator "will my training fit on n GPUs?": `budget.rank_step_bytes`."""
    widths = [*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16385, 512)]
    contexts = [*range(64, 1024, 64), *range(1024, 4096, 256), *range(4096, 16385, 1024)]
    page.calculator(
        budget.rank_step_bytes,
        budget.rank_bytes,
        budget.step_bytes,
        budget.block_bytes,
        budget.parameter_count,
        presets={name: dict(zip(SHAPE, shape, strict=True)) for name, shape in SHAPES.items()},
        sizes={
            "vocabulary": page.Size(
                label="vocabulary | 词表大小",
                values=[256, 1000, 2000, 5000, 10000, 20000, 32000, 50257, 100000, 128000, 256000],
                start=50257,
            ),
            "context": page.Size(
                label="tokens in a sequence | 序列长度", values=contexts, start=2048
            ),
            "layers": page.Size(label="layers | 层数", values=range(1, 129), start=32),
            "heads": page.Size(label="heads | 注意力头数", values=range(1, 129), start=32),
            "width": page.Size(
                label="width | 宽度", values=widths, start=4096, multiple_of="heads"
            ),
            "micro_batch": page.Size(
                label="sequences on each GPU | 每个 GPU 上的序列数",
                values=[*range(1, 17), *range(20, 65, 4), *range(80, 257, 16)],
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
            "precision": page.Choice(
                label="precision | 精度",
                options={
                    "fp32": "float32",
                    "amp": "mixed: computing in 16 bits | 混合精度：用 16 位计算",
                    "bf16": "all bfloat16 | 全部 bfloat16",
                },
                start="amp",
            ),
            "optimizer": page.Choice(
                label="optimizer | 优化器",
                options={
                    "sgd": "SGD",
                    "momentum": "SGD with momentum | 带动量的 SGD",
                    "adam": "Adam, AdamW | Adam、AdamW",
                    "fused adam": "AdamW(fused=True)",
                },
                start="fused adam",
            ),
            "attention": page.Choice(
                label="attention | 注意力",
                options={
                    "fused": "fused kernel | 融合内核",
                    "matrix": "matrix in memory | 矩阵存进显存",
                },
                start="fused",
            ),
            "checkpointing": page.Choice(
                label="activation checkpointing | 激活检查点",
                options={"none": "off | 不用", "blocks": "every block | 每一块都用"},
                start="blocks",
            ),
        },
        moments={
            "forward": "end of forward | 前向结束时",
            "loss": "backward: loss | 反向：损失",
            "head": "backward: output layer | 反向：输出层",
            "last block": "backward: last block | 反向：最后一块",
            "first block": "backward: first block | 反向：第一块",
            "embeddings": "backward: embedding | 反向：嵌入",
            "update": "optimizer step | 优化器更新",
        },
        parts={
            "parameters": page.Part(
                label="parameters, or this GPU's part | 参数，或本 GPU 的那一份",
                color=PURPOSES["parameters"],
            ),
            "gathered": page.Part(label="gathered parameters | 收集来的参数", color="#56B4E9"),
            "copies": page.Part(
                label="16-bit copies by autocast | autocast 的 16 位副本", color="#9AD0F5"
            ),
            "optimizer": page.Part(
                label="optimizer state | 优化器状态", color=PURPOSES["optimizer"]
            ),
            "gradients": page.Part(label="gradients | 梯度", color=PURPOSES["gradients"]),
            "buckets": page.Part(label="buffers to send | 通信缓冲区", color=PINK),
            "activations": page.Part(label="activations | 激活值", color=PURPOSES["activations"]),
            "loss": page.Part(label="logits and loss | logits 和损失", color="#F0E442"),
            "temporary": page.Part(label="temporary | 临时张量", color="#8A8A8A"),
        },
        facts={"parameter_count": "parameters | 个参数"},
        capacities=(16, 24, 40, 80, 141),
        capacity=80,
        note=(
            "One of equal GPUs; 1 GiB is 2³⁰ bytes. ZeRO-2 and ZeRO-3 are fully_shard for each "
            "block. How long its buffers live depends on the network: in backward they are "
            "counted as if all lived at once. CUDA, its libraries and what the caching allocator "
            "cannot use come on top. | "
            "算的是若干相同 GPU 中的一个；1 GiB 等于 2³⁰ 字节。ZeRO-2 和 ZeRO-3 指对每一块调用 "
            "fully_shard。它的通信缓冲区存在多久取决于网络，反向部分按同时存在来计。"
            "CUDA、它的库，以及缓存分配器里用不上的部分都不在内。"
        ),
    )
