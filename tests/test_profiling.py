import time
from types import SimpleNamespace

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


# the clock


def test_times_are_ordered_and_of_one_call():
    calls, start = [], time.perf_counter()
    times = profiling.time_ms(lambda: calls.append(time.sleep(0.0005)), CPU, 0.05)
    passed = (time.perf_counter() - start) * 1e3
    assert times == sorted(times) and len(times) == 3
    assert 0.5 <= times[0] and len(calls) * times[0] / 2 <= passed  # of a block: ten times that


def test_a_call_longer_than_the_time_given_is_still_read_three_times():
    calls = []
    low, middle, high = profiling.time_ms(lambda: calls.append(time.sleep(0.02)), CPU, 0.01)
    assert 20 <= low <= middle <= high and len(calls) >= 4


def test_the_cpu_clock_uses_all_threads():
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        profiling.time_ms(lambda: seen.add(torch.get_num_threads()), CPU, 0.01)
    finally:
        torch.set_num_threads(before)
    assert 2 in seen


def test_other_devices_use_the_clock_of_all_chapters(monkeypatch):
    monkeypatch.setattr(timing, "time_ms", lambda call, device: [1.0, 2.0, 3.0])
    assert profiling.time_ms(lambda: None, torch.device("mps")) == [1.0, 2.0, 3.0]


def test_cuda_is_timed_with_flushed_events(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    asked = {}

    def do_bench(call, **options):
        asked.update(options)
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    assert profiling.time_ms(lambda: None, torch.device("cuda"), 0.5) == [1.4, 2.0, 2.6]
    assert asked == {"rep": 500.0, "return_mode": "all"}


# the profile as rows


def job():
    x = torch.ones(4, 4)
    with record_function("outer"):
        x = x.add(x)
        with record_function("inner"):
            x = x.mul(x)
    return x.sub(x)  # in no range


def test_rows_count_calls_and_bytes():
    prof = profiling.trace(job, steps=3, record_shapes=True, profile_memory=True)
    found = {row["name"]: row for row in profiling.rows(prof)}
    assert [found[f"aten::{name}"]["calls"] for name in ("add", "mul", "sub")] == [3, 3, 3]
    assert found["aten::add"]["bytes"] == 3 * 64
    assert all(row["self"] <= row["total"] + 1e-6 for row in found.values())
    selves = [row["self"] for row in profiling.rows(prof)]
    assert selves == sorted(selves, reverse=True)


def test_rows_by_shape():
    def products():
        for n in (2, 3, 3):
            _ = torch.ones(n, n) @ torch.ones(n, n)

    found = profiling.rows(profiling.trace(products, record_shapes=True), shapes=True)
    calls = {row["shapes"][0][0]: row["calls"] for row in found if row["name"] == "aten::mm"}
    assert calls == {2: 1, 3: 2}


def test_stages_hold_their_calls():
    found = profiling.stages(profiling.trace(job, steps=2))
    assert list(found) == ["outer"] and found["outer"]["calls"] == 4 and found["outer"]["us"] > 0


def test_the_loader_names_its_own_stage():
    loader = DataLoader(torch.arange(6.0), batch_size=3)
    found = profiling.stages(profiling.trace(lambda: [b + 1 for b in loader]))
    assert list(found) == ["data"] and found["data"]["calls"] > 6


def test_no_ranges_no_stages():
    assert profiling.stages(profiling.trace(lambda: torch.ones(1) + 1)) == {}


# busy


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
def test_busy(spans, share, gap):
    assert profiling.busy(spans) == pytest.approx((share, gap))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=12))
def test_busy_agrees_with_counting_the_microseconds(pairs):
    spans = [(start, start + length) for start, length in pairs]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    on = [any(s <= t < e for s, e in spans) for t in range(first, last)]
    gaps = "".join("01"[b] for b in on).split("1")
    assert profiling.busy(spans) == pytest.approx((sum(on) / len(on), max(map(len, gaps))))


def test_busy_needs_spans_that_last():
    for spans in ([], [(3, 3)]):
        with pytest.raises(ValueError, match=r"expected spans \(start, end\) that last, got \["):
            profiling.busy(spans)


# counts and roofs


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_matrix_product_by_formula(device):
    a, b = torch.ones(5, 7, device=device), torch.ones(7, 3, device=device, dtype=torch.float32)
    assert profiling.count(lambda: a @ b) == (2 * 5 * 7 * 3, 4 * (35 + 21 + 15))
    assert profiling.count(lambda: a.T @ a)[1] == 4 * (35 + 35 + 49)  # the view is free


def test_bytes_of_other_operations():
    x, y = torch.ones(2, 10)
    assert profiling.count(lambda: x + x) == (0, 120)
    assert profiling.count(lambda: x.add_(1)) == (0, 80)  # read, and written
    assert profiling.count(lambda: torch.add(x, x, out=y)) == (0, 120)  # written, not read
    assert profiling.count(lambda: x.view(2, 5).T) == (0, 0)
    assert profiling.count(lambda: torch.empty(0) + torch.empty(0)) == (0, 0)
    assert profiling.count(lambda: x.half().exp())[1] == 40 + 20 + 20 + 20


def test_flops_of_forward_and_backward():
    layer, x = nn.Linear(8, 4, bias=False), torch.ones(2, 8, requires_grad=True)
    forward = profiling.count(lambda: layer(x))[0]
    both = profiling.count(lambda: layer(x).sum().backward())[0]
    assert (forward, both) == (2 * 2 * 8 * 4, 3 * forward)
    with FlopCounterMode(display=False) as own:
        layer(x)
    assert own.get_total_flops() == forward


def test_bound_takes_the_lower_roof():
    roof = profiling.Roofline(bandwidth=10.0, rate=100.0)
    assert roof.bound(flops=50, bytes=20) == ("memory", 2.0)
    assert roof.bound(flops=400, bytes=20) == ("compute", 4.0)
    assert roof.bound(flops=0, bytes=0) == ("compute", 0.0)


def test_roofs_are_measured_in_their_units(monkeypatch):
    monkeypatch.setattr(
        profiling, "time_ms", lambda call, device: [2.0, 3.0, 4.0] if call() is not None else 0
    )
    roof = profiling.Roofline.measure(CPU, n=10, mib=1, dtype=torch.float64)
    assert roof.bandwidth == 2 * 2**20 / 2e-3 and roof.rate == 2 * 10**3 / 2e-3


def test_roofs_of_this_machine_are_possible():
    roof = profiling.Roofline.measure(CPU, n=128, mib=4)
    assert 1e8 < roof.bandwidth < 1e13 and 1e8 < roof.rate < 1e14


# the benchmark


def test_the_benchmark_has_a_row_for_everything(monkeypatch, load_benchmark):
    benchmark = load_benchmark("profiling")
    monkeypatch.setattr(profiling, "time_ms", lambda call, device: [(call(), 1.0)[1], 2.0, 3.0])
    record = benchmark.measure(CPU, sizes=(8, 16), mib=1)
    kinds = [row["kind"] for row in record.rows]
    assert [kinds.count(k) for k in ("peak", "op", "planted", "utilization")] == [3, 6, 6, 0]
    pairs = [row["name"].rpartition(", ")[::2] for row in record.rows if row["kind"] == "profiler"]
    assert len(pairs) == 6 and [how for _, how in pairs] == ["profiled", "bare"] * 3
    assert all(a[0] == b[0] for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    ops = {(r["name"], r["n"]): (r["flops"], r["bytes"]) for r in record.rows if r["kind"] == "op"}
    assert ops["matmul", 16] == (2 * 16**3, 3 * 4 * 256) and ops["add", 8] == (64, 3 * 4 * 64)
    assert ops["softmax", 8] == (5 * 64, 2 * 4 * 64)


def test_a_record_in_words(monkeypatch):
    rows = [
        {"kind": "planted", "name": n, "time": [t] * 3} for n, t in [("slow", 3.0), ("well", 2.0)]
    ]
    rows += [{"kind": "op", "name": "add", "time": [1.0] * 3}]
    record = SimpleNamespace(provenance={"device": "Chip"}, rows=rows)
    monkeypatch.setattr(profiling.records, "on_gpu", lambda name: record)
    assert profiling.on_gpu("planted") == "Chip: slow 1.50×"
    monkeypatch.setattr(profiling.records, "on_gpu", lambda name: None)
    assert profiling.on_gpu("planted") is None


def test_the_benchmark_asks_nvidia_smi(monkeypatch, load_benchmark):
    benchmark = load_benchmark("profiling")
    answer = type("Done", (), {"stdout": "97\n"})
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *a, **k: answer)
    monkeypatch.setattr(profiling, "time_ms", lambda call, device: [1.0, 1.0, 1.0])
    assert benchmark._utilization(CPU, calls=2)["utilization"] == 97
