"""FSDP2 against one process: gradients, losses, and the bytes of each rank."""

import pytest
import torch

from helpers import budget, sharding
from helpers.distributed import spawn
from helpers.models import MLP, count_parameters
from tests import sharding_job as job
from tests.rounding import UNIT


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[2, 4])
def fsdp(request):
    return request.param, spawn(job.fsdp, ranks=request.param)


@pytest.fixture(scope="module")
def single():
    return job.single_process()


def test_gradients_are_those_of_one_process(fsdp, single):
    _, results = fsdp
    for result in results:
        for name in ("freed", "kept", "offload"):
            for got, want, bound in zip(
                result["gradients"][name], *single["gradients"], strict=True
            ):
                assert ((got - want).abs() <= 2 * bound).all()


@pytest.mark.parametrize("name", ["freed", "kept", "offload", "mixed"])
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


STAGES = {"ddp": "ddp", "zero1": "zero1", "kept": "zero2", "freed": "zero3", "mixed": "zero3"}
MOMENTS = {"blocks.3": "block", "end of forward": "forward", "after step": "update"}


@pytest.mark.parametrize("name", STAGES)
def test_bytes_of_each_rank_are_those_of_the_formula(fsdp, name):
    ranks, results = fsdp
    config = job.SMALL
    sizes = {"vocabulary": config.vocabulary, "context": config.context}
    sizes |= {"layers": config.layers, "width": config.width}
    predicted = budget.rank_bytes(
        **sizes,
        sharding=STAGES[name],
        gpus=ranks,
        precision="amp" if name == "mixed" else "fp32",
    )
    for result in results:
        for moment, key in MOMENTS.items():
            prefix = "module." if name in ("ddp", "zero1") and "blocks" in moment else ""
            held = result["bytes"][name][prefix + moment]
            want = dict(predicted[key])
            if name == "mixed" and key == "forward":  # by default the model's own group is kept
                block = count_parameters(job.gpt(config).blocks[0])
                want["gathered"] = 2 * (count_parameters(job.gpt(config)) - config.layers * block)
            assert held == pytest.approx(want, rel=0.02), (moment, held, want)
            if name not in ("ddp", "zero1"):  # every dimension can be divided here: exact
                assert held | {"optimizer": 0} == want | {"optimizer": 0}


def test_whole_tensors_are_given_away_as_zero_redundancy_optimizer_does(fsdp):
    ranks, results = fsdp
    tensors = [p.numel() for p in job.gpt(job.SMALL).parameters()]
    held = sorted(r["bytes"]["zero1"]["after step"]["optimizer"] for r in results)
    counters = 4 * len(tensors)
    shares = sorted(8 * share for share in budget.whole_tensor_shares(tensors, ranks))
    assert sum(held) == sum(shares) + counters
    assert all(0 <= got - want <= counters for got, want in zip(held, shares, strict=True))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="expected a model with a ModuleList `blocks`, got MLP"):
        sharding.shard(MLP(4, 2))
