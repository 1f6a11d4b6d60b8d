import pytest
import torch

from helpers import crash


@pytest.fixture
def folder(tmp_path):
    x = torch.randn(1000, 784)
    torch.save((x, x[:, :10].argmax(1)), tmp_path / "data.pt")
    return tmp_path


@pytest.fixture
def saved(folder):
    """The unbroken run's weights, and its checkpoint of every step."""
    crash.make_trainer().save(folder / "0.pt")
    weights = crash.finish(folder, watch=(lambda t, m: t.save(folder / f"{t.step}.pt"),))
    return weights, [torch.load(folder / f"{n}.pt") for n in range(crash.STEPS + 1)]


def test_resumes_from_every_step_to_the_same_bits(folder, saved):
    want, states = saved
    assert all(want.equal(crash.finish(folder, state)) for state in states[1:])


def test_each_ingredient_matters(folder, saved):
    want, states = saved
    for name in ("model", "optimizer", "scaler", "rng"):
        assert not want.equal(crash.finish(folder, states[12] | {name: states[0][name]})), name
    for name in ("rate", "data"):
        assert not want.equal(crash.finish(folder, states[12], reset=name)), name


def test_the_scale_comes_down_and_stays(saved):
    scales = [state["scaler"]["scale"] for state in saved[1]]
    assert scales[0] > scales[12] and scales[0] == 2**20


def test_run_saves_and_goes_on(folder):
    first = crash.run(folder)
    assert torch.load(folder / "checkpoint.pt")["step"] == crash.STEPS
    assert crash.run(folder).equal(first)  # nothing left to do


@pytest.mark.parametrize(("hang", "on_disk"), [([6], 4), ([8, 1], 4)])
def test_killed_while_waiting_it_goes_on_to_the_same_bits(folder, hang, on_disk):
    assert crash.killed(folder, *hang)
    assert torch.load(folder / "checkpoint.pt")["step"] == on_disk
    assert any(folder.glob("*.partial")) == (len(hang) == 2)
    threads = torch.get_num_threads()
    assert crash.run(folder).equal(crash.finish(folder)) and torch.get_num_threads() == threads


def test_a_job_that_is_not_told_to_wait_ends_or_fails_aloud(folder):
    assert not crash.killed(folder) and torch.load(folder / "checkpoint.pt")["step"] == crash.STEPS
    (folder / "data.pt").unlink()
    with pytest.raises(RuntimeError, match="expected a job that ends, got code 1"):
        crash.killed(folder)
