import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from functorch.compile import default_partition
from hypothesis import given
from hypothesis import strategies as st

from helpers import compilation


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def loss(x, w):
    return torch.relu(torch.sin(x @ w)).sum()


def sines(x):
    for _ in range(4):
        x = torch.sin(x)
    return x.sum()


def test_each_instruction_set_has_a_cache_of_its_own(monkeypatch):
    folders = set()
    for capability in ("DEFAULT", "AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        folders.add(compilation.cache_folder())
    assert len(folders) == 3 and all(Path(folder).parent.is_dir() for folder in folders)


def test_the_folder_follows_the_variable_and_stays(monkeypatch, tmp_path):
    """Inductor has set the variable when the chapter reads it, and a cell may be run twice."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    folder = compilation.cache_folder()
    assert folder.startswith(str(tmp_path / "mine_"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    assert compilation.cache_folder() == folder
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == folder  # what Inductor uses from now on


@pytest.mark.slow
def test_code_for_another_instruction_set_is_not_found_again(tmp_path):
    """What the folder prevents: in one folder, a process runs what another one compiled."""
    program = (
        "import os, sys, torch\n"
        "from helpers.compilation import cache_folder, generated\n"
        "os.environ['TORCHINDUCTOR_CACHE_DIR'] = cache_folder()\n"
        "code = generated(torch.compile(lambda x: x.sin() + 1), torch.ones(64))[0]\n"
        "print('at::vec' in code, torch._dynamo.utils.counters['inductor']['fxgraph_cache_hit'])"
    )
    found = []
    for capability in (None, "default", "default"):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        environment.pop("ATEN_CPU_CAPABILITY", None)
        if capability:
            environment["ATEN_CPU_CAPABILITY"] = capability
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    vectors, hits = zip(*found, strict=True)
    # the second process compiles anew, without vectors; the third finds what the second made
    assert list(vectors[1:]) == ["False", "False"] and list(hits) == ["0", "0", "1"]


def test_launches_are_the_operations_without_views():
    x = torch.randn(4, 6)
    assert compilation.launches(gelu, x) == "mul pow mul add mul tanh add mul".split()
    assert compilation.launches(lambda x: x.T.view(-1, 2).detach(), x.T) == []
    assert compilation.launches(lambda x: torch.empty_like(x), x) == []
    linear = torch.nn.Linear(6, 2)
    assert compilation.launches(linear, x) == ["addmm"]
    assert compilation.launches(lambda: linear(x).sum().backward()).count("mm") == 1


def test_kernel_names_are_those_of_the_generated_code():
    x = torch.linspace(-1, 1, 32)
    compiled = torch.compile(gelu)
    first = compilation.kernel_names(compiled, x)
    assert first == ["cpp_fused_add_mul_pow_tanh_0"]
    assert compilation.kernel_names(compiled, x) == first  # a second look forgets the first
    assert "tanh" in compilation.generated(compiled, x)[0]
    torch.testing.assert_close(compiled(x), gelu(x))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("        cpp_fused_relu_0(arg0_1, buf0)", "cpp_fused_relu_0"),
        ("        extern_kernels.addmm(a, b, alpha=1, out=buf0)", "extern_kernels.addmm"),
        (
            "        triton_poi_fused_add_0.run(a, buf0, 64, stream=stream0)",
            "triton_poi_fused_add_0",
        ),
        ("        buf1 = torch.ops.aten.sort.stable(a, dim=0)", "torch.ops.aten.sort.stable"),
        ("        assert_size_stride(arg0_1, (64, ), (1, ), 'input')", None),
        ("        buf0 = empty_strided_cpu((64, ), (1, ), torch.float32)", None),
    ],
)
def test_a_call_in_generated_code(monkeypatch, line, name):
    code = f"def call(args):\n{line}\n    return (buf0, )\n\ndef other():\n    cpp_fused_no_0(x)\n"
    monkeypatch.setattr(compilation, "generated", lambda call: [code, code])
    assert (
        compilation.kernel_names(None) == [name] * 2
        if name
        else [] == compilation.kernel_names(None)
    )


def test_breaks_give_graphs_and_lines():
    def noisy(x):
        x = x.sin()
        print(end="")
        if x.sum() > 0:
            x = x * 2
        return x + 1

    graphs, lines = compilation.breaks(noisy, torch.ones(3))
    assert graphs == 3 and lines == ['print(end="")', "if x.sum() > 0:"]
    assert compilation.breaks(gelu, torch.ones(3)) == (1, [])
    assert compilation.breaks(lambda x: (print(end=""), x + 1), torch.ones(3)) == (1, [])


def test_compiles_counts_after_each_call():
    shapes = [(torch.ones(n, 7),) for n in (2, 3, 5, 8)]
    assert compilation.compiles(gelu, shapes) == [1, 2, 2, 2]
    assert compilation.compiles(gelu, shapes, dynamic=False) == [1, 2, 3, 4]
    assert compilation.compiles(gelu, shapes, dynamic=True) == [1, 1, 1, 1]
    assert compilation.compiles(gelu, []) == []


@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_compute_what_autograd_computes(rows):
    x = torch.randn(rows, 4, dtype=torch.float64)
    w = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    graphs = compilation.graphs(loss, x, w)
    mine, w.grad = w.grad, None
    loss(x, w).backward()
    torch.testing.assert_close(mine, w.grad)
    assert list(graphs) == ["dynamo", "joint", "forward", "backward"]
    names = {k: Counter(n.name for n in g.graph.nodes) for k, g in graphs.items()}
    assert names["joint"]["tangents_1"] and not names["forward"]["tangents_1"]
    assert "detach" not in str(names["joint"])


def test_a_partition_decides_what_is_saved():
    x = torch.randn(1000, requires_grad=True)
    everything = compilation.graphs(sines, x, partition=default_partition)
    least = compilation.graphs(sines, x)

    def saved(graphs):
        values = graphs["backward"].graph.find_nodes(op="placeholder")
        return [n.name for n in values if "tangents" not in n.name]

    assert saved(everything) == ["primals_1", "sin", "sin_1", "sin_2"]
    assert saved(least) == ["primals_1"]


@given(st.floats(0.01, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3).filter(lambda v: v > 0))
def test_break_even_is_the_first_call_that_pays(compile_s, eager, compiled):
    calls = compilation.break_even(compile_s, eager, compiled)
    if compiled >= eager:
        assert calls == math.inf
        return
    total = lambda n: compile_s * 1e3 + n * compiled - n * eager  # noqa: E731
    slack = 1e-9 * (compile_s * 1e3 + calls * eager)
    assert total(calls) <= slack and total(calls - 1) >= -slack


def test_break_even_of_nothing_and_of_nonsense():
    assert compilation.break_even(0, 2, 1) == 0
    assert compilation.break_even(1, 1, 1) == math.inf
    with pytest.raises(ValueError, match=r"times that are not negative, got \(1, -2, 3\)"):
        compilation.break_even(1, -2, 3)


# the benchmark


@pytest.fixture
def bench(monkeypatch, load_benchmark):
    module = load_benchmark("compilation")
    monkeypatch.setattr(module, "PAIRS", 3)
    return module


@pytest.mark.parametrize(("workload", "mode"), [("tiny", "default"), ("mlp", "script")])
def test_a_child_times_the_first_call_and_steady_ones(bench, workload, mode):
    cold = bench.child(workload, mode, "cpu", steady=False)
    assert list(cold) == ["first"] and cold["first"] > 0
    torch.compiler.reset()
    warm = bench.child(workload, mode, "cpu", steady=True)
    assert set(warm) == {"first", "difference", "eager", "compiled", "ratio"}
    assert all(len(warm[name]) == 3 for name in ("eager", "compiled", "ratio"))
    assert warm["difference"] < 1e-4


@pytest.mark.parametrize("workload", ["chain", "cnn", "transformer"])
def test_every_workload_can_be_scripted_to_the_same_result(bench, workload):
    with torch.no_grad():
        function, x = bench.job(workload, torch.device("cpu"))
        scripted = bench.prepare(function, x[:2], "script")
        torch.testing.assert_close(scripted(x[:2]), function(x[:2]))


def test_the_record_has_a_row_for_each_mode(bench, monkeypatch):
    steady = {"difference": 0.0} | dict.fromkeys(["eager", "compiled", "ratio"], [1.0, 1.0, 1.0])
    calls = []

    def run(workload, mode, device, cache, steady_too):
        calls.append((workload, mode, cache))
        return {"first": 1.5} | (steady if steady_too else {})

    monkeypatch.setattr(bench, "child", None)
    monkeypatch.setattr(bench, "run", lambda w, m, d, c, steady: run(w, m, d, c, steady))
    record = bench.measure(torch.device("cpu"))
    rows = {(row["workload"], row["mode"]) for row in record.rows}
    assert len(rows) == len(record.rows) == 17 and ("transformer", "max-autotune") in rows
    assert len({cache for _, _, cache in calls}) == 17  # each row has caches of its own


def test_a_child_that_fails_says_why(bench, tmp_path):
    with pytest.raises(RuntimeError, match=r"mlp, sideways: [\s\S]*Unrecognized mode"):
        bench.run("mlp", "sideways", torch.device("cpu"), str(tmp_path), steady=False)
