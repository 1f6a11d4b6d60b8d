"""Chapter 06, drawn: the five steps, optimizers on a valley, learning rates, clipping."""

from collections.abc import Callable

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

BLUE, PALE, ORANGE, GREEN, GRAY = "#0072B2 #D3E5F2 #D55E00 #00795A #666666".split()

FIVE_STEPS = {
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
    optimizer.step()
    look("step", "freed")
    optimizer.zero_grad()
    look("zero_grad", "freed")
    return seen


def draw_five_steps(ax: Axes, after: str) -> None:
    """Draw what is in memory once one of the five steps is done; what it changed stands out."""
    seen, stages = watch_one_update(), list(FIVE_STEPS)
    now, before = seen[after], seen[stages[max(stages.index(after) - 1, 0)]]
    for row, stage in enumerate(stages[1:]):
        done = stages.index(after) > row
        face = BLUE if stage == after else PALE if done else "white"
        ax.add_patch(Rectangle((0, -row), 4.4, 0.8, fc=face, ec=GRAY, lw=0.8))
        style = {"color": "white" if stage == after else "black", "va": "center"}
        ax.text(0.15, 0.4 - row, f"{row + 1}  {FIVE_STEPS[stage]}", family="monospace", **style)
    names = ["graph", "loss", "gradients", "weights", "momentum"]
    for row, (name, value, old) in enumerate(zip(names, now, before, strict=True)):
        changed = value != old
        ax.text(5.0, 0.4 - row, name, color=GRAY, va="center")
        color = ORANGE if changed else "black"
        ax.text(6.8, 0.4 - row, value, color=color, va="center", weight="bold" if changed else None)
    ax.set(xlim=(-0.1, 10.2), ylim=(-4.1, 1))
    ax.axis("off")


def valley(p: Tensor) -> Tensor:
    """A bent valley, steep across and flat along: p [..., 2] -> [...]; minimum 0 at (1, 1).

    Rosenbrock's function with 10 in place of 100 (Rosenbrock 1960).
    """
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
    x, y = np.meshgrid(np.linspace(-1.8, 1.8, 29), np.linspace(-0.9, 2.3, 27))
    z = valley(torch.from_numpy(np.stack([x, y], -1))).numpy()
    ax.contour(x, y, z, levels=[0.5, 4, 12, 30], colors=GRAY, linewidths=0.5, alpha=0.6)
    path = descend(optimizer, lr)
    shown = path.clamp(-3, 3)
    ax.plot(*shown.T, color=BLUE, lw=1.2)
    ax.plot(*shown[::5].T, ".", color=BLUE, ms=5)
    ax.plot(*shown[0], "o", color="black", ms=5)
    ax.plot(1, 1, "*", color=GREEN, ms=12)
    end = valley(path[-1]).item()
    ax.plot(*shown[-1], "o" if end < 1e3 else "X", color=ORANGE, ms=7)
    ax.set_title(f"loss {end:.0e}" if end < 1e3 else f"lost after {len(path) - 1} steps", size=10)
    ax.set(xlim=(-1.8, 1.8), ylim=(-0.9, 2.3), xticks=[], yticks=[])


def draw_panels(
    figure: Figure, panels: dict[str, dict[str, list[float]]], *, x: str, y: str, limit: float = 0
) -> None:
    """Draw six panels of named lines; a line called "behind" has an axis of its own."""
    for ax, (title, lines) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        ax.set_title(title, size=10)
        for name, values in lines.items():
            if name == "behind":
                other = ax.twinx()
                other.plot(values, color=GRAY, lw=0.8, ls="--")
                other.set(yticks=[], ylim=(0, 1.2 * values[0]))
            else:
                ax.plot(values, label=name)
        ax.set_ylim(0, limit or None)
    figure.axes[0].legend(frameon=False)
    figure.supxlabel(x, size=10)
    figure.supylabel(y, size=10)


def draw_clip(ax: Axes, angle: int, length: float) -> None:
    """Draw a gradient in two dimensions, clipped to norm 1 and to values of 1."""
    gradient = torch.polar(*torch.tensor([length, np.deg2rad(angle)]).double())
    gradient = torch.view_as_real(gradient)
    ax.add_patch(Circle((0, 0), 1, fc="none", ec=BLUE, ls="--"))
    ax.add_patch(Rectangle((-1, -1), 2, 2, fc="none", ec=ORANGE, ls="--"))
    clipped = {"gradient": (gradient, GRAY)}
    by_norm, by_value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
    for name, clip, color in [("by norm", by_norm, BLUE), ("by value", by_value, ORANGE)]:
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        p.grad = gradient.clone()
        clip([p], 1.0)
        clipped[name] = p.grad, color
    for name, (g, color) in clipped.items():
        turned = torch.rad2deg(torch.atan2(g[1], g[0])).item() - angle
        label = f"{name}: length {g.norm():.2f}, turned by {abs(round(turned)):d}°"
        ax.annotate("", g.tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": color})
        ax.plot([], [], color=color, label=label)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set(xlim=(-1.6, 3.1), ylim=(-1.2, 2.6), aspect="equal", xticks=[], yticks=[])
