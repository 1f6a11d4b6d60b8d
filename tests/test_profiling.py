import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from helpers import profiling, timing

CPU = torch.device("cpu")


# the profile as rows


def job():
    x = torch.ones(4, 4)
    with record_function("outer"):
        x = x.add(x)
        with record_function("inner"):
            x = x.mul(x)
    return x.sub(x)  # in no range


def test_operations_count_calls_and_bytes():
    prof = profiling.trace(job, steps=3, record_shapes=True, profile_memory=True)
    found = {row["name"]: row for row in profiling.operations(prof)}
    assert [found[f"aten::{name}"]["calls"] for name in ("add", "mul", "sub")] == [3, 3, 3]
    assert found["aten::add"]["bytes"] == 3 * 64
    assert all(row["self"] <= row["total"] + 1e-6 for row in found.values())
    selves = [row["self"] for row in profiling.operations(prof)]
    assert selves == sorted(selves, reverse=True)


def test_only_a_profile_sets_what_kineto_says():
    """The import changes nothing; a profile says nothing on stderr."""
    program = (
        "import os\n"
        "from helpers import profiling\n"
        "print(os.environ.get('KINETO_LOG_LEVEL'))\n"
        "profiling.trace(lambda: None)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_operations_by_shape():
    def products():
        for n in (2, 3, 3):
            _ = torch.ones(n, n) @ torch.ones(n, n)

    found = profiling.operations(profiling.trace(products, record_shapes=True), by_shape=True)
    calls = {row["shapes"][0][0]: row["calls"] for row in found if row["name"] == "aten::mm"}
    assert calls == {2: 1, 3: 2}


def test_ranges_hold_their_calls():
    prof = profiling.trace(job, steps=2)
    found = profiling.by_range(prof)
    spans = [e.time_range.elapsed_us() for e in prof.events() if e.name == "outer"]
    assert found["outer"]["us"] == pytest.approx(sum(spans))  # what lies inside counts once
    assert list(found) == ["outer"] and found["outer"]["calls"] == 4 and found["outer"]["us"] > 0


def test_the_loader_names_its_own_range():
    loader = DataLoader(torch.arange(6.0), batch_size=3)
    found = profiling.by_range(profiling.trace(lambda: [b + 1 for b in loader]))
    assert list(found) == ["data"] and found["data"]["calls"] > 6


def test_no_ranges():
    assert profiling.by_range(profiling.trace(lambda: torch.ones(1) + 1)) == {}


# the trace


@pytest.fixture
def slices(tmp_path):
    def products():
        with record_function("outer"):
            torch.ones(300, 300) @ torch.ones(300, 300)

    path = tmp_path / "trace.json"
    profiling.trace(products).export_chrome_trace(str(path))
    return profiling.read_trace(path)


def test_a_trace_is_read_as_nested_slices(slices):
    first = slices[0]
    assert (first["name"], first["kind"], first["depth"]) == ("outer", "user_annotation", 0)
    by_name = {s["name"]: s for s in slices}
    assert by_name["aten::matmul"]["depth"] == 1 and by_name["aten::mm"]["depth"] == 2
    assert all(0 <= s["start"] <= s["end"] <= first["end"] + 1 for s in slices)


def written(tmp_path, *events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return [(s["name"], s["start"], s["end"], s["depth"]) for s in profiling.read_trace(path)]


EVENT = {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.0, "dur": 10.0, "tid": 1}


def test_threads_do_not_nest_in_each_other(tmp_path):
    other = EVENT | {"tid": 2, "ts": 6.0, "dur": 1.0}
    found = written(tmp_path, EVENT, other, {"ph": "M", "name": "no slice"})
    assert found == [("k", 0.0, 10.0, 0), ("k", 1.0, 2.0, 0)]


def test_of_two_slices_that_start_together_the_longer_is_outside(tmp_path):
    inner = EVENT | {"name": "in", "dur": 3.0}
    after = EVENT | {"name": "after", "ts": 15.0}
    found = written(tmp_path, after, inner, EVENT)
    assert found == [("k", 0.0, 10.0, 0), ("in", 0.0, 3.0, 1), ("after", 10.0, 20.0, 0)]


def test_an_empty_trace(tmp_path):
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("spans", "share", "gap"),
    [
        ([(0, 10)], 1.0, 0),
        ([(0, 2), (8, 10)], 0.4, 6),
        ([(8, 10), (0, 2)], 0.4, 6),  # any order
        ([(0, 6), (4, 10)], 1.0, 0),  # overlap counts once
        ([(0, 9), (1, 2), (10, 12)], 11 / 12, 1),  # nested
        ([(5, 6), (6, 8)], 1.0, 0),
    ],
)
def test_busy_share(spans, share, gap):
    assert profiling.busy_share(spans) == pytest.approx((share, gap))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=12))
def test_busy_share_agrees_with_counting_the_microseconds(pairs):
    spans = [(start, start + length) for start, length in pairs]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    on = [any(s <= t < e for s, e in spans) for t in range(first, last)]
    gaps = "".join("01"[b] for b in on).split("1")
    assert profiling.busy_share(spans) == pytest.approx((sum(on) / len(on), max(map(len, gaps))))


def test_busy_share_needs_spans_that_last():
    for spans in ([], [(3, 3)]):
        with pytest.raises(ValueError, match=r"expected spans \(start, end\) that last, got \["):
            profiling.busy_share(spans)


# counts and roofs


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_matrix_product_by_formula(device):
    a, b = torch.ones(5, 7, device=device), torch.ones(7, 3, device=device, dtype=torch.float32)
    assert profiling.flops_and_bytes(lambda: a @ b) == (2 * 5 * 7 * 3, 4 * (35 + 21 + 15))
    assert profiling.flops_and_bytes(lambda: a.T @ a)[1] == 4 * (35 + 35 + 49)  # the view is free


def test_bytes_of_other_operations():
    x, y = torch.ones(2, 10)
    assert profiling.flops_and_bytes(lambda: x + x) == (0, 120)
    assert profiling.flops_and_bytes(lambda: x.add_(1)) == (0, 80)  # read, and written
    assert profiling.flops_and_bytes(lambda: torch.add(x, x, out=y)) == (
        0,
        120,
    )  # written, not read
    assert profiling.flops_and_bytes(lambda: x.view(2, 5).T) == (0, 0)
    assert profiling.flops_and_bytes(lambda: torch.empty(0) + torch.empty(0)) == (0, 0)
    assert profiling.flops_and_bytes(lambda: x.half().exp())[1] == 40 + 20 + 20 + 20


def test_flops_of_forward_and_backward():
    layer, x = nn.Linear(8, 4, bias=False), torch.ones(2, 8, requires_grad=True)
    forward = profiling.flops_and_bytes(lambda: layer(x))[0]
    both = profiling.flops_and_bytes(lambda: layer(x).sum().backward())[0]
    assert (forward, both) == (2 * 2 * 8 * 4, 3 * forward)
    with FlopCounterMode(display=False) as own:
        layer(x)
    assert own.get_total_flops() == forward


def test_bound_takes_the_lower_roof():
    roof = profiling.Roofline(bandwidth=10.0, peak_flops=100.0)
    assert roof.bound(flops=50, bytes=20) == ("memory", 2.0)
    assert roof.bound(flops=400, bytes=20) == ("compute", 4.0)
    assert roof.bound(flops=0, bytes=0) == ("compute", 0.0)


def test_roofs_are_measured_in_their_units(monkeypatch):
    def time_ms(call, device):
        assert call() is not None
        return timing.Quantiles(2.0, 3.0, 4.0)

    monkeypatch.setattr(timing, "time_ms", time_ms)
    roof = profiling.Roofline.measure(CPU, n=10, mib=1, dtype=torch.float64)
    assert roof.bandwidth == 2 * 2**20 / 2e-3 and roof.peak_flops == 2 * 10**3 / 2e-3


def test_roofs_of_this_machine_are_possible():
    roof = profiling.Roofline.measure(CPU, n=128, mib=4)
    assert 1e8 < roof.bandwidth < 1e13 and 1e8 < roof.peak_flops < 1e14


# the benchmark


def test_the_benchmark_has_a_row_for_everything(monkeypatch, load_benchmark):
    bench = load_benchmark("profiling")
    monkeypatch.setattr(bench, "REPEATS", 3)
    record = bench.measure(CPU, sizes=(8, 16), mib=1)
    kinds = [row["kind"] for row in record.rows]
    assert [kinds.count(k) for k in ("peak", "op", "planted", "utilization")] == [3, 6, 6, 0]
    pairs = [row["name"].rpartition(", ")[::2] for row in record.rows if row["kind"] == "profiler"]
    assert len(pairs) == 6 and [how for _, how in pairs] == ["profiled", "bare"] * 3
    assert all(a[0] == b[0] for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    planted = [row["name"] for row in record.rows if row["kind"] == "planted"]
    assert planted[:2] == ["data, one by one", "data, by the batch"]
    ops = {(r["name"], r["n"]): (r["flops"], r["bytes"]) for r in record.rows if r["kind"] == "op"}
    assert ops["matmul", 16] == (2 * 16**3, 3 * 4 * 256) and ops["add", 8] == (64, 3 * 4 * 64)
    assert ops["softmax", 8] == (5 * 64, 2 * 4 * 64)


def test_what_is_planted_and_its_cure_do_the_same(load_benchmark):
    bench = load_benchmark("profiling")
    slow, cured = bench._data(samples=8, steps=2).values()
    for a, b in zip(slow(), cured(), strict=True):
        assert torch.equal(a[0], b[0])
    slow, cured = bench._fetches(3, CPU).values()
    assert slow() == pytest.approx(cured(), rel=1e-5)
    assert list(bench._optimizers(2, CPU)) == ["AdamW, a loop", "AdamW, fused"]


def test_the_benchmark_goes_on_launching_while_nvidia_smi_looks(monkeypatch, load_benchmark):
    bench = load_benchmark("profiling")
    monkeypatch.setattr(bench, "REPEATS", 3)
    looks = "import time; time.sleep(0.3); print(97)"
    row = bench._utilization(CPU, [sys.executable, "-c", looks], seconds=0.0, n=1)
    assert row["utilization"] == 97 and row["name"] == "additions while nvidia-smi looks"
    assert row["n"] > 1000


def test_the_benchmark_says_when_nvidia_smi_fails(monkeypatch, load_benchmark):
    bench = load_benchmark("profiling")
    monkeypatch.setattr(bench, "REPEATS", 3)
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        bench._utilization(CPU, [sys.executable, "-c", "raise SystemExit(3)"], seconds=0.0, n=1)
