"""The harness of the kernel benchmark, at sizes that a CPU interprets in seconds."""

import dataclasses
from functools import partial

import pytest
import torch

SMALL = {
    **{"vector_add": (64,), "dropout": (64,), "softmax": (2, 16), "rms_norm": (2, 16)},
    **{"layer_norm": (2, 16), "gelu": (2, 16), "matmul": (16, 16, 16)},
    **{"linear_cross_entropy": (8, 4, 32), "attention": (1, 1, 16, 16)},
}


@pytest.fixture
def benchmark(load_benchmark):
    return load_benchmark("kernels")


def small(benchmark, device, names):
    found = [
        dataclasses.replace(case, shapes=[SMALL[case.kernel]], dtypes=None)
        for case in benchmark.cases({})
        if case.kernel in names
    ]
    return benchmark.measure(torch.device(device), found, repeats=3)


def test_there_are_five_sizes_and_two_dtypes_for_each_kernel(benchmark):
    found = benchmark.cases({})
    assert {case.kernel for case in found} == set(SMALL)
    assert all(len(case.shapes) >= 5 for case in found)
    assert all(len(case.dtypes or benchmark.DTYPES) >= 2 for case in found)


def test_contenders_agree(benchmark):
    for case in benchmark.cases({}):
        if (
            case.kernel == "dropout"
        ):  # other random numbers; test_dropout.py compares the statistics
            continue
        inputs = case.inputs(*SMALL[case.kernel], dtype=torch.float32, device=torch.device("cpu"))
        torch.testing.assert_close(case.ours(*inputs), case.eager(*inputs), msg=case.kernel)


def test_a_record(benchmark, monkeypatch):
    """Every contender but the peers runs every pass; a compiled backward pass more than once."""
    graphs = partial(torch.compile, backend="aot_eager")  # no code is generated: seconds for each
    monkeypatch.setattr(torch, "compile", graphs)
    monkeypatch.setattr(benchmark, "DTYPES", (torch.float32,))
    record = small(benchmark, "cpu", SMALL)
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


@pytest.mark.gpu
def test_on_a_gpu_the_peers_and_memory_are_measured(benchmark):
    record = small(benchmark, "cuda", {"softmax", "linear_cross_entropy"})
    assert all(row["ours_peak"] > 0 and row["compile"][1] > 0 for row in record.rows)
