"""The benchmarks run: each is tried here on something small, its numbers thrown away."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from helpers import data, mnist, models
from helpers.page import records
from tests.two_hosts import why_not

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(records.FOLDER.parent))
    return importlib.import_module


def test_labels_of_devices(bench, monkeypatch):
    measure = bench("measure")
    assert measure.label(CPU) == "cpu"
    monkeypatch.setattr("helpers.environment.device_name", lambda d: "NVIDIA GeForce RTX 4090")
    assert measure.label(torch.device("cuda")) == "rtx4090"


def test_unknown_name_lists_the_known():
    command = [sys.executable, str(records.FOLDER.parent / "measure.py"), "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "'mnist'" in done.stderr and "'training'" in done.stderr


def test_training_overhead(bench, monkeypatch):
    training = bench("training")
    monkeypatch.setattr(training, "PAIRS", 3)
    monkeypatch.setattr(training, "CHUNKS", dict.fromkeys(training.CHUNKS, 2))
    record = training.measure(CPU)
    assert len(record.rows) == 2 and all(len(r["lightning_ratio"]) == 3 for r in record.rows)


def test_memory_is_predicted_and_measured(bench, monkeypatch):
    memory = bench("memory")
    monkeypatch.setattr(memory, "REPEATS", {"cpu": 3})
    sizes = {
        "MLP": {"width": 16, "blocks": 2, "batch": 64},
        "ConvNet": {"width": 2, "batch": 8},
        "GPT": {"layers": 2, "width": 64, "context": 8, "vocabulary": 20, "batch": 64},
    }
    monkeypatch.setattr(memory, "SIZES", {"cpu": sizes})
    monkeypatch.setattr(memory, "WAYS", ("plain", "all three"))
    record = memory.measure(CPU)
    assert len(record.rows) == 6
    for row in record.rows:
        assert row["predicted"] == row["tensors"] <= row["allocator"]
    slower = [row["slowdown"] for row in record.rows if row["way"] == "plain"]
    assert slower == [(1, 1, 1)] * 3
    gpt = {row["way"]: row["tensors"] for row in record.rows if row["model"] == "GPT"}
    assert gpt["all three"] < gpt["plain"]


def test_memory_is_recorded_where_it_can_be(bench):
    with pytest.raises(RuntimeError, match="recorded on cpu and cuda, got meta"):
        bench("memory").measure(torch.device("meta"))


def test_all_reduces_in_turns(bench, monkeypatch):
    module = bench("distributed")
    monkeypatch.setattr(module, "REPEATS", 3)
    monkeypatch.setattr(module, "SIZES", (2**12, 2**22))
    monkeypatch.setattr(module.collectives, "fit_network", lambda *_: (1e-4, 1e9))
    record = module.measure(CPU)
    assert record.column("bytes") == [2**12, 2**22]
    assert record.column("fitted") == [0.2041, 4.394]  # 2 (0.1 ms + half the bytes / 1 GB/s)
    one = [{"ring": [2.0] * 3, "tree": [3.0] * 3, "backend": [1.0] * 3}]
    other = [{"ring": [4.0] * 3, "tree": [3.0] * 3, "backend": [1.0] * 3}]
    assert module.row(8, one + other)["ring_speed"] == (0.25, 0.25, 0.25)


def test_an_all_reduce_needs_two_devices(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="needs two devices or more, cuda is one"):
        bench("distributed").measure(torch.device("cuda"))


def test_scaling_in_rounds(bench, monkeypatch):
    module = bench("distributed_scaling")
    small = {"REPEATS": 3, "WARM_UP": 1, "ROUNDS": 1, "PROCESSES": (1, 2), "BATCHES": (4,)}
    small |= {"THREADS": (1,), "BUCKETS": (0.25, 25), "LAYERS": 2, "WIDTH": 8}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "is_quiet", lambda: True)
    kinds = module.measure(CPU).column("kind")
    assert kinds == ["processes"] * 2 + ["no_sync"] + ["threads"] * 2 + ["buckets"] * 2


def test_what_is_disturbed_is_measured_again(bench, monkeypatch):
    module = bench("distributed_scaling")
    quiet = iter([False, True, False, True, True])  # before; before, after; before, after
    monkeypatch.setattr(module, "is_quiet", lambda: next(quiet))
    runs = iter([["disturbed"], ["calm"]])
    monkeypatch.setattr(module.distributed, "spawn", lambda *_, **__: next(runs))
    assert module.undisturbed(None) == ["calm"]
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with pytest.raises(RuntimeError, match="not quiet once in 0 s"):
        module.undisturbed(None)


def test_all_reduces_between_hosts_are_predicted(bench, monkeypatch):
    module = bench("collectives")
    times = {"4": [200.0] * 3, "8": [300.0] * 3}
    ways = dict.fromkeys(("rank 0", "ring", "tree", "tree, acknowledged", "backend"), times)
    monkeypatch.setattr(module, "between_hosts", lambda count: ways)
    monkeypatch.setattr(module, "CABLE", 40.0)
    rows = module.measure(CPU).rows
    assert len(rows) == 3 * 5 * 2
    # 4 bytes take 100 ms at 40 bytes/s: 6 of these through rank 0, 6 of a quarter in the ring of 4
    # (the backend counts as a ring), 4 in the trees; what was measured does not count
    predicted = [row["predicted"] for row in rows if row["ranks"] == 4 and row["bytes"] == 4]
    assert predicted == [600.0, 150.0, 400.0, 400.0, 150.0]


def test_hosts_have_cables_of_their_own(bench, monkeypatch):
    if reason := why_not():
        pytest.skip(reason)
    module = bench("collectives")
    monkeypatch.setattr(module, "REPEATS", 3)
    monkeypatch.setattr(module, "SIZES", (2**18,))
    taken = module.between_hosts(2)
    assert set(taken) == {"rank 0", "ring", "tree", "tree, acknowledged", "backend"}
    # 256 KiB to rank 0 and back, at 10 MB/s at the most; 16 KiB of each way are a burst
    assert min(taken["rank 0"][str(2**18)]) > 2 * (2**18 - 2**15) / 10e6 * 1e3


def test_scaling_is_measured_on_a_cpu(bench):
    with pytest.raises(RuntimeError, match="processes on a CPU, not cuda"):
        bench("distributed_scaling").measure(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="have no GPU of their own"):
        bench("collectives").measure(torch.device("cuda"))


@pytest.fixture
def few(monkeypatch):
    """Forty digits in the place of full MNIST."""
    all_of_them = data.digits()
    few = data.Digits(
        *(t[:40] for t in vars(all_of_them).values() if isinstance(t, torch.Tensor)), ""
    )
    monkeypatch.setattr(data, "digits", lambda: few)
    return few


class Oracle(nn.Module):
    """Right on all but `wrong` of the first forty test digits, which come in class order."""

    def __init__(self, wrong):
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.zeros(1)), wrong

    def forward(self, x):
        answer = torch.arange(len(x)) % 10
        answer[: self.wrong] = (answer[: self.wrong] + 1) % 10
        return nn.functional.one_hot(answer, 10).float() + self.weight


def test_mnist_stops_the_baselines_at_99_percent(bench, few):
    module = bench("mnist")
    later = iter([Oracle(5), Oracle(2), Oracle(0), Oracle(0)])
    row = module.row("example", 7, later, few, torch.device("cpu"))
    assert (row["epochs"], row["errors"], row["test_accuracy"]) == (3, 0, 1.0)
    assert row["seconds_to_99"] == row["train_seconds"] and next(later)
    never = module.row("adam", 7, iter([Oracle(5), Oracle(2)]), few, torch.device("cpu"))
    assert (never["epochs"], never["errors"], never["seconds_to_99"]) == (2, 2, None)
    assert set(row) == set(module.UNITS)


def test_mnist_runs_the_books_recipes(bench, few, monkeypatch):
    module = bench("mnist")
    recipe = mnist.Recipe(epochs=1, batch_size=20, width=4)
    model = list(module.book(few, recipe, 0, CPU))
    assert len(model) == 1 and not model[0].training


def test_mnist_needs_the_full_set(bench, few, monkeypatch):
    module = bench("mnist")
    monkeypatch.setattr(data, "mnist", lambda: few)
    with pytest.raises(RuntimeError, match="needs full MNIST: set PYTORCH_BOOK_DATA"):
        module.measure(CPU)


def test_the_baselines_are_the_published_nets(bench):
    module = bench("mnist")
    x = torch.randn(2, 1, 28, 28)
    for net, parameters in ((module.example_net(), 1_199_882), (module.adam_net(), 225_034)):
        assert net(x).shape == (2, 10)
        assert sum(p.numel() for p in net.parameters()) == parameters


def test_exports_are_timed_and_compared(bench, monkeypatch, one_thread):
    module = bench("export")
    monkeypatch.setattr(module, "BLOCKS", 3)
    monkeypatch.setattr(module, "CALLS", 100)
    monkeypatch.setattr(module, "BATCHES", (1, 2))
    nets = {"ConvNet": models.ConvNet(width=2).eval(), "GPT": nn.Embedding(65, 4)}
    images, tokens = torch.randn(5, 1, 28, 28), torch.zeros(2, 3, dtype=torch.int64)
    monkeypatch.setattr(module, "_convnet", lambda: (nets["ConvNet"], images[:2], {}, images))
    monkeypatch.setattr(module, "_gpt", lambda: (nets["GPT"], tokens, {}, None))

    def engines(model, *rest):
        yield "eager", lambda: model, 0
        yield "twice", lambda: lambda x: 2 * model(x), 7

    monkeypatch.setattr(module, "_engines", engines)
    rows = module.measure(CPU).rows
    assert [(r["model"], r["engine"], r["batch"]) for r in rows] == [
        (name, engine, batch)
        for name in ("ConvNet", "GPT")
        for batch in (1, 2)
        for engine in ("eager", "twice")
    ]
    # twice as long: as far as the length; one sample at a time may round otherwise than two
    assert [r["relative"] for r in rows] == [pytest.approx(far, abs=1e-5) for far in (0, 1) * 4]
    assert all(r["first"] > 0 for r in rows)
    assert [r["agree"] for r in rows] == [100.0] * 4 + [None] * 4
    assert all(r["exact"] < 1e-5 for r in rows[::2]) and rows[1]["bytes"] == 7


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are pinned on Linux")
@pytest.mark.parametrize("name", ["serving", "batching"])
def test_servers_at_rising_rates(bench, monkeypatch, name):
    module, measured = bench("serving"), bench(name)
    mine = os.sched_getaffinity(0)
    monkeypatch.setattr(module, "two_processors", lambda: (min(mine), max(mine)))
    monkeypatch.setattr(measured, "SIZES", (784, 32, 10))
    monkeypatch.setattr(measured, "SERVERS", ("bare", "own", "not there"))
    monkeypatch.setattr(measured, "RATES", (50, 100, 200))
    monkeypatch.setattr(measured, "LOWER", (25,))
    monkeypatch.setattr(module, "WARM_UP", (20.0, 0.5))
    monkeypatch.setattr(module, "SECONDS", 0.5)
    monkeypatch.setattr(module, "REQUESTS", 0)  # too few for a p99, so that no rate counts as held
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module, "REPEATS", 3)
    record = measured.measure(CPU)
    assert record.name == name
    tested = [(r["server"], r["rate"], r["held"]) for r in record.rows if r["kind"] == "load"]
    # two rates that are not held, and then a lower one; the order of the servers is drawn
    expected = [(name, rate, False) for name in ("bare", "own") for rate in (50, 100, 25)]
    assert sorted(tested) == sorted(expected)
    assert os.sched_getaffinity(0) == mine
    assert all(r["answered"] == r["sent"] > 0 for r in record.rows if r["kind"] == "load")
    assert [r["batch"] for r in record.rows if r["kind"] == "batch"] == list(module.BATCHES)
    with pytest.raises(RuntimeError, match="servers are measured on a CPU, got meta"):
        measured.measure(torch.device("meta"))


def test_server_and_client_need_a_processor_each(bench, monkeypatch):
    module = bench("serving")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {3}, raising=False)
    with pytest.raises(RuntimeError, match="expected two processors, for server and client, got 1"):
        module.two_processors()
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {3, 5, 4})
    assert module.two_processors() == (3, 5)
    monkeypatch.delattr(module.os, "sched_getaffinity")
    with pytest.raises(RuntimeError, match="on Linux, where a process can be kept on a CPU"):
        module.two_processors()
