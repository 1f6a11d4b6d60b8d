"""Chapter 13: what the record of `benchmarks/kernels.py` says, in the numbers that count."""

from typing import Any

from helpers.page.records import Record

WHO = ("ours", "eager", "compile", "liger", "cudnn")


def share(record: Record, row: dict[str, Any], who: str) -> float | None:
    """Return the share of the ceiling that `who` reaches in `row`; None where it did not run.

    No pass is faster than its bytes at the bandwidth of a copy, or its FLOPs at the rate of a
    bfloat16 product, both measured in the same run.
    """
    ceilings, time = record.provenance, row[who]
    moving = row["bytes"] / ceilings["copy_gb_per_s"] / 1e6  # ms
    computing = row["flop"] / ceilings["matmul_tflop_per_s"] / 1e9
    return time and max(moving, computing) / time[1]


def largest(record: Record) -> list[dict[str, Any]]:
    """Return the row of the largest size of each kernel and pass, in bfloat16."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in record.rows:
        if row["dtype"] == "bfloat16":
            found.setdefault((row["kernel"], row["pass"]), []).append(row)
    return [max(rows, key=lambda row: (row["bytes"], row["flop"])) for rows in found.values()]


def find(record: Record, kernel: str, shape: str) -> dict[str, Any]:
    """Return the first row of `kernel` at `shape`, in bfloat16. Raises ValueError without one."""
    for row in record.rows:
        if (row["kernel"], row["shape"], row["dtype"]) == (kernel, shape, "bfloat16"):
            return row
    raise ValueError(f"no row of {kernel!r} at {shape!r} in the record of {record.name!r}")


def gains(record: Record) -> dict[str, str]:
    """Return eager mode's time over ours for a large product and for a large bias and GELU."""
    rows = {
        "matmul": find(record, "matmul", "4096x4096x4096"),
        "gelu": find(record, "gelu", "8192x8192"),
    }
    return {name: f"{row['eager'][1] / row['ours'][1]:.2f}×" for name, row in rows.items()}


def score(record: Record) -> dict[str, str]:
    """Return the device and, for each contender, in how many of its cases ours is not 2% slower."""
    words = {"device": record.provenance["device"]}
    for who in WHO[1:]:
        cases = [row for row in record.rows if row[who]]
        level = sum(row["ours"][1] <= 1.02 * row[who][1] for row in cases)
        words[who] = f"{level}/{len(cases)}"
    return words


def peaks(record: Record | None, shape: str) -> str | None:
    """Return the peak memory of eager and of fused linear cross-entropy, in words, if on record."""
    if record is None:
        return None
    row = find(record, "linear_cross_entropy", shape)
    return f"{row['eager_peak'] / 1e9:.2f} GB, {row['ours_peak'] / 1e9:.2f} GB"
