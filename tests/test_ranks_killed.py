"""Ranks killed at random: the job begins again, and loses nothing that a checkpoint held."""

import random

import pytest
import torch

from helpers import distributed
from tests import killed_job as job

PROGRAM = job.__file__


def end_of(folder):
    return [torch.load(folder / f"end{rank}.pt", weights_only=True) for rank in range(2)]


def same(one, other):
    """Everything of both ranks; but a checkpoint holds the averages of rank 0's BatchNorm only.

    Under DDP rank 1 takes them over at its next step: a job that ended with its last checkpoint,
    and was then killed, has no next step.
    """
    for rank, (a, b) in enumerate(zip(one, other, strict=True)):
        for key in a.keys() | b.keys():
            if rank == 0 or ".running_" not in key:
                assert torch.equal(a[key], b[key]), (rank, key)
    return True


def starts_of(folder):
    """The step that each start of the job began with."""
    return [int(line) for line in (folder / "starts.txt").read_text("ascii").splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    distributed.spawn(job.train_until_killed, str(folder), [])
    return end_of(folder)


def random_kills(n, seed, longest):
    draw = random.Random(seed)
    return [(draw.randrange(2), draw.uniform(0, longest)) for _ in range(n)]


def test_ten_kills_lose_nothing_past_the_last_checkpoint(undisturbed, tmp_path):
    kills = random_kills(10, seed=3, longest=0.2)
    reached = [0]
    for rank, _ in kills:
        with pytest.raises(distributed.RankError, match=f"rank {rank} of 2 was killed by signal 9"):
            distributed.spawn(job.train_until_killed, str(tmp_path), kills, echo=False)
        path = tmp_path / "checkpoint.pt"
        reached.append(torch.load(path, weights_only=True)["step"] if path.exists() else 0)
    distributed.spawn(job.train_until_killed, str(tmp_path), kills)
    # every start begins where the last checkpoint ended
    assert starts_of(tmp_path) == reached == sorted(reached)
    assert same(end_of(tmp_path), undisturbed)


def by_torchrun(folder, kills):
    """What an operator would do: start it once, and let torchrun start it again."""
    words = [word for rank, seconds in kills for word in (rank, round(1000 * seconds))]
    restarts = f"--max-restarts={len(kills)}"
    return distributed.torchrun(
        *[PROGRAM, folder, *words],
        **{"options": [restarts, "--monitor-interval=0.1"], "timeout": 500, "echo": False},
    )


def test_torchrun_starts_the_whole_group_again(undisturbed, tmp_path):
    by_torchrun(tmp_path, [(1, 0.1)])
    assert len(starts_of(tmp_path)) == 2
    assert same(end_of(tmp_path), undisturbed)


@pytest.mark.slow
def test_torchrun_restarts_ten_times(undisturbed, tmp_path):
    by_torchrun(tmp_path, random_kills(10, seed=4, longest=0.3))
    starts = starts_of(tmp_path)
    assert len(starts) == 11 and starts == sorted(starts)
    assert same(end_of(tmp_path), undisturbed)
