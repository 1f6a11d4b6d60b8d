"""Chapter 16, exercises: a grid with a zero point, rows of their own, bytes, corrected sums."""

import torch
from torch import Tensor

from helpers.exercises.harness import Exercise
from helpers.quantization import grid_of

# ---- 1: scale and zero point of a range


def choose_grid(lowest: float, highest: float, bits: int) -> tuple[float, int]:
    """Cover [lowest, highest] and 0 with the integers 0..2**bits - 1; [0, 0] has the scale 1."""
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    scale = (highest - lowest) / (2**bits - 1)
    if scale == 0:  # nothing but zeros
        scale = 1.0
    return scale, round(-lowest / scale)


def _ranges() -> list[tuple[float, float, int]]:
    drawn = (torch.rand(6, 2, dtype=torch.float64) * 5 + 0.1).tolist()
    cases = [
        (-1.0, 3.0, 2),
        (-1.0, 1.0, 8),
        (0.0, 6.0, 8),
        (2.0, 6.0, 8),
        (-6.0, -2.0, 4),
        (0.0, 0.0, 8),
    ]
    widths = [2, 3, 4, 5, 8, 8]
    return cases + [(-a, b, bits) for (a, b), bits in zip(drawn, widths, strict=True)]


# ---- 2: a weight whose rows have scales of their own


def quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return int8 integers and one scale for each row; a row of zeros has the scale 1."""
    grid = grid_of(weight, bits, channel=0)
    return grid.quantize(weight), grid.scale.flatten()


def _weights() -> list[tuple[Tensor, int]]:
    plain = torch.randn(3, 5, dtype=torch.float64)
    rows = torch.randn(4, 6, dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [50.0], [0.2]])
    zeros = torch.randn(3, 4, dtype=torch.float64)
    zeros[1] = 0
    turned = torch.randn(6, 4, dtype=torch.float64).T
    negative = torch.tensor([[-2.0, 0.5, 1.0]], dtype=torch.float64)
    return [(plain, 8), (rows, 8), (rows, 4), (zeros, 4), (turned, 3), (negative, 2)]


# ---- 3: how many bytes a quantized weight takes


def weight_bytes(rows: int, columns: int, bits: int, group: int) -> int:
    """Bits for the integers, 16 for the scale of each group, in whole bytes."""
    total = rows * columns * bits + rows * (columns // group) * 16
    return (total + 7) // 8


def _sizes() -> list[tuple[int, int, int, int]]:
    cases = [(4096, 4096, 4, 128), (4096, 4096, 4, 32), (10, 64, 8, 64), (1, 32, 4, 32)]
    return [*cases, (3, 15, 3, 5), (7, 6, 2, 2), (5, 8, 3, 8)]


# ---- 4: the sums of an integer product, corrected for a zero point


def corrected_sums(x: Tensor, zero_point: int, weight: Tensor) -> Tensor:
    """Return (x - zero_point) @ weight.T in int32, for uint8 [N, in] and int8 [out, in]."""
    return (x.to(torch.int32) - zero_point) @ weight.to(torch.int32).T


def _integers() -> list[tuple[Tensor, int, Tensor]]:
    cases = []
    for n, inputs, outputs, zero in [(2, 3, 4, 0), (3, 40, 5, 128), (1, 300, 2, 255), (4, 7, 1, 3)]:
        x = torch.randint(0, 256, (n, inputs), dtype=torch.uint8)
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        cases.append((x, zero, weight))
    full = torch.full((1, 2000), 255, dtype=torch.uint8)
    return [*cases, (full, 0, torch.full((2, 2000), 127, dtype=torch.int8))]


EXERCISES = {
    "choose_grid": Exercise(reference=choose_grid, cases=_ranges),
    "quantize_rows": Exercise(reference=quantize_rows, cases=_weights, scale=0.0),
    "weight_bytes": Exercise(reference=weight_bytes, cases=_sizes),
    "corrected_sums": Exercise(reference=corrected_sums, cases=_integers),
}
