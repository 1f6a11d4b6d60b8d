"""Kill and resume: what a checkpoint must hold, and a job killed and resumed in other processes."""

import multiprocessing
import random
import signal

import numpy as np
import pytest
import torch

from tests import training_job as job


def make_trainer():
    """float16 with a scale so large that the first updates overflow and are skipped."""
    random.seed(2)
    np.random.seed(3)
    trainer = job.make_trainer(torch.float16)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    return trainer


def resume(path, rate_lost=0, data_lost=0):
    """Go on to the end; *_lost: how many steps the schedule, the data start over."""
    trainer = make_trainer()
    trainer.load(path)
    rate = trainer.lr_at
    trainer.lr_at = lambda step: rate(step - rate_lost)
    lost = data_lost * trainer.config.micro_batches
    trainer.fit(lambda start: job.batches_from(start - lost))
    return job.digest(trainer)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The end of a run without a break, and the folder with its checkpoint of each step."""
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = make_trainer()
    trainer.save(folder / "0.pt")
    trainer.fit(job.batches_from, [lambda t, m: t.save(folder / f"{t.step}.pt")])
    return job.digest(trainer), folder


def test_resumes_from_every_step_to_the_same_bits(unbroken):
    end, folder = unbroken
    for step in range(1, job.STEPS):
        assert same(end, resume(folder / f"{step}.pt")), step


@pytest.mark.parametrize("name", ["model", "optimizer", "scaler", "rng"])
def test_each_ingredient_of_the_file_matters(unbroken, tmp_path, name):
    end, folder = unbroken
    new, whole = torch.load(folder / "0.pt"), torch.load(folder / "12.pt")
    torch.save(whole | {name: new[name]}, tmp_path / "changed.pt")
    assert not same(end, resume(tmp_path / "changed.pt"))


@pytest.mark.parametrize("lost", [{"rate_lost": 12}, {"data_lost": 12}])
def test_the_place_in_schedule_and_data_matters(unbroken, lost):
    end, folder = unbroken
    assert not same(end, resume(folder / "12.pt", **lost))


def test_the_scale_comes_down_and_stays(unbroken):
    _, folder = unbroken
    scales = [torch.load(folder / f"{n}.pt")["scaler"]["scale"] for n in (0, 12, job.STEPS)]
    assert scales[0] == 2.0**28 and scales[0] > scales[1] >= scales[2]


# ---- in processes of their own, killed by SIGKILL


@pytest.mark.parametrize("step", [3, 8])
def test_killed_after_a_step_it_goes_on_to_the_same_bits(tmp_path, step):
    results = []
    for name, kill_at in [("unbroken", None), ("killed", (step, None))]:
        folder = tmp_path / f"{name} 训练"  # any path will do
        folder.mkdir()
        if kill_at is not None:
            assert run(folder, kill_at) == -signal.SIGKILL
            assert torch.load(folder / "checkpoint.pt")["step"] == step // 2 * 2  # saves are even
            assert not (folder / "result.pt").exists()
        assert run(folder) == 0
        results.append(torch.load(folder / "result.pt"))
    assert same(*results)


def run(folder, kill_at=None):
    """Run the job in a new process; return its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=job.run, args=(folder, kill_at))
    process.start()
    process.join(120)
    return process.exitcode
