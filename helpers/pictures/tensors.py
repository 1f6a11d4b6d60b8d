"""Chapter 02, drawn: ranks, strides over a strip of memory, broadcasting, gather."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from helpers.tensors import element_offset, shares_storage

BLUE, PALE, ORANGE, PEACH, GREEN, GRAY = "#0072B2 #D3E5F2 #D55E00 #F8DCC4 #00795A #666666".split()
WALK = matplotlib.colormaps["viridis_r"]


def draw_ranks(ax: Axes) -> None:
    """Draw a scalar, a vector, a matrix and a rank-3 tensor as boxes of numbers."""
    left = 0.0
    for rank, shape in enumerate([(), (4,), (3, 4), (2, 3, 4)]):
        layers = torch.arange(torch.Size(shape).numel()).view((1, 1, 1, *shape)[-3:])
        for depth in reversed(range(len(layers))):  # the far layer first
            corner, color = (left + 0.7 * depth, 0.7 * depth), WALK(0.15 + 0.35 * depth)
            _grid(ax, corner, layers[depth], lambda *_, color=color: color, -depth)
        ax.text(left + layers.shape[2] / 2 - 0.5, -4.0, f"rank {rank}\nshape {shape}", ha="center")
        left += layers.shape[2] + 1.9
    _frame(ax, (-1.6, left - 1.2), (-4.2, 1.3))


def draw_strip(ax: Axes, base: Tensor, name: str, view: Tensor) -> None:
    """Draw a view [C] or [R, C] as a grid over its storage, colored by the order of reading."""
    memory = view.new_empty(0).set_(view.untyped_storage())
    indices = list(product(*map(range, view.shape)))
    offsets = [element_offset(i, view.stride(), view.storage_offset()) for i in indices]
    colors = {at: WALK((k + 0.7) / len(offsets)) for k, at in reversed([*enumerate(offsets)])}
    _grid(ax, (0, 0), memory[None], lambda _, at: colors.get(at, "white"))
    for a, b in pairwise(offsets):
        arrow = {"arrowstyle": "-|>", "mutation_scale": 7, "color": colors[b], "shrinkA": 0}
        arrow["connectionstyle"] = f"arc3,rad={-0.32 if a < b else 0.32}"
        if a != b:
            ax.annotate("", (b, 0.5), (a, 0.5), arrowprops=arrow)
    table = torch.tensor(offsets).view(-1, view.shape[-1])
    _grid(ax, (0, 5.8), memory[table], lambda r, c: colors[table[r, c].item()])
    ax.text(6, 6.2, name, va="top", size=13)
    facts = (tuple(view.shape), view.stride(), view.storage_offset(), view.is_contiguous())
    for row, key in enumerate(["shape", "stride", "offset", "contiguous"]):
        ax.text(6, 4.8 - 0.6 * row, key, color=GRAY)
        ax.text(8.6, 4.8 - 0.6 * row, f"{facts[row]}")
    whose = "the storage of x" if shares_storage(view, base) else "a storage of its own"
    ax.text(-0.5, -0.65, f"{whose}, from the first address to the last", va="top", color=GRAY)
    _frame(ax, (-0.6, max(len(memory), 12) - 0.4), (-1.3, 6.4))


def draw_broadcast(ax: Axes, a: Sequence[int], b: Sequence[int]) -> None:
    """Draw two shapes aligned from the right, and the result or PyTorch's own error."""
    try:
        result = (torch.empty(a) + torch.empty(b)).shape
        verdict, color = f"a + b has shape {tuple(result)}", GREEN
    except RuntimeError as error:
        result, verdict, color = (), f"{error}".replace(" must", "\nmust"), ORANGE
    for place in range(1, max(len(a), len(b)) + 1):
        x, y = (shape[-place] if place <= len(shape) else 1 for shape in (a, b))
        word = "equal" if x == y else "stretch" if 1 in (x, y) else "clash"
        for row, (shape, size) in enumerate([(a, x), (b, y)]):
            grows = word == "stretch" and size == 1
            face = ORANGE if word == "clash" else PEACH if grows else "white"
            text = f"1 → {x * y}" if grows else size
            _box(ax, (-1.6 * place, -1.1 * row), text, face, 1.5, place > len(shape))
        if result:
            _box(ax, (-1.6 * place, -3.1), result[-place], "#CDE8DF", 1.5)
        ax.text(-1.6 * place, 0.75, f"dim {-place}", ha="center", color=GRAY)
        ax.text(-1.6 * place, -2.1, word, ha="center", color=ORANGE if word == "clash" else GRAY)
    for row, label in enumerate([f"a {tuple(a)}", f"b {tuple(b)}"]):
        ax.text(-5.9, -1.1 * row, label, ha="right", va="center", size=12)
    ax.text(-5.5, -4.4, verdict, ha="center", va="center", color=color)
    _frame(ax, (-10.2, -0.6), (-5.0, 1.3))


def draw_gather(ax: Axes, x: Tensor, index: Tensor, dim: int, at: tuple[int, int]) -> None:
    """Draw `x.gather(dim, index)` of two matrices, with the way to element `at` of the result."""
    out, source, left = x.gather(dim, index), [*at], 0.0
    source[dim] = index[at].item()
    for name, grid, mark in [("x", x, source), ("index", index, [*at]), ("result", out, [*at])]:

        def face(*cell: int, mark=mark, reach=name == "x") -> str:
            reached = reach and cell[1 - dim] == at[1 - dim]
            return BLUE if [*cell] == mark else PALE if reached else "white"

        _grid(ax, (left, 0), grid, face)
        ax.text(left + (grid.shape[1] - 1) / 2, 0.8, name, ha="center", size=11)
        left += grid.shape[1] + 1.5
    inner = "index[{0}, {1}], {1}" if dim == 0 else "{0}, index[{0}, {1}]"
    line = f"result{[*at]} = x[{inner.format(*at)}] = x{source} = {out[at].item()}"
    ax.text((left - 2.5) / 2, -len(x) - 0.2, line, ha="center", size=12)
    _frame(ax, (-0.6, left - 1.9), (-len(x) - 0.5, 1.3))


def _grid(ax: Axes, corner: tuple, values: Tensor, face: Callable, depth: int = 0) -> None:
    """Draw a matrix [R, C] of boxes, the first at `corner`; `face(row, column)` colors one."""
    for row, column in product(*map(range, values.shape)):
        where = (corner[0] + column, corner[1] - row)
        _box(ax, where, values[row, column].item(), face(row, column), depth=depth)


def _box(ax: Axes, at: tuple, text: object, face: object, width=1.0, dashed=False, depth=0) -> None:
    style = {"fc": face, "ec": "#444444", "lw": 0.8, "ls": "--" if dashed else "-"}
    ax.add_patch(Rectangle((at[0] - width / 2, at[1] - 0.5), width, 1, zorder=2 + depth, **style))
    color = "white" if sum(matplotlib.colors.to_rgb(face)) < 1.5 else "black"
    ax.text(*at, text, color=color, ha="center", va="center_baseline", zorder=2.1 + depth)


def _frame(ax: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.axis("off")
    ax.set(xlim=x, ylim=y, aspect="equal")
