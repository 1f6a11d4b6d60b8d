"""Chapter 06, drawn: the five steps, optimizers on a valley, learning rates, clipping."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

BLUE, PALE, ORANGE, GREEN, GRAY = "#0072B2 #D3E5F2 #D55E00 #00795A #666666".split()

STEPS = {
    "start": "the batch is there",
    "forward": "z = model(x)",
    "loss": "loss = loss_fn(z, y)",
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
}


def watch_one_update() -> dict[str, list[str]]:
    """Make one update of a tiny model; for each of the five steps, say what is in memory after it.

    Each entry: tensors saved for backward, loss, norm of the gradient, weights, momentum.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.arange(6.0).view(2, 3).double() / 6, torch.tensor([0, 1])
    first = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    seen, saved, loss = {}, [], None

    def look(stage: str, graph: str) -> None:
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        moved = nn.utils.parameters_to_vector(model.parameters()).detach() - first
        buffers = [s["momentum_buffer"].flatten() for s in optimizer.state.values()]
        seen[stage] = [
            graph,
            "–" if loss is None else f"{loss.item():.3f}",
            f"norm {torch.cat(grads).norm():.3f}" if grads else "None",
            f"moved by {moved.norm():.4f}" if moved.any() else "as they were",
            f"norm {torch.cat(buffers).norm():.3f}" if buffers else "none yet",
        ]

    look("start", "–")
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        z = model(x)
        look("forward", f"{len(saved)} tensors saved")
        loss = nn.functional.cross_entropy(z, y)
        look("loss", f"{len(saved)} tensors saved")
    loss.backward()
    look("backward", "freed")
    for stage in ("step", "zero_grad"):
        getattr(optimizer, stage)()
        look(stage, "freed")
    return seen


def draw_five_steps(ax: Axes, after: str) -> None:
    """Draw what is in memory once one of the five steps is done; what it changed stands out."""
    seen, stages = watch_one_update(), list(STEPS)
    at = stages.index(after)
    names = ["graph", "loss", "gradients", "weights", "momentum"]
    facts = zip(stages[1:], names, seen[after], seen[stages[max(at - 1, 0)]], strict=True)
    for row, (stage, name, value, old) in enumerate(facts):
        face = BLUE if stage == after else PALE if row < at else "white"
        ax.add_patch(Rectangle((0, -row), 4.7, 0.8, fc=face, ec=GRAY, lw=0.8))
        white = "white" if stage == after else "black"
        changed = "black" if value == old else ORANGE
        texts = [(0.15, f"{row + 1} {STEPS[stage]}", white), (5.1, name, GRAY)]
        for left, text, color in [*texts, (7.0, value, changed)]:
            ax.text(left, 0.4 - row, text, color=color, va="center", family="monospace")
    ax.set(xlim=(-0.1, 10.6), ylim=(-4.1, 1))
    ax.axis("off")


def valley(p: Tensor) -> Tensor:
    """Rosenbrock's function, 10 for 100: p [..., 2] -> [...]; the lowest point is 0 at (1, 1)."""
    x, y = p.unbind(-1)
    return (1 - x) ** 2 + 10 * (y - x**2) ** 2


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "Nesterov": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "RMSprop": torch.optim.RMSprop,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "LBFGS": lambda p, lr: torch.optim.LBFGS(p, lr, max_iter=1),
}


def descend(name: str, lr: float, steps: int = 60) -> Tensor:
    """Return the path [steps + 1, 2] of `torch.optim`'s optimizer on the valley, in float64."""
    p = nn.Parameter(torch.tensor([-1.3, 1.4], dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([p], lr=lr)

    def closure() -> Tensor:
        optimizer.zero_grad()
        valley(p).backward()
        return valley(p)

    path = [p.detach().clone()]
    while len(path) <= steps and path[-1].abs().max() < 1e3:
        optimizer.step(closure)
        path.append(p.detach().clone())
    return torch.stack(path)


def draw_descent(ax: Axes, optimizer: str, lr: float) -> None:
    """Draw 60 steps of one optimizer on the valley, and say where they end."""
    x, y = np.meshgrid(np.linspace(-1.8, 1.8, 43), np.linspace(-0.9, 2.3, 39))
    z = valley(torch.from_numpy(np.stack([x, y], -1))).numpy()
    ax.contour(x, y, z, levels=[0.5, 5, 20], colors=GRAY, linewidths=0.5, alpha=0.6)
    shown = (path := descend(optimizer, lr)).clamp(-3, 3)
    ax.plot(*shown.T, color=BLUE, lw=1.2)
    ax.plot(*shown[::6].T, ".", color=BLUE, ms=5)
    ax.plot(*shown[0], "o", color="black", ms=5)
    ax.plot(1, 1, "*", color=GREEN, ms=12)
    end = valley(path[-1]).item()
    ax.plot(*shown[-1], "o", color=ORANGE, ms=7)
    ax.set_title(f"loss {end:.0e}" if end < 1e3 else f"lost after {len(path) - 1} steps", size=10)
    ax.set(xlim=(-1.8, 1.8), ylim=(-0.9, 2.3), xticks=[], yticks=[])


def draw_panels(panels: dict[str, dict], dashed: dict[str, list], *, x: str, y: str) -> None:
    """Show six panels of named lines; `dashed` ones lie behind, each with an axis of its own."""
    figure, axes = plt.subplots(2, 3, figsize=(7.6, 3.7))
    for ax, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for name, values in lines.items():
            ax.plot(values, label=name)
        if title in dashed:
            behind = ax.twinx()
            behind.plot(dashed[title], color=GRAY, lw=1, ls="--")
            behind.set(yticks=[], ylim=(0, 1.5 * dashed[title][0]))
        ax.set_title(title, size=10)
        _ = ax.set_yscale("log") if "log" in title else ax.set_ylim(bottom=0)
    if len(lines) > 1:
        axes[0, 0].legend(frameon=False)
    figure.supxlabel(x, size=10)
    figure.supylabel(y, size=10)
    plt.show()


def draw_clip(ax: Axes, angle: int) -> None:
    """Draw a gradient of length 2.5 in two dimensions, clipped to norm 1 and to values of 1."""
    turn = np.deg2rad(angle)
    arrows = {"gradient": (torch.tensor([2.5 * np.cos(turn), 2.5 * np.sin(turn)]), GRAY)}
    by_norm, by_value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
    for name, clip, color in [("by value", by_value, ORANGE), ("by norm", by_norm, BLUE)]:
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        p.grad = arrows["gradient"][0].clone()
        clip([p], 1.0)
        arrows[name] = p.grad, color
    for name, (g, color) in arrows.items():
        style = {"arrowstyle": "-|>", "color": color, "lw": 2}
        ax.annotate("", g.tolist(), (0, 0), arrowprops=style)
        ax.plot([], [], color=color, label=name)
    g = arrows["by value"][0]
    turned = round(abs(torch.rad2deg(torch.atan2(g[1], g[0])).item() - angle))
    ax.set_title(f"by value: turned {turned}°, length {g.norm():.1f}", color=ORANGE, size=10)
    ax.add_patch(Circle((0, 0), 1, fc="none", ec=BLUE, ls="--"))
    ax.add_patch(Rectangle((-1, -1), 2, 2, fc="none", ec=ORANGE, ls="--"))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set(xlim=(-1.2, 2.7), ylim=(-1.2, 2.7), aspect="equal", xticks=[], yticks=[])
