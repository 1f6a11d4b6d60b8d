"""Wrong answers that chapter 11 must refuse, and right ones, written otherwise, that it takes."""

import statistics

import numpy as np
import pytest
import torch

from helpers.exercises import check


@pytest.fixture
def verdict(capsys):
    def of(name, answer):
        check(f"profiling.{name}", answer)
        return capsys.readouterr().out

    return of


# intensity


def intensity(m, k, n, dtype):
    return 2 * m * k * n / (dtype.itemsize * (m * k + k * n + m * n))


def by_bits(m, k, n, dtype):
    return 2 * m * n * k / ((m * k + n * (k + m)) * torch.finfo(dtype).bits / 8)


INTENSITY_WRONG = {
    "no bytes of an element": lambda m, k, n, dtype: 2 * m * k * n / (m * k + k * n + m * n),
    "always float32": lambda m, k, n, dtype: intensity(m, k, n, torch.float32),
    "one operation for two": lambda m, k, n, dtype: intensity(m, k, n, dtype) / 2,
    "the result is not written": lambda m, k, n, dtype: (
        2 * m * k * n / (dtype.itemsize * (m * k + k * n))
    ),
    "bits": lambda m, k, n, dtype: intensity(m, k, n, dtype) / 8,
    "bytes over FLOPs": lambda m, k, n, dtype: 1 / intensity(m, k, n, dtype),
    "wrong shapes": lambda m, k, n, dtype: (
        2 * m * k * n / (dtype.itemsize * (m * n + k * k + m * k))
    ),
    "a square one": lambda m, k, n, dtype: m / 6,
    "whole": lambda m, k, n, dtype: 2 * m * k * n // (dtype.itemsize * (m * k + k * n + m * n)),
    "k - 1 additions": lambda m, k, n, dtype: (
        m * n * (2 * k - 1) / (dtype.itemsize * (m * k + k * n + m * n))
    ),
    "only the first case": lambda m, k, n, dtype: 512 / 6,
}


# mfu


def mfu(parameters, tokens, seconds, peak):
    return 6 * parameters * tokens / seconds / peak


MFU_WRONG = {
    "forward only": lambda *a: mfu(*a) / 3,
    "backward only": lambda *a: mfu(*a) * 2 / 3,
    "per cent": lambda *a: mfu(*a) * 100,
    "no seconds": lambda parameters, tokens, seconds, peak: 6 * parameters * tokens / peak,
    "seconds above": lambda parameters, tokens, seconds, peak: (
        6 * parameters * tokens * seconds / peak
    ),
    "sum": lambda parameters, tokens, seconds, peak: 6 * (parameters + tokens) / seconds / peak,
    "whole": lambda parameters, tokens, seconds, peak: 6 * parameters * tokens // (seconds * peak),
    "rounded": lambda *a: round(mfu(*a), 6),
    "at most 1": lambda *a: max(mfu(*a), 1e-12),
    "recomputed forward": lambda *a: mfu(*a) * 8 / 6,
}


# faster


def at(readings, *places):
    return [sorted(readings)[place] for place in places]


def faster(a, b):
    (a_low, a_mid, a_high), (b_low, b_mid, b_high) = at(a, 2, 5, 8), at(b, 2, 5, 8)
    return a_mid / b_mid if a_high < b_low or b_high < a_low else None


def faster_by(percentiles, middle=statistics.median):
    def answer(a, b):
        (a_low, a_high), (b_low, b_high) = percentiles(a), percentiles(b)
        if a_low <= b_high and b_low <= a_high:
            return None
        return middle(a) / middle(b)

    return answer


def by_tensors(a, b):
    q = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    a, b = (torch.tensor(x, dtype=torch.float64).quantile(q) for x in (a, b))
    apart = a[2] < b[0] or b[2] < a[0]
    return (a[1] / b[1]).item() if apart else None


FASTER_RIGHT = {
    "by index": faster,
    "np.percentile": faster_by(lambda x: np.percentile(x, [20, 80]), np.median),
    "np.quantile": faster_by(lambda x: np.quantile(x, [0.2, 0.8])),
    "torch.quantile": by_tensors,
}
FASTER_WRONG = {
    "never None": lambda a, b: at(a, 5)[0] / at(b, 5)[0],
    "always None": lambda a, b: None,
    "upside down": lambda a, b: None if (r := faster(a, b)) is None else 1 / r,
    "means": faster_by(lambda x: at(x, 2, 8), statistics.mean),
    "extremes": faster_by(lambda x: at(x, 0, 10)),
    "quartiles": faster_by(lambda x: np.percentile(x, [25, 75])),
    "not sorted": faster_by(lambda x: (x[2], x[8])),
    "the middle of the unsorted": faster_by(lambda x: at(x, 2, 8), lambda x: x[5]),
    "touching is apart": lambda a, b: (
        at(a, 5)[0] / at(b, 5)[0]
        if at(a, 8)[0] <= at(b, 2)[0] or at(b, 8)[0] <= at(a, 2)[0]
        else None
    ),
    "only when b is faster": lambda a, b: (
        at(a, 5)[0] / at(b, 5)[0] if at(b, 8)[0] < at(a, 2)[0] else None
    ),
    "1 for None": lambda a, b: faster(a, b) or 1.0,
    "a difference": lambda a, b: at(a, 5)[0] - at(b, 5)[0] if faster(a, b) else None,
    "minima": faster_by(lambda x: at(x, 2, 8), min),
    "text": lambda a, b: str(faster(a, b)),
}


# idle


def idle(spans):
    spans = sorted(spans)
    reached, busy, longest = spans[0][0], 0.0, 0.0
    for start, end in spans:
        longest = max(longest, start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0]), longest


def by_sweep(spans):
    """Count how many run after each border; as NumPy numbers, in a list."""
    borders = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running, busy, longest, quiet_since = 0, 0.0, 0.0, None
    for (now, change), (after, _) in zip(borders, borders[1:], strict=False):
        running += change
        if running:
            busy += after - now
        quiet_since = now if running == 0 and quiet_since is None else quiet_since
        if running == 0:
            longest = max(longest, after - quiet_since)
        else:
            quiet_since = None
    return [np.float64(busy / (borders[-1][0] - borders[0][0])), np.float64(longest)]


def no_memory_of_the_latest_end(spans):
    spans, busy, longest = sorted(spans), 0.0, 0.0
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
        longest = max(longest, start - end)
    busy = sum(e - s for s, e in spans)
    return busy / (max(e for _, e in spans) - spans[0][0]), longest


def whole_of(spans):
    return max(e for _, e in spans) - min(s for s, _ in spans)


IDLE_RIGHT = {"one pass": idle, "a sweep over borders": by_sweep}
IDLE_WRONG = {
    "lengths added up": lambda spans: (
        sum(e - s for s, e in spans) / whole_of(spans),
        idle(spans)[1],
    ),
    "at most 1": lambda spans: (
        min(1.0, sum(e - s for s, e in spans) / whole_of(spans)),
        idle(spans)[1],
    ),
    "no memory": no_memory_of_the_latest_end,
    "the idle share": lambda spans: (1 - idle(spans)[0], idle(spans)[1]),
    "swapped": lambda spans: idle(spans)[::-1],
    "from 0": lambda spans: (
        idle(spans)[0] * whole_of(spans) / max(e for _, e in spans),
        idle(spans)[1],
    ),
    "until the last to start": lambda spans: (
        idle(spans)[0] * whole_of(spans) / (sorted(spans)[-1][1] - sorted(spans)[0][0]),
        idle(spans)[1],
    ),
    "not sorted": lambda spans: (
        idle(spans)[0],
        max([0.0, *(b[0] - a[1] for a, b in zip(spans, spans[1:], strict=False))]),
    ),
    "all gaps": lambda spans: (idle(spans)[0], (1 - idle(spans)[0]) * whole_of(spans)),
    "gap as a share": lambda spans: (idle(spans)[0], idle(spans)[1] / whole_of(spans)),
    "busy time": lambda spans: (idle(spans)[0] * whole_of(spans), idle(spans)[1]),
    "share alone": lambda spans: idle(spans)[0],
    "seconds": lambda spans: (idle(spans)[0], idle(spans)[1] / 1e6),
}


# worst


def worst(table):
    wall = sum(row["self"] for row in table)
    top = max(table, key=lambda row: row["self"])
    return top["name"], wall / (wall - top["self"])


def by(key, whole=None):
    def answer(table):
        top = max(table, key=key)
        wall = sum(row["self"] for row in table) if whole is None else whole(table)
        return top["name"], wall / (wall - top["self"]) if wall != top["self"] else float("inf")

    return answer


def own(row):
    return row["self"]


WORST_RIGHT = {
    "a sum": worst,
    "Amdahl": lambda t: [worst(t)[0], 1 / (1 - max(map(own, t)) / sum(map(own, t)))],
    "np.float64": lambda t: (worst(t)[0], np.float64(worst(t)[1])),
}
WORST_WRONG = {
    "most calls": by(lambda row: row["calls"]),
    "largest total": by(lambda row: row["total"]),
    "longest call": by(lambda row: row["self"] / row["calls"]),
    "the first row": lambda t: by(lambda row: row is t[0])(t),
    "total as the whole": by(own, lambda t: sum(row["total"] for row in t)),
    "the largest total as the whole": by(own, lambda t: max(row["total"] for row in t)),
    "the share": lambda t: (worst(t)[0], max(map(own, t)) / sum(map(own, t))),
    "one over the share": lambda t: (worst(t)[0], sum(map(own, t)) / max(map(own, t))),
    "swapped": lambda t: worst(t)[::-1],
    "name alone": lambda t: worst(t)[0],
    "the row": lambda t: (max(t, key=own), worst(t)[1]),
    "rounded": lambda t: (worst(t)[0], round(worst(t)[1], 1)),
    "per cent": lambda t: (worst(t)[0], 100 * worst(t)[1]),
}

RIGHT = {
    "intensity": {
        "formula": intensity,
        "in bits": by_bits,
        "np": lambda *a: np.float64(intensity(*a)),
    },
    "mfu": {
        "two divisions": mfu,
        "tokens a second": lambda n, d, s, p: (d / s) * n * 6 / p,
        "two passes": lambda n, d, s, p: (2 * n * d + 4 * n * d) / (s * p),
    },
    "faster": FASTER_RIGHT,
    "idle": IDLE_RIGHT,
    "worst": WORST_RIGHT,
}
WRONG = {
    "intensity": INTENSITY_WRONG,
    "mfu": MFU_WRONG,
    "faster": FASTER_WRONG,
    "idle": IDLE_WRONG,
    "worst": WORST_WRONG,
}


def test_an_answer_that_sorts_its_argument_is_told_so(verdict):
    def sorting(a, b):
        a.sort()
        b.sort()
        return faster(a, b)

    assert "argument 2 was changed in place" in verdict("faster", sorting)
