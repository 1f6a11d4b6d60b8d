"""Chapter 11: reference and cases of its exercises."""

import numpy as np
import torch

from helpers import profiling
from helpers.exercises.harness import Exercise

# intensity


def _counted_intensity(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    """What a product really does and moves; on the device ``meta`` it takes no memory."""
    a = torch.empty(m, k, dtype=dtype, device="meta")
    b = torch.empty(k, n, dtype=dtype, device="meta")
    flops, moved = profiling.flops_and_bytes(lambda: a @ b)
    return flops / moved


def _products() -> list[tuple]:
    return [
        (512, 512, 512, torch.float32),
        (1, 4096, 64, torch.float16),
        (8, 64, 2, torch.float64),
        (4, 1, 16, torch.bfloat16),
        (1, 1, 1, torch.float32),
        (3, 5, 7, torch.float64),
        (8192, 8192, 1, torch.bfloat16),
    ]


# mfu


def _model_flops_utilization(parameters: int, tokens: int, seconds: float, peak: float) -> float:
    """Forward 2 FLOPs for each token and parameter, backward 4; PaLM, appendix B."""
    return 6 * parameters * tokens / (seconds * peak)


def _trainings() -> list[tuple]:
    return [
        (7_000_000_000, 4_000_000, 420.0, 989.4e12),
        (124_000_000, 500_000, 1.7, 312e12),
        (10, 3, 0.25, 1e15),  # tiny: a difference must not hide below a tolerance
        (1_000_000, 0, 2.0, 1e12),  # nothing trained
    ]


# faster


def _by_percentiles(a: list[float], b: list[float]) -> float | None:
    a_low, a_middle, a_high = np.percentile(a, [20, 50, 80])
    b_low, b_middle, b_high = np.percentile(b, [20, 50, 80])
    if a_high < b_low or b_high < a_low:
        return float(a_middle / b_middle)
    return None


def _readings() -> list[tuple]:
    steady = [8.0] * 11
    disturbed = [2.0] * 9 + [90.0, 400.0]  # by another process, twice
    spread = [9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 0.5, 12.0]  # 20 % to 80 %: 2 to 8
    return [
        (steady, disturbed),
        (disturbed, steady),
        (steady, [8.5] * 11),  # slower, and certainly so
        (steady, spread),  # they touch at 8
        (spread, steady),
        ([1.0] * 3 + [1.5] * 8, spread),  # below 2, though the extremes overlap
        (spread, [4.0] * 5 + [10.0] * 6),  # the medians differ, the ranges overlap
        (steady, steady),
        ([2.0] * 8 + [64.0] * 3, [1.0] * 11),  # three of 11 disturbed: within 20 % to 80 %
        ([1.0] + [4.0] * 10, [16.0] * 11),
        ([5.0, 3.0, 4.0, 3.5, 4.5, 5.5, 3.25, 4.75, 5.25, 6.0, 2.5], [1.0] * 11),
        (list(reversed(spread)), [0.25, 16.0] * 5 + [0.5]),
    ]


# idle


def _spans() -> list[tuple]:
    traces = [
        [(0.0, 10.0)],
        [(0.0, 2.0), (8.0, 10.0)],
        [(8.0, 10.0), (0.0, 2.0), (3.0, 4.0)],  # any order
        [(0.0, 6.0), (4.0, 9.0)],  # they overlap
        [(5.0, 20.0), (6.0, 7.0), (21.0, 22.0)],  # one within another
        [(100.0, 104.0), (104.0, 105.0)],  # no gap, and it does not start at 0
        [(0.0, 9.0), (1.0, 2.0), (3.0, 4.0), (9.5, 12.0)],
        [(0.0, 9.0), (10.0, 20.0), (11.0, 12.0)],  # the last to start is not the last to end
        [(50.0, 60.0), (10.0, 20.0), (12.0, 40.0), (15.0, 18.0), (70.0, 90.0), (70.0, 75.0)],
        [(1.0, 1.0), (3.0, 4.0)],  # a kernel too short for the clock
    ]
    return [(spans,) for spans in traces]


# worst


def _most_time_of_its_own(table: list[dict]) -> tuple[str, float]:
    whole = sum(row["self"] for row in table)
    top = max(table, key=lambda row: row["self"])
    return top["name"], whole / (whole - top["self"])


def _table(*rows: tuple) -> list[dict]:
    keys = ("name", "calls", "self", "total")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _tables() -> list[tuple]:
    tables = [
        _table(("step", 1, 64, 1024), ("mm", 8, 512, 512), ("add", 99, 448, 448)),
        _table(("stack", 2, 768, 900), ("to", 5000, 132, 132), ("mm", 3, 124, 124)),
        _table(("relu", 7, 256, 256), ("copy", 1, 96, 480), ("item", 300, 160, 160)),
        _table(("step", 1, 3.5, 90.0), ("add", 70, 20.5, 20.5), ("mm", 2, 70.0, 70.0)),
        _table(("idle", 4, 0, 12), ("sum", 40, 9, 9), ("exp", 3, 3, 3)),
        _table(
            ("forward", 1, 1, 11), ("addmm", 10, 10, 10), ("backward", 1, 2, 8), ("mm", 1, 6, 6)
        ),
    ]
    return [(table,) for table in tables]


EXERCISES = {
    "intensity": Exercise(reference=_counted_intensity, cases=_products),
    "mfu": Exercise(reference=_model_flops_utilization, cases=_trainings, scale=0.0),
    "faster": Exercise(reference=_by_percentiles, cases=_readings),
    "idle": Exercise(reference=profiling.busy_share, cases=_spans),
    "worst": Exercise(reference=_most_time_of_its_own, cases=_tables),
}
