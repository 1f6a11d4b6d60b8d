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
    with pytest.raises(KeyError, match=r"no metric 'acc'; recorded: \['loss', 'step'\]"):
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


def test_checkpoints_need_a_period(tmp_path):
    with pytest.raises(ValueError, match="every must be at least 1 step, got 0"):
        callbacks.Checkpoints(tmp_path / "c.pt", every=0)
