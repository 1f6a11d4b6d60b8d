"""Chapter 02, drawn: strides over a strip of memory, broadcasting, gather."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import matplotlib
import torch
from matplotlib.axes import Axes
from torch import Tensor

from helpers.pictures.draw import (
    BLUE,
    GRAY,
    GREEN,
    MINT,
    ORANGE,
    PALE,
    PEACH,
    arrow,
    box,
    frame,
)
from helpers.tensors import element_offset, shares_storage

WALK = matplotlib.colormaps["viridis_r"]


def draw_strip(ax: Axes, base: Tensor, name: str, view: Tensor) -> None:
    """Draw a view [C] or [R, C] as a grid over its storage, colored by the order of reading."""
    memory = view.new_empty(0).set_(view.untyped_storage())
    indices = list(product(*map(range, view.shape)))
    offsets = [element_offset(i, view.stride(), view.storage_offset()) for i in indices]
    colors = {}
    for k, place in enumerate(offsets):
        colors.setdefault(place, WALK((k + 0.7) / len(offsets)))  # of the first visit
    _grid(ax, (0, 0), memory[None], lambda _, at: colors.get(at, "white"))
    for a, b in pairwise(offsets):
        if a != b:
            arrow(ax, (a, 0.5), (b, 0.5), colors[b], bend=-0.32 if a < b else 0.32)
    table = torch.tensor(offsets).view(-1, view.shape[-1])
    _grid(ax, (0, 5.8), memory[table], lambda r, c: colors[table[r, c].item()])
    ax.text(5.4, 6.2, name, va="top", size=13)
    facts = {
        "shape": tuple(view.shape),
        "stride()": view.stride(),
        "storage_offset()": view.storage_offset(),
        "is_contiguous()": view.is_contiguous(),
        "shares_storage(x)": shares_storage(view, base),
    }
    for row, (key, value) in enumerate(facts.items()):
        ax.text(5.4, 4.9 - 0.6 * row, key, color=GRAY)
        ax.text(9.6, 4.9 - 0.6 * row, f"{value}")
    for place in range(len(memory)):
        ax.text(place, -0.75, place, ha="center", va="top", color=GRAY, size=8)
    frame(ax, (-0.6, max(len(memory), 12) - 0.4), (-1.3, 6.4))


def draw_broadcast(ax: Axes, a: Sequence[int], b: Sequence[int]) -> None:
    """Draw two shapes aligned from the right, and the result or PyTorch's own error."""
    try:
        result = (torch.empty(a) + torch.empty(b)).shape
        verdict = f"(a + b).shape = {tuple(result)}"
        color = GREEN
    except RuntimeError as error:
        result = ()
        verdict = f"{error}".replace(" must", "\nmust")
        color = ORANGE
    for place in range(1, max(len(a), len(b)) + 1):
        x, y = (shape[-place] if place <= len(shape) else 1 for shape in (a, b))
        fits = x == y or 1 in (x, y)
        for row, (shape, size) in enumerate([(a, x), (b, y)]):
            grows = size == 1 and x != y
            face = _face(fits, grows)
            text = f"1 → {x * y}" if grows else size
            missing = place > len(shape)
            at = (-1.6 * place, -1.1 * row)
            box(ax, at, text, face, size=(1.5, 1), color=_ink(face), dashed=missing)
        if result:
            box(ax, (-1.6 * place, -3.1), result[-place], MINT, size=(1.5, 1))
        ax.text(-1.6 * place, 0.75, f"dim {-place}", ha="center", color=GRAY)
        mark, ink = ("✓", GREEN) if fits else ("✗", ORANGE)
        ax.text(-1.6 * place, -2.15, mark, ha="center", color=ink, size=12)
    for row, label in enumerate([f"a {tuple(a)}", f"b {tuple(b)}"]):
        ax.text(-5.9, -1.1 * row, label, ha="right", va="center", size=12)
    ax.text(-5.5, -4.4, verdict, ha="center", va="center", color=color)
    frame(ax, (-10.2, -0.6), (-5.0, 1.3))


def draw_gather(ax: Axes, x: Tensor, index: Tensor, dim: int, at: tuple[int, int]) -> None:
    """Draw `x.gather(dim, index)` of two matrices, with the way to element `at` of `out`."""
    out = x.gather(dim, index)
    source = [*at]
    source[dim] = index[at].item()
    left = 0.0
    for name, grid, mark in [("x", x, source), ("index", index, [*at]), ("out", out, [*at])]:

        def face(*cell: int, mark=mark, reach=name == "x") -> str:
            if [*cell] == mark:
                return BLUE
            reached = reach and cell[1 - dim] == at[1 - dim]
            return PALE if reached else "white"

        _grid(ax, (left, 0), grid, face)
        ax.text(left + (grid.shape[1] - 1) / 2, 0.8, name, ha="center", size=11)
        left += grid.shape[1] + 1.5
    inner = "index[{0}, {1}], {1}" if dim == 0 else "{0}, index[{0}, {1}]"
    line = f"out{[*at]} = x[{inner.format(*at)}] = x{source} = {out[at].item()}"
    ax.text((left - 2.5) / 2, -len(x) - 0.2, line, ha="center", size=12)
    frame(ax, (-0.6, left - 1.9), (-len(x) - 0.5, 1.3))


def _face(fits: bool, grows: bool) -> str:
    """Color a length: one that is repeated, one that stays, or one that does not fit."""
    if not fits:
        return ORANGE
    return PEACH if grows else "white"


def _grid(ax: Axes, corner: tuple[float, float], values: Tensor, face: Callable) -> None:
    """Draw a matrix [R, C] of boxes, the first at `corner`; `face(row, column)` colors one."""
    for row, column in product(*map(range, values.shape)):
        color = face(row, column)
        at = (corner[0] + column, corner[1] - row)
        box(ax, at, values[row, column].item(), color, color=_ink(color))


def _ink(face: object) -> str:
    """Text that can be read on `face`: white on dark colours."""
    return "white" if sum(matplotlib.colors.to_rgb(face)) < 1.5 else "black"
