import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import callbacks
from tests.training_job import linear, pairs


def fit(trainer, *watchers):
    trainer.fit(lambda s: iter(pairs(trainer.config.steps)[s:]), watchers)
    return trainer


def test_history_keeps_every_step_and_measures():
    history = callbacks.History(measure={"step_squared": lambda t: t.step**2})
    fit(linear(clip_norm=1.0), history)
    assert history["step"] == [1, 2, 3, 4, 5]
    assert history["step_squared"] == [1, 4, 9, 16, 25]
    assert len(history["loss"]) == len(history["grad_norm"]) == 5
    assert all(isinstance(v, float) for v in history["loss"])


def test_history_always_has_the_last_step():
    history = callbacks.History(every=3)
    fit(linear(), history)
    assert history["step"] == [3, 5]


def test_history_names_what_it_has():
    history = callbacks.History()
    fit(linear(), history)
    with pytest.raises(
        KeyError, match=r"no metric 'acc'; recorded: \['grad_norm', 'loss', 'step'\]"
    ):
        history["acc"]


def test_progress_bar_reaches_the_end(capsys):
    fit(linear(), callbacks.ProgressBar(every=2))
    err = capsys.readouterr().err
    assert "5/5" in err and "loss=" in err


def test_progress_bar_of_a_resumed_run_starts_in_the_middle(capsys):
    trainer = linear()
    trainer.step = 3
    fit(trainer, callbacks.ProgressBar())
    assert "3/5" in capsys.readouterr().err


def test_tensorboard_files_can_be_read_back(tmp_path):
    history = callbacks.History()
    fit(linear(), callbacks.TensorBoard(tmp_path), history)
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [e.step for e in events] == [1, 2, 3, 4, 5]
    assert [e.value for e in events] == pytest.approx(history["loss"])


def test_checkpoints_are_kept_up_to_date(tmp_path):
    path = tmp_path / "deep" / "c.pt"
    steps = []
    saver = callbacks.Checkpoints(path, every=2)
    fit(linear(), saver, lambda t, m: steps.append(path.exists() and torch.load(path)["step"]))
    assert steps == [False, 2, 2, 4, 5]


def stopped(looks, *, every=1, patience=2, steps=8):
    """A run whose `measure` gives these values in turn; what is there after each step."""
    values, weights = iter(looks), {}
    stop = callbacks.EarlyStopping(lambda t: next(values), every=every, patience=patience)
    history = callbacks.History()
    trainer = linear(steps=steps)

    def keep(t, m):
        weights[t.step] = t.model.weight.clone()

    fit(trainer, keep, stop, history)
    return trainer, stop, weights, history


@pytest.mark.parametrize(
    ("looks", "best", "end"),
    [
        ([3.0, 2, 1, 2, 2, 2], 3, 5),
        ([1.0, 1, 1, 0], 1, 3),  # as good is not better
        ([5.0, float("nan"), 4, float("nan"), float("nan")], 3, 5),
        ([8.0, 7, 6, 5, 4, 3, 2, 1], 8, 8),  # never stops
        ([8.0, 7, 6, 5, 4, 3, 2, 9], 7, 8),  # the last step is not the best
    ],
)
def test_early_stopping_ends_the_run_with_the_best_weights(looks, best, end):
    trainer, stop, weights, history = stopped(looks)
    assert (stop.best_step, trainer.step) == (best, end)
    assert trainer.finished and history["step"][-1] == end
    assert trainer.config.steps == 8  # as asked for
    assert torch.equal(trainer.model.weight, weights[best])
    if best != end:
        assert not torch.equal(trainer.model.weight, weights[end])


def test_early_stopping_looks_now_and_then_and_at_the_end():
    trainer, stop, weights, _ = stopped([2.0, 3, 1], every=3, patience=5)
    assert trainer.step == 8 and stop.best_step == 8 and stop.best == 1
    assert torch.equal(trainer.model.weight, weights[8])


def test_early_stopping_without_a_finite_look_changes_no_weight():
    trainer, stop, weights, _ = stopped([float("nan")] * 2)
    assert trainer.step == 2 and stop.best_step == 0
    assert torch.equal(trainer.model.weight, weights[2])


def test_a_run_ended_early_can_be_saved_and_loaded(tmp_path):
    trainer, *_ = stopped([1.0, 2, 2])
    trainer.save(tmp_path / "c.pt")
    linear().load(tmp_path / "c.pt")


def test_early_stopping_needs_patience():
    with pytest.raises(ValueError, match="patience must be at least 1 look, got 0"):
        callbacks.EarlyStopping(lambda t: 0.0, every=1, patience=0)


@pytest.mark.parametrize(
    "make",
    [
        callbacks.ProgressBar,
        callbacks.History,
        lambda every: callbacks.TensorBoard("unused", every),
        lambda every: callbacks.Checkpoints("c.pt", every),
        lambda every: callbacks.EarlyStopping(len, every=every, patience=1),
    ],
)
@pytest.mark.parametrize("every", [0, -1])
def test_all_need_a_period(make, every):
    with pytest.raises(ValueError, match=f"every must be at least 1 step, got {every}"):
        make(every=every)


class Counted:
    """A metric that counts how often it is read from the device."""

    def __init__(self):
        self.reads = 0

    def item(self):
        self.reads += 1
        return 1.0


def watch(watcher, steps=7):
    """How often a watcher of a run of so many steps has read the metric after each step."""
    trainer, metric, reads = linear(steps=steps), Counted(), []
    for step in range(1, steps + 1):
        trainer.step = step
        watcher(trainer, {"loss": metric})
        reads.append(metric.reads)
    return reads


def test_metrics_are_read_only_when_asked_for(tmp_path):
    assert watch(callbacks.ProgressBar(every=3)) == [0, 0, 1, 1, 1, 2, 3]
    assert watch(callbacks.History(every=3)) == [0, 0, 1, 1, 1, 2, 3]
    assert watch(callbacks.TensorBoard(tmp_path, every=3)) == [0, 0, 1, 1, 1, 2, 3]


def test_tensorboard_is_on_disk_when_the_run_ends(tmp_path):
    """Its writer has a thread that flushes every two minutes: long after this test has read."""
    board = callbacks.TensorBoard(tmp_path, every=2)
    fit(linear(), board)
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [e.step for e in events] == [2, 4, 5]


def test_checkpoints_check_the_path_when_they_are_made(tmp_path):
    with pytest.raises(ValueError, match="is not a regular file"):
        callbacks.Checkpoints(tmp_path, every=2)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        callbacks.Checkpoints(tmp_path / "file" / "c.pt", every=2)


def test_the_progress_bar_of_a_run_after_one_that_broke_off(capsys):
    bar = callbacks.ProgressBar(every=1)

    def fail(trainer, metrics):
        if trainer.step == 3:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fit(linear(), bar, fail)
    fit(linear(steps=4), bar)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "4/4" in last


def test_the_progress_bar_goes_on_where_a_run_broke_off(capsys):
    bar, trainer, broken = callbacks.ProgressBar(every=1), linear(), []

    def fail_once(t, metrics):
        if t.step == 3 and not broken:
            broken.append(t.step)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fit(trainer, bar, fail_once)
    fit(trainer, bar)
    assert "5/5" in capsys.readouterr().err.split("\r")[-1] and bar.bar is None


def test_the_progress_bar_is_plain_text(capsys):
    fit(linear(), callbacks.ProgressBar())
    assert "5/5" in capsys.readouterr().err.split("\r")[-1]
