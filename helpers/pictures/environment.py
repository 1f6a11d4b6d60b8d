"""Chapter 01, drawn: the layers of the ecosystem, and which wheel starts on a driver."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from helpers.environment import driver_starts, newest_cuda
from helpers.pictures.draw import BLUE, GRAY, GREEN, MINT, ORANGE, PALE, PEACH, box, frame

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
    for row, (layer, names) in enumerate(reversed(LAYERS.items())):
        ax.text(-0.15, row, layer, ha="right", va="center", color=GRAY)
        width = 10 / len(names)
        for k, name in enumerate(names):
            at = ((k + 0.5) * width, row)
            if name in LINES[line]:
                _plate(ax, at, width, name, BLUE, color="white")
            else:
                _plate(ax, at, width, name, PALE)
    ax.text(5, 4.95, line, ha="center", va="center", size=12, family="monospace", color=BLUE)
    frame(ax, (-2.4, 10.1), (-0.6, 5.3), equal=False)


def draw_wheels(ax: Axes, driver: str, releases: Mapping[str, Sequence[str]]) -> None:
    """Draw which CUDA wheels of each PyTorch release start on `driver`.

    releases: PyTorch version -> CUDA versions of its wheels, e.g. {"2.14": ["12.6", "13.0"]}.
    """
    columns = sorted({cuda for wheels in releases.values() for cuda in wheels}, key=float)
    for row, (release, wheels) in enumerate(reversed(releases.items())):
        ax.text(-0.2, row, f"torch {release}", ha="right", va="center")
        for k, cuda in enumerate(columns):
            at = (1.5 * (k + 0.5), row)
            if cuda in wheels and driver_starts(driver, cuda):
                _plate(ax, at, 1.5, "runs", MINT, color=GREEN, edge=GREEN)
            elif cuda in wheels:
                _plate(ax, at, 1.5, "too new", PEACH, color=ORANGE, edge=ORANGE)

    head = len(releases) - 0.35
    ax.text(-0.2, head, "wheel for CUDA", ha="right", va="center", color=GRAY)
    for k, cuda in enumerate(columns):
        ax.text(1.5 * k + 0.75, head, cuda, ha="center", va="center")

    shown = newest_cuda(driver)
    title = f"driver {driver}: nvidia-smi shows CUDA {'11.x or older' if shown is None else shown}"
    ax.text(0.75 * len(columns), head + 0.7, title, ha="center", va="center", size=12)
    frame(ax, (-2.8, 1.5 * len(columns) + 0.1), (-0.6, head + 1.05), equal=False)


def _plate(
    ax: Axes,
    at: tuple[float, float],
    width: float,
    text: str,
    face: str,
    *,
    color: str = "black",
    edge: str = "none",
) -> None:
    """Draw a rounded box for up to two lines of text, `at` its centre, in a column of `width`."""
    size = (width - 0.12, 0.8)
    box(ax, at, text, face, size=size, edge=edge, color=color, fontsize=9, rounded=0.1)
