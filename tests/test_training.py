import collections
import copy
import itertools
import multiprocessing
import os
import random
import signal
import socket
import time

import numpy as np
import pytest
import torch
from torch import nn

from helpers import callbacks, checkpoint
from helpers.page import records
from helpers.training import TrainConfig, Trainer, _to_device
from tests import training_job as job
from tests.training_job import linear, pairs, plain_loss

# --- the loop agrees with a loop written by hand --------------------------------------------------


def test_equals_the_bare_loop_bit_for_bit():
    trainer, bare = linear(), linear()
    batches = pairs(5)
    trainer.fit(lambda start: iter(batches[start:]))
    for batch in batches:
        bare.optimizer.zero_grad()
        plain_loss(bare.model, batch).backward()
        bare.optimizer.step()
    for a, b in zip(trainer.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_micro_batches_equal_one_large_batch():
    parts = pairs(12)
    whole = [tuple(map(torch.cat, zip(*parts[i : i + 4], strict=True))) for i in range(0, 12, 4)]
    a, b = linear(steps=3, micro_batches=4), linear(steps=3)
    a.fit(lambda s: iter(parts[s:]))
    b.fit(lambda s: iter(whole[s:]))
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_metrics_are_the_mean_loss_and_the_true_norm():
    trainer = linear(micro_batches=2, clip_norm=1e9)
    reference = copy.deepcopy(trainer.model)
    batches = pairs(2)
    metrics = trainer.train_step(iter(batches))
    loss = sum(plain_loss(reference, b) for b in batches) / 2
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)
    assert not metrics["loss"].requires_grad


def test_clipping_bounds_the_update():
    trainer = linear(clip_norm=1e-3)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step(iter(pairs(1)))
    moved = torch.cat(
        [(p - q).flatten() for p, q in zip(trainer.model.parameters(), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)  # learning rate times norm


def test_learning_rate_is_a_function_of_the_step():
    seen = []
    trainer = linear()
    trainer.lr_at = lambda step: 0.5 / (step + 1)
    trainer.fit(
        lambda s: iter(pairs(5)),
        [lambda t, m: seen.append(t.optimizer.param_groups[0]["lr"])],
    )
    assert seen == [0.5 / k for k in range(1, 6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_loss_but_not_the_weights(dtype):
    seen = []
    trainer = linear(amp_dtype=dtype, steps=1)
    trainer.loss_fn = lambda m, b: (seen.append(m(b[0]).dtype), plain_loss(m, b))[1]
    trainer.fit(lambda s: iter(pairs(1)))
    assert seen == [dtype]
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert trainer.scaler.is_enabled() == (dtype is torch.float16)


def test_overflowing_fp16_gradient_skips_the_update_and_halves_the_scale():
    trainer = linear(amp_dtype=torch.float16, steps=2, clip_norm=1.0)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    scale = trainer.scaler.get_scale()
    x, y = pairs(1)[0]
    trainer.train_step(iter([(x, y * 1e4)]))  # finite loss, but 65,536 times its gradient is not
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
    assert trainer.scaler.get_scale() == scale / 2 and trainer.step == 1


def test_the_recorded_overhead():
    """2 % of a step of the book's ConvNet; what does not shrink with the model is a fixed cost.

    On a step of a millisecond 2 % would be 20 microseconds: less than taking the norm of the
    gradient alone, which is what it costs to stop before weights become NaN. There the fixed cost
    counts, beside a loop that checks as well.
    """
    small, large = records.load("training", "cpu").rows
    assert large["bare"][1] > 10 and large["ratio"][1] <= 1.02
    assert small["trainer"][1] - small["checked"][1] <= 0.1  # ms


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_loss_stops_before_the_update(value):
    trainer = linear(clip_norm=1.0)
    trainer.train_step(iter(pairs(1)))
    weights = copy.deepcopy(trainer.model.state_dict())
    momentum = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    x, y = pairs(1)[0]
    with pytest.raises(FloatingPointError, match=f"loss is {value} at step 1, expected a finite"):
        trainer.train_step(iter([(x, y * value)]))
    assert all(torch.equal(weights[k], v) for k, v in trainer.model.state_dict().items())
    for i, s in trainer.optimizer.state_dict()["state"].items():
        assert torch.equal(s["momentum_buffer"], momentum[i]["momentum_buffer"])
    trainer.train_step(iter(pairs(1)))  # and it can go on
    assert trainer.step == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"steps": 2.5}, "steps must be a whole number, at least 1, got 2.5"),
        ({"steps": float("nan")}, "steps must be a whole number, at least 1, got nan"),
        ({"steps": float("inf")}, "steps must be a whole number, at least 1, got inf"),
        ({"steps": True}, "steps must be a whole number, at least 1, got True"),
        ({"steps": 1, "micro_batches": -2}, "micro_batches must be a whole .* got -2"),
        ({"steps": 1, "check_every": 0}, "check_every must be a whole number, .* got 0"),
        ({"steps": 1, "clip_norm": 0.0}, "clip_norm must be positive or None, got 0.0"),
        ({"steps": 1, "clip_norm": float("nan")}, "clip_norm must be positive or None, got nan"),
        ({"steps": 1, "amp_dtype": torch.float64}, "amp_dtype must be .* got torch.float64"),
    ],
)
def test_config_checks_itself(bad, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**bad)


def nan_gradient(trainer, at):
    """Let the loss of step `at` be finite, but not its gradient: the slope of a root at 0."""

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        zero = (model.weight * 0).sum()
        return loss + zero.sqrt() if trainer.step == at else loss

    trainer.loss_fn = loss_fn


@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_non_finite_gradients_stop_before_the_update(tmp_path, amp_dtype, clip_norm):
    trainer = linear(clip_norm=clip_norm, amp_dtype=amp_dtype)
    nan_gradient(trainer, at=3)
    before = []
    keep = [
        callbacks.Checkpoints(tmp_path / "c.pt", every=1),
        lambda t, m: before.append(copy.deepcopy([t.model.state_dict(), t.optimizer.state_dict()])),
    ]
    message = "gradient norm is nan at step 3, expected a finite number; weights .* as before"
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(lambda s: iter(pairs(5)[s:]), keep)
    weights, optimizer = before[-1]
    assert_same(dict(trainer.model.state_dict()), weights)
    for i, entries in trainer.optimizer.state_dict()["state"].items():
        assert_same(entries, optimizer["state"][i])

    again = linear(clip_norm=clip_norm, amp_dtype=amp_dtype)
    again.load(tmp_path / "c.pt")
    assert again.step == 3
    assert_same(dict(again.model.state_dict()), weights)


def test_fp16_that_only_skips_says_so():
    trainer = linear(amp_dtype=torch.float16, steps=60)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.loss_fn = lambda m, b: plain_loss(m, b) + (m.weight * 0).sum().sqrt()
    message = "the last 40 updates were skipped: expected gradients that are finite .* got none"
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(lambda s: itertools.repeat(pairs(1)[0]))
    assert trainer.step == 39  # the step that was the 40th
    assert_same(dict(trainer.model.state_dict()), before)


def test_fp16_counts_only_skips_in_a_row():
    trainer = linear(amp_dtype=torch.float16, steps=100)
    bad = lambda m, b: plain_loss(m, b) + (m.weight * 0).sum().sqrt()  # noqa: E731
    trainer.loss_fn = lambda m, b: (plain_loss if trainer.step % 30 == 29 else bad)(m, b)
    trainer.fit(lambda s: itertools.repeat(pairs(1)[0]))
    assert trainer.step == 100


def fused(**config):
    """The linear job with a fused optimizer, which can be told on the device to skip an update."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return Trainer(model, optimizer, plain_loss, TrainConfig(**{"steps": 6, **config}))


@pytest.mark.parametrize("bad_gradient", [False, True])
def test_looking_seldom_still_keeps_what_is_not_finite_out(tmp_path, bad_gradient):
    def poison(trainer):
        trainer.fit_batches = [*pairs(6)]
        if bad_gradient:
            nan_gradient(trainer, at=1)
        else:
            trainer.fit_batches[1] = (pairs(1)[0][0], pairs(1)[0][1] * float("nan"))

    trainer, skipping = fused(check_every=3), fused()
    poison(trainer)
    what = "gradient norm" if bad_gradient else "loss"
    message = f"{what} is nan at step 1, .* its update was left out, as noticed at step 3"
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(lambda s: iter(trainer.fit_batches))
    for batch in (pairs(6)[0], pairs(6)[2]):  # without the bad one
        skipping.train_step(iter([batch]))
    assert_same(dict(trainer.model.state_dict()), dict(skipping.model.state_dict()))
    trainer.train_step(iter(pairs(1)))  # and it can go on
    assert trainer.model.weight.isfinite().all()

    trainer = fused(check_every=3)
    poison(trainer)
    message = f"{what} is nan at step 1"
    with pytest.raises(FloatingPointError, match=message):
        saver = callbacks.Checkpoints(tmp_path / "c.pt", every=2)
        trainer.fit(lambda s: iter(trainer.fit_batches), [saver])
    assert os.listdir(tmp_path) == []  # read before it was saved


def test_a_fit_that_ends_between_two_looks_reads_what_is_left():
    trainer = fused(check_every=4)
    nan_gradient(trainer, at=5)
    with pytest.raises(FloatingPointError, match="gradient norm is nan at step 5"):
        trainer.fit(lambda s: iter(pairs(6)))


@pytest.mark.parametrize(("check_every", "reads"), [(1, 6), (3, 2), (4, 2)])
def test_the_device_is_waited_for_once_a_look(monkeypatch, check_every, reads):
    trainer, counts = fused(check_every=check_every, clip_norm=1.0), collections.Counter()
    for name in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self, name=name, original=original):
            counts[name] += 1
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    batches = pairs(6)
    trainer.data_seed = 0
    trainer.fit(lambda s: iter(batches))
    assert counts == {"tolist": reads}


def test_looking_seldom_an_infinite_loss_with_a_finite_gradient_is_left_out_as_well():
    trainer = fused(check_every=2, steps=2)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.loss_fn = lambda m, b: plain_loss(m, b) + float("inf")
    with pytest.raises(FloatingPointError, match="loss is inf at step 0"):
        trainer.fit(lambda s: iter(pairs(2)))
    assert_same(dict(trainer.model.state_dict()), before)


def test_a_skipped_update_does_not_stick_to_the_optimizer():
    first = fused(check_every=2, steps=2)
    nan_gradient(first, at=1)
    with pytest.raises(FloatingPointError, match="gradient norm is nan at step 1"):
        first.fit(lambda s: iter(pairs(2)))
    before = first.model.weight.detach().clone()
    second = Trainer(first.model, first.optimizer, plain_loss, TrainConfig(steps=1))
    second.fit(lambda s: iter(pairs(1)))
    assert not torch.equal(second.model.weight, before)


def test_looking_seldom_needs_a_fused_optimizer():
    with pytest.raises(ValueError, match="check_every=2 needs .* expected fused=True, got SGD"):
        linear(check_every=2)


def test_looking_seldom_makes_the_same_updates():
    often, seldom = fused(), fused(check_every=4)
    for trainer in (often, seldom):
        trainer.fit(lambda s: iter(pairs(6)))
    assert_same(dict(often.model.state_dict()), dict(seldom.model.state_dict()))


def test_batches_that_end_too_soon():
    trainer = linear(steps=5, micro_batches=2)
    message = "batches ended in step 1: expected 10 in all, 2 for each of 5 steps"
    with pytest.raises(ValueError, match=message):
        trainer.fit(lambda s: iter(pairs(3)[s:]))
    trainer.fit(lambda s: iter(pairs(10)[s:]))  # it can go on, and half a step is forgotten
    whole = linear(steps=5, micro_batches=2)
    whole.fit(lambda s: iter(pairs(10)[s:]))
    assert_same(dict(trainer.model.state_dict()), dict(whole.model.state_dict()))


def trainer_of(model, parameters, **config):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return Trainer(model, optimizer, plain_loss, TrainConfig(**{"steps": 5, **config}))


def test_a_model_and_an_optimizer_that_do_not_belong_together():
    model, other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Linear(4, 2)
    with pytest.raises(ValueError, match="ReLU has no parameters to train"):
        trainer_of(nn.ReLU(), other.parameters())
    with pytest.raises(ValueError, match="optimizer holds 2 parameters that are not the model's"):
        trainer_of(model, other.parameters())
    with pytest.raises(ValueError, match="the optimizer lacks 0.weight, 0.bias: give it all"):
        trainer_of(model, model[1].parameters())
    with pytest.raises(
        ValueError, match="on the meta device, without numbers: weight, bias; see to_empty"
    ):
        meta = nn.Linear(4, 2, device="meta")
        trainer_of(meta, meta.parameters())
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], other)
    with pytest.raises(ValueError, match="lacks 0.weight, 0.bias, 1.weight and 3 more"):
        trainer_of(deep, other.parameters())


def test_a_frozen_trunk_is_trained_around():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    (1e6 * plain_loss(model, pairs(1)[0])).backward()  # it was trained before, with its head
    model[0].requires_grad_(False)
    trunk = copy.deepcopy(model[0].state_dict())
    trainer = trainer_of(model, model[1].parameters())
    head = copy.deepcopy(model[1].state_dict())
    norms = []
    trainer.fit(lambda s: iter(pairs(5)), [lambda t, m: norms.append(m["grad_norm"].item())])
    assert max(norms) < 1e3  # what is left in the trunk's gradients does not count
    assert_same(dict(model[0].state_dict()), trunk)
    assert not torch.equal(model[1].weight, head["weight"])


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1])
def test_a_schedule_must_give_a_rate(rate):
    trainer = linear()
    trainer.lr_at = lambda step: 0.1 if step < 2 else rate
    message = rf"finite learning rate, at least 0, got lr_at\(2\) = {rate}"
    with pytest.raises(ValueError, match=message):
        trainer.fit(lambda s: iter(pairs(5)))
    assert trainer.step == 2 and trainer.model.weight.isfinite().all()


def test_a_run_that_is_over():
    trainer = linear(steps=2)
    trainer.fit(lambda s: iter(pairs(2)))
    with pytest.warns(UserWarning, match="nothing to train: all 2 steps are made"):
        trainer.fit(lambda s: iter(pairs(2)))
    trainer.config = TrainConfig(steps=1)
    with pytest.raises(ValueError, match="expected at most 1 steps, made are 2"):
        trainer.fit(lambda s: iter(pairs(2)))


# --- modes, rates, batches ------------------------------------------------------------------------


class Modes(nn.Module):
    """Note in which mode the parts of a model are at each call."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.seen = nn.Linear(4, 2), nn.Dropout(0.5), []

    def forward(self, x):
        self.seen.append((self.training, self.dropout.training))
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("forget", [lambda m: m.eval(), lambda m: m.dropout.eval()])
def test_every_step_is_in_training_mode(forget):
    model = Modes().eval()
    trainer = trainer_of(model, model.parameters())
    trainer.fit(lambda s: iter(pairs(5)), [lambda t, m: forget(t.model)])
    assert model.seen == [(True, True)] * 5


def two_groups(rates, lr_at=None):
    model = nn.Linear(4, 2)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
    config = TrainConfig(steps=5)
    return Trainer(model, torch.optim.SGD(groups), plain_loss, config, lr_at)


def test_parameter_groups_keep_their_ratio_to_the_first():
    trainer = two_groups([0.5, 0.125], lambda step: 1.0 - step / 4)  # 0 in the end
    seen = []
    for _ in range(2):  # a second Trainer finds the rates where the first one left them
        trainer.fit(
            lambda s: iter(pairs(5)),
            [lambda t, m: seen.append([g["lr"] for g in t.optimizer.param_groups])],
        )
        trainer = Trainer(
            trainer.model, trainer.optimizer, plain_loss, trainer.config, trainer.lr_at
        )
    assert seen == [[1.0, 0.25], [0.75, 0.1875], [0.5, 0.125], [0.25, 0.0625], [0.0, 0.0]] * 2


def test_a_ratio_to_zero():
    with pytest.raises(ValueError, match="first group's lr is 0: the ratio of another's, 0.5, is"):
        two_groups([0.0, 0.5], lambda step: 1.0)
    two_groups([0.0, 0.5])  # without a schedule nothing is multiplied
    two_groups([0.0, 0.0], lambda step: 1.0)


@pytest.mark.parametrize("clip_norm", [1e-3, 1e9])
def test_fp16_clips_the_true_gradient_not_the_scaled_one(clip_norm):
    """The scale is 65,536: clipped before it is taken out, the update would be far smaller."""
    trainer = linear(amp_dtype=torch.float16, clip_norm=clip_norm)
    exact = copy.deepcopy(trainer.model)
    before = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
    metrics = trainer.train_step(iter(pairs(1)))
    plain_loss(exact, pairs(1)[0]).backward()
    norm = torch.stack([p.grad.norm() for p in exact.parameters()]).norm().item()
    # products and sums in float16: a relative error of 2**-11 each, ten of them along each path
    assert metrics["grad_norm"].item() == pytest.approx(norm, rel=10 * 2**-11)
    moved = nn.utils.parameters_to_vector(trainer.model.parameters()) - before
    expected = 0.1 * min(norm, clip_norm)  # learning rate times norm
    assert moved.norm().item() == pytest.approx(expected, rel=10 * 2**-11)


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"x": x, "y": y, "name": "text"},
        lambda x, y: Pair(x, y),
        lambda x, y: collections.UserDict(x=x, deep=[{"y": y}], number=3),
    ],
)
def test_batches_keep_their_form_and_move_to_the_device(wrap):
    def move(batch):
        return _to_device(batch, torch.device("meta"))

    x, y = pairs(1)[0]
    batch = wrap(x, y)
    moved = move(batch)
    if isinstance(batch, collections.UserDict):
        assert isinstance(moved, dict) and moved["number"] == 3
        assert moved["x"].is_meta and moved["deep"][0]["y"].is_meta
        return
    assert type(moved) is type(batch) and len(moved) == len(batch)
    parts = moved.values() if isinstance(moved, dict) else moved
    assert [getattr(p, "is_meta", p) for p in parts] == [True, True, "text"][: len(batch)]


def test_the_batch_is_moved_before_the_loss_sees_it():
    trainer, seen = linear(), []
    trainer.device = torch.device("meta")  # stands for any other device

    def loss_fn(model, batch):
        seen.append([t.device.type for t in batch])
        return model.weight.sum()

    trainer.loss_fn = loss_fn
    trainer.train_step(iter(pairs(1)))
    assert seen == [["meta", "meta"]]


def test_a_tensor_is_a_batch_and_what_can_move_itself_does():
    x = pairs(1)[0][0]
    moved = _to_device(x, torch.device("meta"))
    assert moved.is_meta and moved.shape == x.shape
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert type(_to_device(packed, torch.device("cpu"))) is type(packed)


def test_stop_ends_the_run_after_this_step():
    trainer, seen = linear(), []
    watchers = [
        lambda t, m: t.stop() if t.step == 2 else None,
        lambda t, m: seen.append(t.finished),
    ]
    trainer.fit(lambda s: iter(pairs(5)[s:]), watchers)
    assert trainer.step == 2 and seen == [False, True] and trainer.config.steps == 5
    trainer.fit(lambda s: iter(pairs(5)[s:]))  # asked again, it goes on
    assert trainer.step == 5


# --- resume ---------------------------------------------------------------------------------------


def assert_same(a, b):
    assert a.keys() == b.keys()
    differ = [k for k in a if not torch.equal(a[k], b[k])]
    assert not differ, f"not bitwise equal: {differ}"


@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop", [1, 7, 23])
def test_stop_and_resume_is_bitwise_the_unbroken_run(tmp_path, stop, amp_dtype):
    def fresh(seed):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    whole = job.make_trainer(amp_dtype)
    fresh(0)
    whole.fit(job.batches_from)
    want = job.digest(whole)

    first = job.make_trainer(amp_dtype)
    fresh(0)
    batches = job.batches_from(0)
    first.model.train()
    for _ in range(stop):
        first.train_step(batches)
    first.save(tmp_path / "c.pt")
    second = job.make_trainer(amp_dtype)
    fresh(99)  # another process, another history
    second.load(tmp_path / "c.pt")
    assert second.step == stop
    second.fit(job.batches_from)
    assert_same(job.digest(second), want)


@pytest.mark.gpu
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16, torch.float16])
def test_resume_is_bitwise_on_a_gpu(tmp_path, amp_dtype):
    def trainer():
        return job.make_trainer(amp_dtype, device="cuda")

    whole, first, second = trainer(), trainer(), trainer()
    torch.manual_seed(0)
    whole.fit(job.batches_from)
    want = job.digest(whole)
    torch.manual_seed(0)
    random.seed(0), np.random.seed(0)
    batches = job.batches_from(0)
    first.model.train()
    for _ in range(7):
        first.train_step(batches)
    first.save(tmp_path / "c.pt")
    torch.manual_seed(99)
    second.load(tmp_path / "c.pt")
    second.fit(job.batches_from)
    assert_same(job.digest(second), want)


@pytest.fixture(scope="module")
def forkserver():
    """Processes that start in milliseconds: forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    # DDP and optimizers import torch._dynamo when first used: seconds in each process
    context.set_forkserver_preload(["tests.training_job", "torch._dynamo"])
    return context


def launch(context, folder, kill_at=None, workers=None):
    process = context.Process(target=job.run, args=(folder, kill_at, None, workers))
    process.start()
    return process


def kill_many(context, tmp_path, kills, seed, workers=None):
    """Kill a run again and again, in every way, until `kills` are done; compare with no kill."""
    reference = tmp_path / "reference"
    reference.mkdir()
    started = time.monotonic()
    process = launch(context, reference, workers=workers)
    process.join()
    duration = time.monotonic() - started
    assert process.exitcode == 0
    want = torch.load(reference / "result.pt", weights_only=True)
    size = (reference / "checkpoint.pt").stat().st_size
    rng, done, runs = random.Random(seed), 0, 0
    ways = {"in a write": 0, "after a step": 0, "from outside": 0}
    while done < kills:
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        runs += 1
        while not (folder / "result.pt").exists():
            way = rng.choice(list(ways)) if done < kills else None
            kill_at = {
                "in a write": (rng.randint(1, 4), rng.randint(1, size)),
                "after a step": (rng.randint(1, job.STEPS), None),
            }.get(way)
            process = launch(context, folder, kill_at, workers)
            if way == "from outside":
                process.join(rng.uniform(0, duration))
                process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                done += 1
                ways[way] += 1
                if (folder / "checkpoint.pt").exists():  # always loadable
                    job.make_trainer().load(folder / "checkpoint.pt")
            else:
                assert process.exitcode == 0
        assert_same(torch.load(folder / "result.pt", weights_only=True), want)
        assert len(os.listdir(folder)) <= 3  # checkpoint, result, and one partial file at most
    return ways


def test_kill_minus_9_at_twenty_random_points(forkserver, tmp_path):
    ways = kill_many(forkserver, tmp_path, kills=24, seed=0)
    assert sum(ways.values()) >= 20 and ways["in a write"] and ways["after a step"], ways


def test_kill_minus_9_with_a_plain_data_loader(forkserver, tmp_path):
    ways = kill_many(forkserver, tmp_path, kills=8, seed=2, workers=0)
    assert sum(ways.values()) == 8, ways


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "kills"),
    [(None, 200), (0, 200), (2, 50)],  # orphaned workers take seconds to notice that they are
)
def test_kill_minus_9_at_two_hundred_random_points(forkserver, tmp_path, workers, kills):
    ways = kill_many(forkserver, tmp_path, kills, seed=1, workers=workers)
    assert all(ways.values()), ways


def test_resuming_with_other_settings_is_refused(tmp_path):
    linear(micro_batches=2).save(tmp_path / "c.pt")
    trainer = linear(seed=1)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(
        ValueError, match="trained with other settings; micro_batches: expected 1, got 2 "
    ):
        trainer.load(tmp_path / "c.pt")
    assert all(torch.equal(before[k], v) for k, v in trainer.model.state_dict().items())


def test_a_longer_run_may_resume_a_shorter_one(tmp_path):
    short = linear(steps=2)
    short.fit(lambda s: iter(pairs(2)[s:]))
    short.save(tmp_path / "c.pt")
    long = linear(steps=4)
    long.load(tmp_path / "c.pt")
    long.fit(lambda s: iter(pairs(4)[s:]))
    assert long.step == 4


def test_another_model_is_refused_and_nothing_changes(tmp_path):
    linear().save(tmp_path / "c.pt")
    model = nn.Linear(4, 3)
    other = Trainer(model, torch.optim.SGD(model.parameters()), plain_loss, TrainConfig(steps=5))
    before = copy.deepcopy(model.state_dict())
    message = r"another model; bias: expected \[3\] torch.float32, got \[2\] torch.float32; weight"
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "c.pt")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def everything(trainer):
    """All that `load` could change, to compare before and after."""
    state = copy.deepcopy([trainer.model.state_dict(), trainer.optimizer.state_dict()])
    rng = checkpoint.rng_state(trainer.device)
    return [*state, trainer.scaler.state_dict(), trainer.step, trainer.data_seed, rng]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def refused(trainer, path, message):
    before = everything(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.load(path)
    assert same(everything(trainer), before)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of the job with everything in it, and its content."""
    trainer = job.make_trainer(torch.float16)
    trainer.fit(job.batches_from, [lambda t, m: t.stop() if t.step == 3 else None])
    trainer.save(tmp_path / "c.pt")
    return torch.load(tmp_path / "c.pt", weights_only=True)


def test_the_file_says_what_it_is(saved):
    assert saved["version"] == 2 and saved["torch"] == torch.__version__
    assert saved["config"] == {
        "micro_batches": 2,
        "clip_norm": 1.0,
        "amp_dtype": torch.float16,
    }
    assert saved["optimizer_settings"]["optimizer"] == "AdamW"
    assert saved["optimizer_settings"]["group 0 betas"] == (0.9, 0.999)


def change(state, path, value):
    """A copy of nested dicts and lists with one entry replaced."""
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 1, "expected format 2, got 1"),
        (["config", "clip_norm"], 2.0, "settings; clip_norm: expected 1.0, got 2.0"),
        (["step"], "7", "expected a number of steps >= 0, got '7'"),
        (["step"], -3, "expected a number of steps >= 0, got -3"),
        (["step"], True, "expected a number of steps >= 0, got True"),
        (["model", "0.weight"], torch.zeros(32, 8).half(), "0.weight: .* got .*float16"),
        (["optimizer_settings", "optimizer"], "Adam", "optimizer: expected AdamW, got Adam"),
        (
            ["optimizer", "state", 0, "exp_avg"],
            torch.zeros(3),
            "the optimizer's parameter 0: expected",
        ),
        (["optimizer", "state", 0, "exp_avg"], torch.zeros(1, 32, 8), r"got \[1, 32, 8\]"),
        (["optimizer", "state", 9], {}, "the optimizer has no parameter number 9"),
        (["scaler"], {}, "scaler: expected numbers for .*'scale'"),
        (["scaler", "scale"], float("nan"), "scaler: expected numbers for .* got .*nan"),
        (["scaler", "scale"], "big", "scaler: expected numbers for"),
        (["rng"], [], "expected the random states of 1 processes, got 0"),
        (["rng", 0, "generators", "cpu"], torch.zeros(3).byte(), "random state does not fit"),
        (["rng", 0, "generators", "python"], (3, (), None), "random state does not fit"),
    ],
)
def test_all_is_validated_before_anything_changes(tmp_path, saved, path, value, message):
    torch.save(change(saved, path, value), tmp_path / "other.pt")
    trainer = job.make_trainer(torch.float16)
    refused(trainer, tmp_path / "other.pt", message)
    trainer.load(tmp_path / "c.pt")
    assert trainer.step == 3


def test_the_scale_is_restored(tmp_path, saved):
    torch.save(change(saved, ["scaler", "scale"], 2.0**10), tmp_path / "other.pt")
    trainer = job.make_trainer(torch.float16)
    trainer.load(tmp_path / "other.pt")
    assert trainer.scaler.get_scale() == 2.0**10


def test_a_schedule_may_use_numpy(tmp_path):
    trainer = linear()
    trainer.lr_at = lambda step: np.float64(0.1)
    trainer.fit(lambda s: iter(pairs(5)), [callbacks.Checkpoints(tmp_path / "c.pt", every=1)])
    linear().load(tmp_path / "c.pt")


def with_optimizer(kind, **options):
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    return Trainer(model, optimizer, plain_loss, TrainConfig(steps=5))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: with_optimizer(torch.optim.SGD), "optimizer: expected SGD, got AdamW"),
        (lambda: with_optimizer(torch.optim.RMSprop), "optimizer: expected RMSprop, got AdamW"),
        (lambda: with_optimizer(torch.optim.Adam), "optimizer: expected Adam, got AdamW"),
        (lambda: with_optimizer(torch.optim.AdamW, lr=0.2), "group 0 lr: expected 0.2, got 0.1"),
        (
            lambda: with_optimizer(torch.optim.AdamW, weight_decay=0.5),
            r"group 0 weight_decay: expected 0.5, got 0.01 \(to change one on purpose: load with",
        ),
        (lambda: two_groups([0.1, 0.1]), "group 1 params: expected .'bias'.*, got None"),
    ],
)
def test_another_optimizer_is_refused_and_nothing_changes(tmp_path, other, message):
    trainer = with_optimizer(torch.optim.AdamW)
    trainer.fit(lambda s: iter(pairs(5)[s:]))
    trainer.save(tmp_path / "c.pt")
    refused(other(), tmp_path / "c.pt", message)


def test_other_ratios_between_groups_are_refused_other_rates_under_a_schedule_are_not(tmp_path):
    rate = lambda step: 0.1  # noqa: E731
    two_groups([0.5, 0.25], rate).save(tmp_path / "c.pt")
    two_groups([1.0, 0.5], rate).load(tmp_path / "c.pt")
    refused(two_groups([0.5, 0.5], rate), tmp_path / "c.pt", "lr / first lr: expected 1.0, got 0.5")


def test_a_rate_that_a_watcher_changed_is_no_other_setting(tmp_path):
    trainer = linear()

    def halve(t, m):
        t.optimizer.param_groups[0]["lr"] /= 2

    trainer.fit(lambda s: iter(pairs(5)[s:]), [halve])
    trainer.save(tmp_path / "c.pt")
    again = linear()
    again.load(tmp_path / "c.pt")
    assert again.optimizer.param_groups[0]["lr"] == 0.1 / 2**5


def test_optimizers_of_others_may_keep_what_they_like(tmp_path):
    class Shampoo(torch.optim.SGD):
        __module__ = "elsewhere"

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["preconditioner"] = torch.eye(p.numel())

    trainer = with_optimizer(Shampoo)
    trainer.fit(lambda s: iter(pairs(5)[s:]))
    trainer.save(tmp_path / "c.pt")
    again = with_optimizer(Shampoo)
    again.load(tmp_path / "c.pt")
    assert again.optimizer.state[again.model.bias]["preconditioner"].shape == (2, 2)


def test_adafactors_rows_and_columns_are_no_damage(tmp_path):
    trainer = with_optimizer(torch.optim.Adafactor)
    trainer.fit(lambda s: iter(pairs(5)[s:]))
    trainer.save(tmp_path / "c.pt")
    with_optimizer(torch.optim.Adafactor).load(tmp_path / "c.pt")


def test_a_compiled_model_and_a_plain_one_share_checkpoints(tmp_path):
    plain = linear()
    compiled = linear(seed=1)
    compiled.model = torch.compile(compiled.model, backend="eager")
    plain.save(tmp_path / "c.pt")
    compiled.load(tmp_path / "c.pt")
    compiled.save(tmp_path / "d.pt")
    linear(seed=2).load(tmp_path / "d.pt")
    assert torch.equal(compiled.model._orig_mod.weight, plain.model.weight)


# --- an interrupted step leaves nothing behind ----------------------------------------------------


def interrupted_in_the_second_micro_batch(trainer):
    calls, loss_fn = itertools.count(1), trainer.loss_fn

    def interrupt(model, batch):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    trainer.loss_fn = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(lambda s: iter(pairs(10)[s:]))
    trainer.loss_fn = loss_fn
    assert trainer.step == 2 and trainer.model.weight.grad is not None


@pytest.mark.parametrize("amp_dtype", [None, torch.float16])
@pytest.mark.parametrize("from_file", [False, True])
def test_half_a_step_is_forgotten(tmp_path, amp_dtype, from_file):
    config = {"micro_batches": 2, "clip_norm": 1.0, "amp_dtype": amp_dtype}
    whole, trainer = linear(**config), linear(**config)
    whole.fit(lambda s: iter(pairs(10)[s:]))
    trainer.save(tmp_path / "c.pt")
    interrupted_in_the_second_micro_batch(trainer)
    if from_file:
        trainer.load(tmp_path / "c.pt")
    trainer.fit(lambda s: iter(pairs(10)[s:]))
    assert_same(dict(trainer.model.state_dict()), dict(whole.model.state_dict()))


@pytest.mark.parametrize("from_file", [False, True])
def test_a_scaler_interrupted_between_unscaling_and_update_starts_afresh(tmp_path, from_file):
    config = {"clip_norm": 1.0, "amp_dtype": torch.float16}
    whole, trainer = linear(**config), linear(**config)
    for t in (whole, trainer):
        t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    whole.fit(lambda s: iter(pairs(5)[s:]))
    trainer.train_step(iter(pairs(1)))
    trainer.save(tmp_path / "c.pt")

    def interrupt(*_):
        raise KeyboardInterrupt

    trainer.scaler.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train_step(iter(pairs(1)))
    del trainer.scaler.step
    if from_file:
        trainer.load(tmp_path / "c.pt")
    trainer.fit(lambda s: iter(pairs(5)[s:]))
    assert_same(dict(trainer.model.state_dict()), dict(whole.model.state_dict()))
    assert trainer.scaler.get_scale() == whole.scaler.get_scale() == 2.0**12


def test_gradients_from_before_the_run_count_for_nothing():
    trainer, clean = linear(), linear()
    plain_loss(trainer.model, pairs(1)[0]).backward()
    for t in (trainer, clean):
        t.fit(lambda s: iter(pairs(5)[s:]))
    assert_same(dict(trainer.model.state_dict()), dict(clean.model.state_dict()))


def test_an_exception_in_a_watcher_can_be_survived():
    whole, trainer = job.make_trainer(), job.make_trainer()
    torch.manual_seed(4)
    whole.fit(job.loader_batches(0))
    want = job.digest(whole)
    random.seed(0), np.random.seed(0), torch.manual_seed(4)

    def fail(t, m):
        if t.step == 13:
            raise OSError("a disk, for example")

    with pytest.raises(OSError, match="a disk, for example"):
        trainer.fit(job.loader_batches(0), [fail])
    trainer.fit(job.loader_batches(0))
    assert_same(job.digest(trainer), want)


# --- a plain DataLoader ---------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 17])
def test_a_plain_data_loader_resumes_to_the_same_bits(tmp_path, stop, workers, eager):
    """Shuffled, no generator=, 2 batches a step, 6 an epoch; dropout and loss draw as well."""
    whole = job.make_trainer()
    torch.manual_seed(4)
    batches_from = job.loader_batches(workers, eager)
    whole.fit(batches_from, [lambda t, m: t.save(tmp_path / "c.pt") if t.step == stop else None])
    want = job.digest(whole)
    random.seed(98), np.random.seed(98), torch.manual_seed(98)  # another process, another history
    second = job.make_trainer()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    second.load(tmp_path / "c.pt")
    second.fit(job.loader_batches(workers, eager))
    assert_same(job.digest(second), want)


def test_the_batches_draw_from_generators_of_their_own():
    """What the data draws does not move the model's dropout, and the other way round."""

    def draws():
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    def run(data_draws, model_draws):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        seen = {"data": [], "model": []}

        def batches():
            for batch in pairs(5):
                seen["data"] += draws() if data_draws else []
                yield batch

        def watch(trainer, metrics):
            seen["model"] += draws() if model_draws else []

        linear_job = linear()
        random.seed(2), np.random.seed(2), torch.manual_seed(2)
        linear_job.fit(lambda s: batches(), [watch])
        return seen

    both = run(True, True)
    assert both["data"] == run(True, False)["data"] and both["model"] == run(False, True)["model"]
    assert len(both["data"]) == len(both["model"]) == 15
    assert not set(both["data"]) & set(both["model"])

    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    bare = [draws() for _ in range(5)]
    assert both["model"] == sum(bare, [])  # as if there were no Trainer


def test_a_failing_loader_gives_the_generators_back():
    def batches():
        yield pairs(1)[0]
        raise OSError("no such image")

    torch.manual_seed(5)
    want = torch.rand(1)
    trainer = linear()
    torch.manual_seed(5)
    with pytest.raises(OSError, match="no such image"):
        trainer.fit(lambda s: batches())
    assert torch.equal(torch.rand(1), want)

    def no_folder(start):
        raise OSError("no such folder")

    torch.manual_seed(5)
    with pytest.raises(OSError, match="no such folder"):
        trainer.fit(no_folder)
    assert torch.equal(torch.rand(1), want)


# --- several processes ----------------------------------------------------------------------------


def on_two_ranks(context, target, *arguments):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [context.Process(target=target, args=(r, 2, port, *arguments)) for r in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [0, 0]


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one(forkserver, tmp_path, sharded):
    single = linear(steps=3, micro_batches=2, clip_norm=0.5)
    losses = []
    single.fit(lambda s: iter(pairs(6)[s:]), [lambda t, m: losses.append(m["loss"])])
    on_two_ranks(forkserver, job.data_parallel, str(tmp_path), sharded)
    for rank in range(2):
        got = torch.load(tmp_path / f"result{rank}.pt", weights_only=True)
        for a, b in zip(got["weights"], single.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        assert torch.allclose(got["loss"], torch.stack(losses), atol=1e-6)
        # both ranks stop, though only one saw NaN
        assert got["nan loss"].startswith("FloatingPointError: loss is nan at step 3")
        assert got["nan gradient"].startswith("FloatingPointError: gradient norm is nan at step 3")
        assert got["finite"]
        # 3 updates of 2 micro-batches: DDP exchanges gradients after the second of each only
        assert got["without exchange"] == (0 if sharded else 3)
        if sharded:
            assert got["save"].startswith("NotImplementedError: this model is sharded")
        else:
            assert got["save"] == ""
            assert "No such file or directory; cannot save" in got["bad save"]
        # rank 0 alone writes, and tries to: both ranks know what came of it
        assert got["written"] == (2 if rank == 0 and not sharded else 0)
    if not sharded:
        with pytest.raises(ValueError, match="the random states of 1 processes, got 2"):
            linear(steps=3, micro_batches=2, clip_norm=0.5).load(tmp_path / "c.pt")
        state = torch.load(tmp_path / "c.pt", weights_only=True)
        assert list(state["model"]) == ["weight", "bias"]  # no "module."


def test_a_sharded_model_is_told_where_to_go(tmp_path):
    trainer = linear()
    trainer.model.weight.full_tensor = None  # what the parameters of FSDP2 have
    message = "this model is sharded, each rank has a part of it: {0} it .*resharding.{0}_sharded"
    with pytest.raises(NotImplementedError, match=message.format("save")):
        trainer.save(tmp_path / "c.pt")
    assert os.listdir(tmp_path) == []
    linear().save(tmp_path / "c.pt")
    with pytest.raises(NotImplementedError, match=message.format("load")):
        trainer.load(tmp_path / "c.pt")


def test_each_rank_resumes_its_own_random_state(forkserver, tmp_path):
    on_two_ranks(forkserver, job.dropout_on_each_rank, str(tmp_path), False)
    (tmp_path / "4.pt").replace(tmp_path / "c.pt")
    on_two_ranks(forkserver, job.dropout_on_each_rank, str(tmp_path), True)
    whole, resumed = (
        [torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in range(2)]
        for name in ("whole", "resumed")
    )
    assert not torch.equal(whole[0]["rng"], whole[1]["rng"])  # the ranks draw different dropout
    for rank in range(2):
        assert_same(resumed[rank], whole[rank])
    assert not list(tmp_path.glob("*.partial"))


def test_all_ranks_stop_early_together(forkserver, tmp_path):
    on_two_ranks(forkserver, job.stop_early, str(tmp_path))
    # means: 5, 4, 4, 3.5, 3.5, 3.75: the best at step 4, twice no better by step 6
    for rank in range(2):
        got = torch.load(tmp_path / f"result{rank}.pt", weights_only=True)
        assert got == {"step": 6, "best": 4}
