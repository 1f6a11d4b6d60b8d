"""Launching: what a rank sees, what comes back, who failed first, and that nothing is left."""

import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import distributed
from helpers.ranks import descendants, own_lines
from tests import distributed_job as job

PROGRAM = Path(job.__file__)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The process that all ranks are forked from imports torch once, which takes seconds."""
    distributed.spawn(job.settings, ranks=1, echo=False)


def alive(pid):
    """Is there such a process, other than one that has ended and waits to be noticed?"""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def none_left(folder):
    pids = [int(pid) for file in Path(folder).iterdir() for pid in file.read_text("ascii").split()]
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(pids) == 4 and not any(map(alive, pids))


# ---- imported functions


def test_results_come_back_rank_by_rank(capsys):
    results = distributed.spawn(job.place_and_sum, 5, ranks=3)
    for rank, result in enumerate(results):
        assert result["place"] == distributed.Place(rank, 3, rank, torch.device("cpu"))
        assert result["same"]
        assert result["total"] == 5 + 6 + 7
        # without its graph and without the megabytes that it is a view of
        assert result["view"].tolist() == [3, 4]
        assert not result["view"].requires_grad
        assert result["view"].untyped_storage().nbytes() == 8
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [f"[rank {r}] rank {r} of 3" for r in range(3)]


def test_groups_one_after_the_other_do_not_read_each_other_s_addresses():
    assert distributed.spawn(job.many_groups) == [torch.tensor([16.0])] * 2


def test_variables_reach_the_ranks(monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    results = distributed.spawn(job.settings, ranks=2, echo=False)
    assert [r["RANK"] for r in results] == ["0", "1"]
    assert all(r["threads"] == 1 and r["COLOUR"] is None and r["session"] for r in results)
    assert results[0]["debug"] == "OFF"
    env = {"OMP_NUM_THREADS": "2", "COLOUR": "red", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    (one,) = distributed.spawn(job.settings, ranks=1, env=env)
    assert (one["threads"], one["COLOUR"], one["debug"]) == (2, "red", "DETAIL")
    assert "COLOUR" not in os.environ and capsys.readouterr().out == ""


def test_a_group_left_open_is_closed():
    assert distributed.spawn(job.leave_group_open) == [None, None]


@pytest.mark.parametrize("guilty", [0, 1])
def test_the_error_of_the_rank_that_failed_first(guilty):
    with pytest.raises(distributed.RankError, match=f"rank {guilty} of 2 failed") as caught:
        distributed.spawn(job.fail_on, guilty)
    assert (caught.value.rank, caught.value.exitcode) == (guilty, 1)
    text = str(caught.value)
    assert "KeyError: 'key'" in text and "in fail_on" in text and "_be_rank" not in text
    # the other one, in a line
    assert f"then rank {1 - guilty} failed with exit code 1: RuntimeError: " in text
    assert text.count("Traceback") == 2  # ValueError and its cause
    own = caught.value.tracebacks
    assert list(own) == [0, 1]
    assert 'File "distributed_job.py"' in own[guilty] and "ValueError: no such key" in own[guilty]
    assert "site-packages" not in own[1 - guilty] and "wrapper" not in own[1 - guilty]


def test_a_traceback_without_packages_and_paths():
    text = """Traceback (most recent call last):
  File "/home/me/messages.py", line 26, in both_receive
    dist.recv(tensor, src=other)
         ^^^^^^^^
  File "/lib/python3/site-packages/torch/distributed/c10d.py", line 83, in wrapper
    return func(*args, **kwargs)
           ~~~~^^^^^^^
RuntimeError: [/w/third_party/gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:20388."""
    assert own_lines(text).splitlines() == [
        "Traceback (most recent call last):",
        '  File "messages.py", line 26, in both_receive',
        "    dist.recv(tensor, src=other)",
        "RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:20388.",
    ]


def test_a_rank_killed_or_ended():
    with pytest.raises(distributed.RankError, match=r"rank 1 of 2 was killed by signal 9 \(SIGKIL"):
        distributed.spawn(job.die_on, 1)
    with pytest.raises(distributed.RankError, match="SystemExit: 7") as caught:
        distributed.spawn(job.exit_on, 0)
    assert caught.value.rank == 0
    with pytest.raises(distributed.RankError, match="0 of 1 ended before it had returned\n.*bye"):
        distributed.spawn(job.leave_early, ranks=1)


def test_a_timeout_says_where_each_rank_was_and_leaves_nothing(tmp_path):
    start = time.monotonic()
    last = "rank 0: waiting for nobody; rank 1: waiting for nobody"
    with pytest.raises(TimeoutError, match=f"start_child_and_hang had not ended .*{last}"):
        distributed.spawn(job.start_child_and_hang, str(tmp_path), timeout=3)
    assert time.monotonic() - start < 10
    assert none_left(tmp_path)


def interrupt_when_both_hang(folder):
    """What Jupyter's stop button does, once both ranks have started a child."""
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("way", ["spawn", "torchrun"])
def test_an_interrupt_leaves_nothing(tmp_path, interruptible, way):
    threading.Thread(target=interrupt_when_both_hang, args=(tmp_path,)).start()
    with pytest.raises(KeyboardInterrupt):
        if way == "spawn":
            distributed.spawn(job.start_child_and_hang, str(tmp_path))
        else:
            distributed.torchrun(PROGRAM, "start_child_and_hang", tmp_path)
    assert none_left(tmp_path)


def test_a_notebook_s_function_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))

    def train():
        pass

    train.__module__ = "__main__"
    with pytest.raises(ValueError, match="train is defined in a notebook, which no other process"):
        distributed.spawn(train)


def test_keywords_are_passed_to_the_function():
    assert distributed.spawn(job.both, 1, second=2, ranks=3) == [(1, 2)] * 3


@pytest.mark.parametrize("name", ["ranks", "timeout", "env", "echo"])
def test_a_parameter_that_spawn_has_too_is_refused(name):
    with pytest.raises(TypeError, match=f"with_{name} has a parameter '{name}', and so has spawn"):
        distributed.spawn(getattr(job, f"with_{name}"), **{name: 1})


@pytest.mark.parametrize("launch", [distributed.spawn, distributed.torchrun])
def test_at_least_one_rank(launch):
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        launch(job.settings, ranks=0)


# ---- torchrun


def test_torchrun_returns_what_each_rank_printed(capsys):
    output = distributed.torchrun("tests.distributed_job", "place_and_sum", 5, ranks=2)
    assert output.by_rank == {0: "rank 0 of 2\n", 1: "rank 1 of 2\n"}
    assert output.launcher == "" and output.seconds > 0
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]


def test_nodes_are_numbered_and_a_failure_is_raised(tmp_path):
    program = tmp_path / "node.py"
    lines = ["import os, sys", "rank = int(os.environ['RANK'])", "print(rank, flush=True)"]
    program.write_text("\n".join([*lines, "sys.exit(rank // 2)"]), encoding="utf-8")
    with pytest.raises(TimeoutError, match="1 nodes had not ended after 0.1 s"):
        distributed.torchrun_nodes(program, nodes=1, timeout=0.1)
    with pytest.raises(RuntimeError, match=r"(?s)node 1 ended with exit code 1:.*rank +: [23]"):
        distributed.torchrun_nodes(program)


def test_the_lines_of_a_node_are_not_mixed(tmp_path):
    program = tmp_path / "lines.py"
    program.write_text(
        "import os\nfor _ in range(200):\n    print('rank', os.environ['RANK'], 'of', 'two')\n",
        encoding="utf-8",
    )
    (printed,) = distributed.torchrun_nodes(program, nodes=1, per_node=2)
    assert printed.splitlines() == ["rank 0 of two"] * 200 + ["rank 1 of two"] * 200


def test_a_traceback_that_a_rank_survived_is_printed(capsys):
    distributed.spawn(job.survive, ranks=1)
    printed = capsys.readouterr().out
    assert "[rank 0] still here\n" in printed and "[rank 0] KeyError: 'key'\n" in printed


def test_torchrun_names_the_rank_that_failed_first(capsys):
    with pytest.raises(distributed.RankError, match="rank 1 of 2 failed") as caught:
        distributed.torchrun(PROGRAM, "fail_on", 1)
    text = str(caught.value)
    assert "KeyError: 'key'" in text and "ValueError: no such key" in text
    assert "then rank 0 " in text and "elastic" not in text
    assert "Traceback" not in capsys.readouterr().out  # once is enough
    assert "ChildFailedError" in caught.value.output.launcher


def test_torchrun_names_the_rank_that_was_killed():
    with pytest.raises(distributed.RankError, match="rank 1 of 2 was killed by signal 9"):
        distributed.torchrun(PROGRAM, "die_on", 1)


def test_torchrun_is_ended_after_its_time():
    before = descendants(os.getpid())
    with pytest.raises(
        TimeoutError, match="distributed_job.py had not ended after 1 s and was kil"
    ):
        distributed.torchrun(PROGRAM, "hang", timeout=1)
    assert descendants(os.getpid()) <= before


def test_torchrun_that_does_not_start():
    with pytest.raises(FileNotFoundError, match="no program nothing.py in"):
        distributed.torchrun("nothing.py")
    with pytest.raises(
        RuntimeError, match="(?s)torchrun ended with exit code 2:.*--no-such-option"
    ):
        distributed.torchrun(PROGRAM, options=["--no-such-option"])


# ---- the group


def test_without_a_launcher_the_error_says_what_to_do(monkeypatch):
    for name in distributed.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    missing = "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: no launcher has started"
    with pytest.raises(RuntimeError, match=f"{missing}.*torchrun --standalone"):
        with distributed.process_group():
            pass


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch):
    for name in distributed.VARIABLES:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local rank 3 needs a GPU of its own, this machine has 2"):
        with distributed.process_group("nccl"):
            pass


def test_the_group_is_left_in_any_case(monkeypatch, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in distributed._launcher_variables(store.port, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(KeyError, match="key"):
        with distributed.process_group() as place:
            assert dist.is_initialized() and place.world_size == 1
            {}["key"]
    assert not dist.is_initialized()


def test_after_an_error_nccl_is_not_left(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in distributed._launcher_variables(store.port, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(KeyError, match="key"):
        with distributed.process_group("gloo"):
            monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
            {}["key"]
    assert dist.is_initialized()
    dist.destroy_process_group()
