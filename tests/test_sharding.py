"""FSDP2 against one process: gradients, losses, and the bytes of each rank."""

import pytest
import torch
from torch import nn

from helpers import budget, sharding
from helpers.distributed import spawn
from helpers.models import MLP
from tests import sharding_job as job
from tests.rounding import UNIT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[2, 4])
def fsdp(request):
    return request.param, spawn(job.fsdp, ranks=request.param)


@pytest.fixture(scope="module")
def single():
    return job.single_process()


def test_gradients_are_those_of_one_process(fsdp, single):
    _, results = fsdp
    for result in results:
        for name in ("default", "freed", "kept", "offload"):
            for got, want, bound in zip(
                result["gradients"][name], *single["gradients"], strict=True
            ):
                assert ((got - want).abs() <= 2 * bound).all()


@pytest.mark.parametrize("name", ["default", "freed", "kept", "offload", "mixed"])
def test_gradients_are_the_mean_of_the_parts(fsdp, name):
    """n - 1 additions of n numbers; with two ranks there is one order, so not a bit differs."""
    ranks, results = fsdp
    for result in results:
        parts = result["16 bits" if name == "mixed" else "parts"]
        for got, *own in zip(result["gradients"][name], *parts, strict=True):
            own = torch.stack(own).double()
            roundings = 2 * ranks
            bound = roundings * UNIT * own.abs().mean(0)
            assert got.dtype == torch.float32
            if ranks == 2:
                assert torch.equal(got, own.float().sum(0) / 2)
            assert ((got - own.mean(0)).abs() <= bound).all()


def test_the_loss_curve_is_that_of_one_process(fsdp, single):
    _, results = fsdp
    want, bound = single["curve"]
    for result in results:
        assert torch.equal(result["curve"], results[0]["curve"])
        assert ((result["curve"] - want).abs() <= 2 * bound).all()
    assert (bound < 1e-3 * want).all() and want[-1] < want[0] - 0.1


def test_the_bounds_notice_a_lost_sequence(single):
    model = job.gpt()
    x, y = job.batch()
    job.loss_of(model, x[1:], y[1:]).backward()
    lost = zip(model.parameters(), *single["gradients"], strict=True)
    assert all(((p.grad - want).abs() > 2 * bound).any() for p, want, bound in lost)


STAGES = {"ddp": "ddp", "zero1": "zero1", "kept": "zero2", "default": "zero3", "mixed": "zero3"}
MOMENTS = {"blocks.3": "block", "end of forward": "forward", "after step": "update"}
SIZES = {name: getattr(job.SMALL, name) for name in ("vocabulary", "context", "layers", "width")}


def precision(name):
    return "amp" if name == "mixed" else "fp32"


@pytest.mark.parametrize("name", STAGES)
def test_bytes_of_each_rank_are_those_of_the_formula(fsdp, name):
    ranks, results = fsdp
    setting = SIZES | {"sharding": STAGES[name], "gpus": ranks, "precision": precision(name)}
    predicted = budget.rank_bytes(**setting)
    for result in results:
        for moment, key in MOMENTS.items():
            prefix = "module." if name in ("ddp", "zero1") and "blocks" in moment else ""
            held, want = result["bytes"][name][prefix + moment], predicted[key]
            assert held == pytest.approx(want, rel=0.02), (moment, held, want)
            if name not in ("ddp", "zero1"):  # every dimension can be divided here: exact
                assert held | {"optimizer": 0} == want | {"optimizer": 0}


def test_buckets_are_counted_unless_gradients_live_in_them():
    separate, shared = spawn(job.buckets)[0]
    for held, with_gradients in zip(separate, (False, True), strict=True):
        assert held["buckets"] == held["parameters"]
        assert held["gradients"] == with_gradients * held["parameters"]
    for held in shared:
        assert held["buckets"] + held["gradients"] == held["parameters"]


def test_what_reshard_after_forward_true_frees(fsdp):
    """Also the group of the model itself."""
    _, results = fsdp
    for result in results:
        freed, default = result["bytes"]["freed"], result["bytes"]["default"]
        assert freed["blocks.3"] == default["blocks.3"]
        assert freed["end of forward"]["gathered"] == 0
        assert default["end of forward"]["gathered"] > 0


@pytest.mark.parametrize("name", STAGES)
def test_a_step_of_each_rank_is_that_of_the_formula(fsdp, name):
    ranks, results = fsdp
    setting = SIZES | {"sharding": STAGES[name], "gpus": ranks, "precision": precision(name)}
    predicted = budget.rank_step_bytes(
        **setting, heads=job.SMALL.heads, micro_batch=job.PARTS // ranks
    )
    forward, tokens = predicted["forward"], job.PARTS // ranks * job.SMALL.context
    saved = forward["activations"] + forward["loss"] - 2 * 8 * tokens  # without the batch
    for result in results:
        found = result["bytes"][name]
        assert found["activations"] == pytest.approx(saved, abs=64)
        if name in ("ddp", "zero1"):
            peak = max(sum(parts.values()) for parts in predicted.values())
            assert found["peak"] == pytest.approx(peak, rel=0.01)
        else:
            held = sum(found["end of forward"].values())
            assert held + saved + 16 * tokens == pytest.approx(sum(forward.values()), abs=512)


def test_activations_are_the_same_under_every_stage():
    setting = SIZES | {"heads": 4, "micro_batch": 2, "gpus": 4}
    steps = [
        budget.rank_step_bytes(**setting, sharding=stage)
        for stage in ("ddp", "zero1", "zero2", "zero3")
    ]
    for moment in steps[0]:
        assert len({step[moment]["activations"] for step in steps}) == 1
    states = [sum(step["update"][p] for p in ("parameters", "optimizer")) for step in steps]
    assert states[0] > states[1] > states[2] == states[3]


def test_on_one_gpu_a_stage_changes_nothing_that_stays():
    one = budget.step_bytes(**SIZES, heads=4, micro_batch=2)
    for stage in ("ddp", "zero1"):
        assert budget.rank_step_bytes(**SIZES, heads=4, micro_batch=2, sharding=stage) == {
            moment: parts | {"gathered": 0} for moment, parts in one.items()
        }


def test_words_and_sizes_that_no_training_has_are_refused():
    with pytest.raises(ValueError, match="sharding must be one of .*'zero3'.*, got 'fsdp'"):
        budget.rank_bytes(**SIZES, sharding="fsdp")
    with pytest.raises(ValueError, match="every size must be at least 1"):
        budget.rank_bytes(**SIZES, gpus=0)


def test_whole_tensors_are_given_away_as_zero_redundancy_optimizer_does(fsdp):
    ranks, results = fsdp
    tensors = [p.numel() for p in job.gpt(job.SMALL).parameters()]
    held = sorted(r["bytes"]["zero1"]["after step"]["optimizer"] for r in results)
    counters = 4 * len(tensors)
    shares = sorted(8 * share for share in budget.whole_tensor_shares(tensors, ranks))
    assert sum(held) == sum(shares) + counters
    assert all(0 <= got - want <= counters for got, want in zip(held, shares, strict=True))


@pytest.fixture(scope="module")
def clipped():
    return spawn(job.clipping, ranks=4)


def test_clipping_is_that_of_one_process_however_the_model_is_divided(clipped):
    plain = job.clipping_gradients(job.clipping_model())
    want = nn.utils.clip_grad_norm_(plain.parameters(), job.LIMIT).item()
    assert want > 2 * job.LIMIT
    for result in clipped:
        for name in ("plain", "tensor", "data", "both"):
            norm, gradients = result[name]
            assert norm == pytest.approx(want, rel=1e-13)
            for got, parameter in zip(gradients, plain.parameters(), strict=True):
                assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=1e-15)
        norm, _ = result["twice"]
        assert norm == pytest.approx(job.LIMIT, rel=1e-5)


def test_clipping_adds_up_what_stages_have(clipped):
    plain = job.clipping_gradients(job.clipping_model())
    want = nn.utils.clip_grad_norm_(plain.parameters(), job.LIMIT).item()
    layers = [layer for layer in plain if isinstance(layer, nn.Linear)]
    for rank, result in enumerate(clipped):
        norm, gradients = result["stages"]
        assert norm == pytest.approx(want, rel=1e-13)
        own = [p.grad for layer in layers[rank::4] for p in layer.parameters()]
        for got, expected in zip(gradients, own, strict=True):
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="expected a model with a ModuleList `blocks`, got MLP"):
        sharding.shard(MLP(4, 2))
