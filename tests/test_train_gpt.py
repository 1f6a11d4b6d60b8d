"""The training script: the same losses on any number of ranks, resumed to the same weights."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers import distributed, train_gpt
from helpers.distributed import spawn
from tests import train_gpt_job as job

ROOT = Path(__file__).resolve().parents[1]
# Bits are compared between processes started in two ways: sums of one thread have one order.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs of train_gpt")


@pytest.fixture(scope="module")
def train(folder):
    """Run the script several times in a row; return the losses of each run."""

    def train(ranks, **runs):
        flags = [(*flags, f"--folder={folder / name}") for name, flags in runs.items()]
        results = spawn(job.several, *flags, ranks=ranks, env=ONE_THREAD, echo=False)
        assert all(result == results[0] for result in results)  # a mean, which all ranks have
        return dict(zip(runs, results[0], strict=True))

    return train


@pytest.fixture(scope="module")
def single(train):
    return train(1, halves=["--micro-batches=2"], tiny=job.TINY)


@pytest.fixture(scope="module")
def double(train):
    return train(
        2,
        ddp=["--parallel=ddp"],
        fsdp2=["--parallel=fsdp2"],
        tiny_tp=[*job.TINY, "--parallel=tp"],
        tiny_fsdp2=[*job.TINY, "--parallel=fsdp2"],
    )


@pytest.fixture(scope="module")
def bound():
    torch.set_default_dtype(torch.float64)
    try:
        return job.bound_of_tiny_curve()
    finally:
        torch.set_default_dtype(torch.float32)


def weights(step, tmp_path):
    dcp_to_torch_save(step, tmp_path / "plain.pt")
    return torch.load(tmp_path / "plain.pt", weights_only=True)["model"]


def assert_same_weights(one, other, tmp_path):
    one, other = weights(one, tmp_path), weights(other, tmp_path)
    assert one.keys() == other.keys() and len(one) > 20
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_train_to_the_same_bits_as_one(single, double, folder, tmp_path, kind):
    """The one adds the two ranks' halves as they do: one sum of two numbers, then a division."""
    assert double[kind] == single["halves"] and len(single["halves"]) == 8
    step = "step-00000008"
    assert_same_weights(folder / kind / step, folder / "halves" / step, tmp_path)


def assert_within(losses, want, bound):
    """Both are off by rounding alone: at most twice the bound apart."""
    apart = (torch.tensor(losses) - torch.tensor(want)).abs()
    assert (apart <= 2 * bound).all(), (apart, bound)


def test_tensor_parallel_gives_the_losses_of_one_rank(single, double, bound):
    assert_within(double["tiny_tp"], single["tiny"], bound)
    assert_within(double["tiny_fsdp2"], single["tiny"], bound)
    assert (bound < 1e-12).all() and single["tiny"][0] - single["tiny"][-1] > 0.01


def test_data_and_tensor_parallel_together_give_them_too(train, single, bound):
    four = train(4, tiny_both=[*job.TINY, "--parallel=tp", "--tp-size=2"])
    assert_within(four["tiny_both"], single["tiny"], bound)


def test_two_ranks_save_and_one_goes_on(train, single, double, folder, bound):
    for kind in ("fsdp2", "tp"):
        shutil.copytree(folder / f"tiny_{kind}", folder / f"{kind}_goes_on")
        shutil.rmtree(folder / f"{kind}_goes_on" / "step-00000004")
        (folder / f"{kind}_goes_on" / "step-00000004.partial").mkdir()  # a save that was killed
    losses = train(
        1,
        fsdp2_goes_on=[*job.TINY, "--resume"],  # with DDP: it does not matter
        tp_goes_on=[*job.TINY, "--resume", "--parallel=tp"],
    )
    assert_within(losses["fsdp2_goes_on"], single["tiny"][2:], bound[2:])
    assert_within(losses["tp_goes_on"], single["tiny"][2:], bound[2:])


def test_a_killed_rank_is_started_again_and_nothing_changes(double, folder, tmp_path):
    marker, killed = tmp_path / "killed", tmp_path / "run"
    output = distributed.torchrun(
        ROOT / "tests" / "train_gpt_job.py",
        marker,
        "--parallel=fsdp2",
        f"--folder={killed}",
        "--resume",
        options=["--max-restarts=1", "--monitor-interval=0.1"],
        env=ONE_THREAD,
        echo=False,
    )
    assert marker.exists()
    assert re.search(r"resumed from .*step-00000004", output.by_rank[0])
    assert "token/s" in output.by_rank[0] and "token/s" not in output.by_rank[1]
    assert_same_weights(killed / "step-00000008", folder / "fsdp2" / "step-00000008", tmp_path)


def test_the_program_without_torchrun(tmp_path):
    """On a file of one's own, in half precision, from the command line to a checkpoint."""
    text = tmp_path / "文本.txt"
    text.write_text("一二三四五。\n" * 200, encoding="utf-8")
    command = [sys.executable, "-m", "helpers.train_gpt", *job.SIZES, f"--text={text}"]
    env = distributed._environment({"PYTHONPATH": str(ROOT)})
    for name in distributed.VARIABLES:
        env.pop(name, None)
    command += ["--precision=bf16", "--steps=3"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    said = r"loss \d\.\d{4}, validation \d\.\d{4}: runs/train_gpt/step-00000003"
    assert re.search(said, ran.stdout) and "token/s" in ran.stderr


def test_validation_is_a_mean_over_the_ranks(tmp_path, capsys):
    said = []
    for ranks in (1, 2):
        flags = [*job.TINY, "--steps=3", f"--folder={tmp_path / str(ranks)}"]
        spawn(job.several, flags, ranks=ranks)
        said.append(re.findall(r"loss \S+ validation \d+\.\d+", capsys.readouterr().out))
    assert said[0] == said[1] and len(said[0]) == 2


def test_every_group_has_the_timeout_that_is_asked_for():
    found = spawn(job.groups, "--parallel=tp", "--tp-size=2", "--timeout=77", ranks=4)
    rows, columns = ([0, 1], [0, 1], [2, 3], [2, 3]), ([0, 2], [1, 3], [0, 2], [1, 3])
    assert [rank["tensor"] for rank in found] == [(row, 77.0) for row in rows]
    assert [rank["data"] for rank in found] == [(column, 77.0) for column in columns]


def test_each_rank_has_its_own_part_and_together_they_have_the_batch():
    args = job.parsed("--micro-batches=2")
    text = train_gpt.read_text(args)
    starts = torch.arange(0, 1600, args.context)

    def first(data):
        return next(train_gpt.training_batches(text, starts, args, data, 3))

    class Second(job.Alone):
        def size(self):
            return 2

        def get_local_rank(self):
            return 1

    x, y = first(job.Alone())
    assert x.shape == y.shape == (4, 16) and x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(first(Second())[0], x[2:])


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--tp-size=2"], 2, "--tp-size 2 needs --parallel tp, got ddp"),
        (["--parallel=tp", "--tp-size=2"], 3, "3 ranks cannot form groups of --tp-size 2"),
        (["--parallel=tp"], 8, "--heads 4 cannot be split over --tp-size 8"),
        (["--batch=9"], 2, "--batch 9 cannot be split equally over 2 ranks x 1 --micro-batches"),
        (["--micro-batches=3"], 1, "--batch 8 cannot be split equally over 1 ranks x 3"),
        (["--width=30"], 1, "width 30 cannot be split into 4 heads"),
        (["--clip=0"], 1, "clip_norm must be positive"),
        (["--warmup=8"], 1, "expected 0 <= warmup < total"),
        (["--text=nowhere.txt"], 1, "No such file or directory: 'nowhere.txt'"),
        (["--context=100000"], 1, r"expected a text of at least 1600001 bytes, got \d+"),
    ],
)
def test_wrong_flags_end_the_program_with_one_line(flags, ranks, message, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match=f"^train_gpt: .*{message}"):
        train_gpt.main([*job.SIZES, f"--folder={tmp_path}", *flags])


@pytest.mark.parametrize("flag", ["--batch=0", "--steps=-1", "--tp-size=0"])
def test_sizes_below_1_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        train_gpt.main([flag])
    assert "must be at least 1, got" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError, match="must be at least 1, got 0"):
        train_gpt.count("0")


def test_a_run_is_not_overwritten_nor_continued_as_another(single, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    flags = [*job.SIZES, f"--folder={folder / 'halves'}"]
    with pytest.raises(SystemExit, match="step-00000008 is there: pass --resume to continue"):
        train_gpt.main(flags)
    message = "batch: expected 16, got 8; lr: expected 0.1, got 0.003; micro_batches"
    with pytest.raises(SystemExit, match=message):
        train_gpt.main([*flags, "--resume", "--batch=16", "--lr=0.1"])
