"""Chapter 01, drawn: the layers of the ecosystem, the chain of an install, which wheel runs."""

from collections.abc import Mapping, Sequence

from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from helpers.environment import newest_cuda, runs

BLUE, PALE, ORANGE, PEACH, GREEN, MINT, GRAY = (
    "#0072B2 #D3E5F2 #D55E00 #F8DCC4 #00795A #CDE8DF #666666".split()
)

LAYERS = {
    "applications": [
        "vision\ntorchvision",
        "text\ntransformers",
        "audio\ntorchaudio",
        "RL\ntorchrl",
    ],
    "core: Python": ["nn", "optim", "data", "distributed", "compile"],
    "core: C++": ["tensor", "autograd", "dispatcher", "kernels"],
    "libraries": ["oneDNN\nMKL", "cuBLAS\ncuDNN NCCL", "ROCm", "Metal", "oneAPI"],
    "hardware": ["CPU", "NVIDIA\ncuda", "AMD\ncuda (ROCm)", "Apple\nmps", "Intel\nxpu"],
}
RUN = {"dispatcher", "kernels", "cuBLAS\ncuDNN NCCL", "NVIDIA\ncuda"}
# a line of a training script on an NVIDIA GPU -> the boxes that do its work
LINES = {
    "for x, y in loader:": {"data", "tensor"},
    "loss = loss_fn(model(x), y)": {"vision\ntorchvision", "nn", "tensor", "autograd", *RUN},
    "loss.backward()": {"tensor", "autograd", *RUN},
    "optimizer.step()": {"optim", "tensor", "dispatcher", "kernels", "NVIDIA\ncuda"},
    "model = torch.compile(model)": {"compile"},
    "model = DDP(model)": {"distributed", "tensor", *RUN},
}


def draw_layers(ax: Axes, line: str) -> None:
    """Draw the layers from applications to hardware; light up those that work for `line`."""
    for row, (layer, boxes) in enumerate(reversed(LAYERS.items())):
        ax.text(-0.15, row, layer, ha="right", va="center", color=GRAY)
        width = 10 / len(boxes)
        for k, name in enumerate(boxes):
            on = name in LINES[line]
            _box(
                ax, (k * width, row), width, name, BLUE if on else PALE, "white" if on else "black"
            )
    ax.text(5, 4.95, line, ha="center", va="center", size=12, family="monospace", color=BLUE)
    _frame(ax, (-2.4, 10.1), (-0.6, 5.3))


def draw_chain(ax: Axes, megabytes: Mapping[str, float]) -> None:
    """Draw what a line of PyTorch needs below it, on a CPU and on an NVIDIA GPU.

    megabytes: what `pip` put on this disk, by the package's name in the box.
    """
    rows = [
        ("hardware", "processor", "NVIDIA GPU", False),
        ("driver", "operating system", "NVIDIA driver (libcuda)", False),
        ("runtime", "OpenMP", "CUDA runtime", True),
        ("math libraries", "MKL or OpenBLAS, oneDNN", "cuBLAS, cuDNN, NCCL, Triton", True),
        ("Python package", "torch", "torch", True),
    ]
    for row, (layer, cpu, gpu, brought) in enumerate(rows):
        ax.text(-0.15, row, layer, ha="right", va="center", color=GRAY)
        for column, name in enumerate((cpu, gpu)):
            face, edge = (MINT, GREEN) if brought else (PEACH, ORANGE)
            size = sum(v for key, v in megabytes.items() if key in name and (column or row > 3))
            text = f"{name}\n{size:,.0f} MB here" if size and (column or row > 3) else name
            _box(ax, (column * 5, row), 5, text, face, "black", edge)
            if row:
                arrow = {"arrowstyle": "-|>", "color": GRAY, "shrinkA": 0, "shrinkB": 0}
                at = column * 5 + 2.5
                ax.annotate("", (at, row - 0.6), (at, row - 0.4), arrowprops=arrow)
    for column, title in enumerate(("on a CPU", "on an NVIDIA GPU")):
        ax.text(column * 5 + 2.5, 4.75, title, ha="center", size=11)
    ax.text(0, -0.75, "■ you install", color=ORANGE, va="center")
    ax.text(5, -0.75, "■ comes with pip install torch", color=GREEN, va="center")
    _frame(ax, (-2.6, 10.1), (-1.0, 5.1))


def draw_wheels(ax: Axes, driver: str, releases: Mapping[str, Sequence[str]]) -> None:
    """Draw which CUDA wheels of each PyTorch release start on `driver`.

    releases: PyTorch version -> CUDA versions of its wheels, e.g. {"2.14": ["12.6", "13.0"]}.
    """
    columns = sorted({cuda for wheels in releases.values() for cuda in wheels}, key=float)
    for row, (release, wheels) in enumerate(reversed(releases.items())):
        ax.text(-0.2, row, f"torch {release}", ha="right", va="center")
        for k, cuda in enumerate(columns):
            if cuda in wheels:
                fine = runs(driver, cuda)
                face, color, text = (MINT, GREEN, "runs") if fine else (PEACH, ORANGE, "too new")
                _box(ax, (1.5 * k, row), 1.5, text, face, color, color)
    ax.text(-0.2, len(releases) - 0.35, "wheel for CUDA", ha="right", va="center", color=GRAY)
    for k, cuda in enumerate(columns):
        ax.text(1.5 * k + 0.75, len(releases) - 0.35, cuda, ha="center", va="center")
    shown = newest_cuda(driver) or "11.x or older"
    title = f"driver {driver}: nvidia-smi shows CUDA {shown}"
    ax.text(0.75 * len(columns), len(releases) + 0.35, title, ha="center", va="center", size=12)
    _frame(ax, (-2.8, 1.5 * len(columns) + 0.1), (-0.6, len(releases) + 0.7))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> HTML:
    """Return a table with one line for each of `rows`; cells may hold links."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return HTML(
        '<table class="table">' + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"
    )


def _box(ax: Axes, at: tuple, width: float, text: str, face: str, color: str, edge="none") -> None:
    """Draw a box of `width` and height 0.8, its left edge at `at`, with two lines of text."""
    corner = (at[0] + 0.06, at[1] - 0.4)
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "fc": face, "ec": edge, "lw": 0.8}
    ax.add_patch(FancyBboxPatch(corner, width - 0.12, 0.8, **style))
    ax.text(at[0] + width / 2, at[1], text, color=color, ha="center", va="center", size=9)


def _frame(ax: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.axis("off")
    ax.set(xlim=x, ylim=y)
