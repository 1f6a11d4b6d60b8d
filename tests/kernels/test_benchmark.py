"""The harness of the kernel benchmark, at sizes that a CPU interprets in seconds."""

import dataclasses
from functools import partial

import pytest
import torch

from helpers.page import ledger

SMALL = {
    **{"vector_add": (64,), "dropout": (64,), "softmax": (2, 16), "rms_norm": (2, 16)},
    **{"layer_norm": (2, 16), "gelu": (2, 16), "matmul": (16, 16, 16)},
    **{"linear_cross_entropy": (8, 4, 32), "attention": (1, 1, 16, 16)},
}


@pytest.fixture
def bench(load_benchmark):
    return load_benchmark("kernels")


def small(bench, device, names):
    found = [
        dataclasses.replace(case, shapes=[SMALL[case.kernel]], dtypes=None)
        for case in bench.cases({})
        if case.kernel in names
    ]
    return bench.measure(torch.device(device), found, repeats=3)


def test_there_are_five_sizes_and_two_dtypes_for_each_kernel(bench):
    found = bench.cases({})
    assert {case.kernel for case in found} == set(SMALL)
    assert all(len(case.shapes) >= 5 for case in found)
    assert all(len(case.dtypes or bench.DTYPES) >= 2 for case in found)


def test_contenders_agree(bench):
    for case in bench.cases({}):
        if case.kernel == "dropout":  # other random numbers: test_dropout.py compares statistics
            continue
        inputs = case.inputs(*SMALL[case.kernel], dtype=torch.float32, device=torch.device("cpu"))
        torch.testing.assert_close(case.ours(*inputs), case.eager(*inputs), msg=case.kernel)


def test_a_record(bench, monkeypatch):
    """Every contender but the peers runs every pass; a compiled backward pass more than once."""
    graphs = partial(torch.compile, backend="aot_eager")  # no code is generated: seconds for each
    monkeypatch.setattr(torch, "compile", graphs)
    monkeypatch.setattr(bench, "DTYPES", (torch.float32,))
    record = small(bench, "cpu", SMALL)
    rows = {(row["kernel"], row["pass"]): row for row in record.rows}
    both = {"softmax", "rms_norm", "layer_norm", "gelu", "dropout", "attention"}
    assert {kernel for kernel, name in rows if name == "backward"} == both
    assert {kernel for kernel, name in rows if name == "both"} == {"linear_cross_entropy"}
    assert len(rows) == len(record.rows) == 8 + 6 + 1
    first = rows["softmax", "forward"]
    assert first["bytes"] == 2 * 2 * 16 * 4 and first["shape"] == "2x16"
    assert first["ours"][1] > 0 and first["liger"] is None and first["ours_peak"] is None
    assert first["compile_host"][1] > 0 and first["cudnn_host"] is None
    assert rows["matmul", "forward"]["flop"] == 2 * 16**3
    assert record.provenance["copy_gb_per_s"] > 0 and record.provenance["interpreted"]
    assert record.provenance["summary"]["score"]["compile"].endswith("/15")
    assert record.provenance["left_out"] == []


def test_a_peer_that_fails_is_left_out_and_named(bench):
    def broken(x):
        raise RuntimeError("No available kernel")

    inputs, left_out = [torch.ones(4, requires_grad=True)], []
    contenders = {"ours": torch.sin, "cudnn": broken}
    calls = bench._usable("backward", contenders, inputs, "sin, (4,)", left_out)
    assert list(calls) == ["ours"]
    assert left_out == ["cudnn, sin, (4,): RuntimeError: No available kernel"]
    with pytest.raises(RuntimeError, match="No available kernel"):
        bench._usable("forward", {"ours": broken}, inputs, "sin, (4,)", left_out)


@pytest.mark.gpu
def test_on_a_gpu_the_peers_and_memory_are_measured(bench):
    record = small(bench, "cuda", {"softmax", "linear_cross_entropy"})
    assert all(row["ours_peak"] > 0 and row["compile"][1] > 0 for row in record.rows)


def row(kernel, shape, dtype="bfloat16", name="forward", bytes=2000, flop=0, **times):
    contenders = ("ours", "eager", "compile", "liger", "cudnn")
    times = dict.fromkeys(contenders) | {k: [ms * 0.9, ms, ms * 1.1] for k, ms in times.items()}
    size = {"bytes": bytes, "flop": flop, "eager_peak": 6e9, "ours_peak": 2e9}
    return {"kernel": kernel, "pass": name, "dtype": dtype, "shape": shape} | times | size


@pytest.fixture
def summary(bench):
    rows = [
        row("gelu", "16x16", ours=1.0, eager=1.0, compile=1.0),
        row("gelu", "8192x8192", bytes=4_000_000, ours=2.0, eager=3.5, compile=2.03, liger=1.0),
        row("gelu", "8192x8192", "float32", bytes=8_000_000, ours=4.0, eager=9.0, compile=3.0),
        row("matmul", "4096x4096x4096", flop=9 * 10**9, ours=4.0, eager=3.0, compile=3.0),
        row("linear_cross_entropy", "8x8x8", name="both", ours=1.0, eager=1.0, compile=1.0),
    ]
    return bench.summary(rows, {"copy_gb_per_s": 4.0, "matmul_tflop_per_s": 3.0}, "a chip")


def test_the_share_is_of_the_tighter_ceiling_at_the_largest_size_in_bfloat16(summary):
    gelu, product, loss = summary["shares"]
    assert [gelu["kernel"], product["kernel"], loss["pass"]] == ["gelu", "matmul", "both"]
    assert gelu["ours"] == pytest.approx(4e6 / 4e9 / 2e-3) and gelu["liger"] == pytest.approx(1.0)
    assert product["ours"] == pytest.approx(9e9 / 3e12 / 4e-3) and product["liger"] is None


def test_what_the_claims_say(summary, monkeypatch):
    """The summary, put into the templates of book/claims.yml."""
    shown = []
    monkeypatch.setattr(ledger, "display", lambda bundle, raw: shown.append(bundle["text/plain"]))
    assert summary["gains"] == {"matmul": "0.75×", "gelu": "1.75×"}
    counts = {"eager": "4/5", "compile": "3/5", "liger": "0/1", "cudnn": "0/0"}
    assert summary["score"] == {"device": "a chip", **counts}
    assert summary["loss_peaks"] == {"8x8x8": "6.00 GB, 2.00 GB"}
    ledger.result("E39", "holds-if", product=1, fused=2, **summary["gains"])
    ledger.result("M32", "holds-if", **summary["score"])
    assert "0.75×" in shown[0] and "3/5" in shown[1]
