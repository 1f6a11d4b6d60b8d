"""Chapter 14: what DDP sends: its buckets, reduced while backward still runs."""

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers import profiling


def trace_step(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Profile one call of `step()`; return what ran in backward, and what was reduced meanwhile.

    Rows in order of start, times in µs since the first row: kind ``backward`` with the name of an
    autograd node, or ``launch`` (backward hands a bucket over), or ``reduce`` with its bytes; the
    last two with a number, in order of time; start; end. A reduce of gloo is the whole all-reduce,
    on a thread of its own, the other rank waited for; with NCCL it is its place in the stream.
    Every rank has to call it: the others are waited for. Warm up first: after the first pass DDP
    makes new buckets.
    """
    prof = profiling.trace(step, record_shapes=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return bucket_rows(events)


BACKWARD = "autograd::engine::evaluate_function: "
ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


def bucket_rows(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of `trace_step` from the events of a Chrome trace."""
    rows, launches, reduces = [], itertools.count(), itertools.count()
    for event in sorted((e for e in events if "dur" in e), key=lambda e: e["ts"]):
        name = event["name"]
        row = {"name": name, "bucket": None, "bytes": None}
        if name.startswith(BACKWARD):
            row["kind"] = "backward"
            row["name"] = name.removeprefix(BACKWARD).removeprefix("torch::autograd::")
        elif name == "c10d::allreduce_":
            row |= {"kind": "launch", "bucket": next(launches)}
        elif name in ("gloo:all_reduce", "nccl:all_reduce"):
            elements, item = event["args"]["Input Dims"][0], event["args"]["Input type"][0]
            row |= {"kind": "reduce", "bucket": next(reduces)}
            row["bytes"] = torch.Size(elements).numel() * ITEM_BYTES[item]
        else:
            continue
        rows.append({**row, "start": event["ts"], "end": event["ts"] + event["dur"]})
    first = rows[0]["start"] if rows else 0.0
    return [{**r, "start": r["start"] - first, "end": r["end"] - first} for r in rows]
