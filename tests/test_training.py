import copy
import multiprocessing
import random
import signal
import socket
import time

import numpy as np
import pytest
import torch
from torch import nn

from helpers.page import records
from helpers.training import TrainConfig, Trainer
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


def test_the_recorded_overhead_is_at_most_two_percent():
    rows = records.load("training", "cpu").rows
    assert all(row["ratio"][1] <= 1.02 for row in rows), rows


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
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.train_step(iter(pairs(1)))  # and it can go on
    assert trainer.step == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 1, "micro_batches": -2}, "micro_batches must be at least 1, got -2"),
        ({"steps": 1, "clip_norm": 0.0}, "clip_norm must be positive or None, got 0.0"),
        ({"steps": 1, "clip_norm": float("nan")}, "clip_norm must be positive or None, got nan"),
        ({"steps": 1, "amp_dtype": torch.float64}, "amp_dtype must be .* got torch.float64"),
    ],
)
def test_config_checks_itself(bad, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**bad)


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
    context.set_forkserver_preload(["tests.training_job"])
    return context


def launch(context, folder, kill_at=None):
    process = context.Process(target=job.run, args=(folder, kill_at))
    process.start()
    return process


def kill_many(context, tmp_path, kills, seed):
    """Kill a run again and again, in every way, until `kills` are done; compare with no kill."""
    reference = tmp_path / "reference"
    reference.mkdir()
    started = time.monotonic()
    process = launch(context, reference)
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
            process = launch(context, folder, kill_at)
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
    return ways


def test_kill_minus_9_at_twenty_random_points(forkserver, tmp_path):
    ways = kill_many(forkserver, tmp_path, kills=24, seed=0)
    assert sum(ways.values()) >= 20 and ways["in a write"] and ways["after a step"], ways


@pytest.mark.slow
def test_kill_minus_9_at_two_hundred_random_points(forkserver, tmp_path):
    ways = kill_many(forkserver, tmp_path, kills=200, seed=1)
    assert all(ways.values()), ways


def test_resuming_with_other_settings_is_refused(tmp_path):
    linear(micro_batches=2).save(tmp_path / "c.pt")
    trainer = linear(seed=1)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ValueError, match="was trained with .*'micro_batches': '2'.* this run has"):
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
    message = r"holds another model; bias: expected \[3\], got \[2\]; weight: expected \[3, 4\]"
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "c.pt")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_another_optimizer_is_refused_and_nothing_changes(tmp_path):
    trainer = linear()
    trainer.fit(lambda s: iter(pairs(5)[s:]))
    trainer.save(tmp_path / "c.pt")
    model = nn.Linear(4, 2)
    groups = [{"params": [p]} for p in model.parameters()]
    other = Trainer(model, torch.optim.SGD(groups, lr=0.1), plain_loss, TrainConfig(steps=5))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        other.load(tmp_path / "c.pt")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one(forkserver, tmp_path, sharded):
    single = linear(steps=3, micro_batches=2, clip_norm=0.5)
    losses = []
    single.fit(lambda s: iter(pairs(6)[s:]), [lambda t, m: losses.append(m["loss"])])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = [(rank, 2, port, str(tmp_path), sharded) for rank in range(2)]
    processes = [forkserver.Process(target=job.data_parallel, args=a) for a in arguments]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [0, 0]
    for rank in range(2):
        got = torch.load(tmp_path / f"result{rank}.pt", weights_only=True)
        for a, b in zip(got["weights"], single.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        assert torch.allclose(got["loss"], torch.stack(losses), atol=1e-6)
        assert got["stopped"] is not sharded  # both ranks, though only one saw NaN
    if not sharded:  # the names in the file carry no "module."
        linear(steps=3, micro_batches=2, clip_norm=0.5).load(tmp_path / "0.pt")
