"""Tensor parallel, by hand and by DTensor, against one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helpers import tensor_parallel
from helpers.distributed import spawn
from helpers.models import GPT, GPTConfig
from tests import sharding_job as job
from tests.rounding import UNIT, bounds

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return request.param, spawn(job.tensor_parallel_job, ranks=request.param)


@pytest.fixture(scope="module")
def single():
    return job.single_process()


@pytest.fixture(scope="module")
def single_mlp():
    model = job.mlp()
    assert (model[0](job.mlp_batch()[0]).abs() > 1e-4).all()  # rounding moves nothing past ReLU's 0
    want = job.mlp_gradients_of(job.parameters_of(model), model)
    return want, bounds(partial(job.mlp_gradients_of, model=model), job.parameters_of(model))


def test_by_hand_is_one_process(ranks, single_mlp):
    _, results = ranks
    want, bound = single_mlp
    # the input's gradient, columns' weight and bias, rows' weight and bias
    along = (None, 0, 0, 1, None)
    for number, dim in enumerate(along):
        parts = [result["by hand"][number] for result in results]
        for got in [torch.cat(parts, dim)] if dim is not None else parts:
            assert ((got - want[number]).abs() <= 2 * bound[number]).all()


def test_gradcheck_by_hand(ranks):
    for result in ranks[1]:
        assert result["gradcheck"] is True
        assert "once_differentiable" in result["twice"]


def test_dtensor_is_one_process(ranks, single_mlp):
    _, results = ranks
    for result in results:
        for got, want, bound in zip(result["DTensor"], *single_mlp, strict=True):
            assert ((got - want).abs() <= 2 * bound).all()


def test_the_bounds_notice_a_lost_rank(single_mlp):
    """As if one rank's term of the sum were left out."""
    model = job.mlp()
    with torch.no_grad():
        model[2].weight[:, -4:] = 0
    lost = job.mlp_gradients_of(job.parameters_of(model), model)
    assert all(((g - w).abs() > 2 * b).any() for g, w, b in zip(lost, *single_mlp, strict=True))


@pytest.mark.parametrize("way", [False, True, "2-D"], ids=["whole", "sequence", "2-D"])
def test_the_gpt_is_that_of_one_process(ranks, single, way):
    count, results = ranks
    if way == "2-D" and count == 2:
        assert way not in results[0]
        return
    names = [name for name, _ in job.gpt().named_parameters()]
    for result in results:
        assert list(result[way]) != [] and set(result[way]) == set(names)
        for name, want, bound in zip(names, *single["gradients"], strict=True):
            assert ((result[way][name] - want).abs() <= 2 * bound).all(), name
        want, bound = single["curve"]
        assert torch.equal(result[way, "curve"], results[0][way, "curve"])
        assert ((result[way, "curve"] - want).abs() <= 2 * bound).all()


@pytest.mark.parametrize("way", [False, True, "2-D"], ids=["whole", "sequence", "2-D"])
def test_the_trainer_clips_by_the_norm_of_one_process(ranks, single, way):
    _, results = ranks
    gradients, gradient_bounds = single["gradients"]
    want = torch.stack([g.double().norm() for g in gradients]).norm()
    # by the triangle inequality; then the sum of the squares, and its root
    slack = 2 * torch.stack([b.norm() for b in gradient_bounds]).norm()
    slack += sum(g.numel() for g in gradients) * UNIT * want
    for result in results:
        if (way, "trainer") in result:
            first, second = result[way, "trainer"]
            assert abs(first - want) <= slack and 0 < second != first
            assert torch.equal(first, results[0][way, "trainer"][0])


def test_the_collectives_of_a_step(ranks):
    _, results = ranks
    layers = job.TINY.layers
    for result in results:
        assert result["counts"]["by hand"] == {"allreduce_": 2}  # one forward, one backward
        assert result["counts"]["DTensor"] == {"all_reduce": 2}
        assert result["counts"][False] == {"all_reduce": 4 * layers}
        assert result["counts"][True] == {
            "all_gather_into_tensor": 4 * layers + 2,  # and x after the last block, its gradient
            "reduce_scatter_tensor": 4 * layers,
        }


def test_each_rank_has_its_part(ranks):
    count, results = ranks
    width = job.TINY.width
    for result in results:
        local = result[True, "local"]
        assert local["blocks.1.qkv.k.weight"] == (width // count, width)
        assert local["blocks.1.mlp.0.bias"] == (4 * width // count,)
        assert local["blocks.1.mlp.2.weight"] == (width, 4 * width // count)
        assert local["blocks.1.projection.bias"] == local["norm.weight"] == (width,)
        if count == 4:  # along the data dimension everything is sharded, too
            local = result["2-D", "local"]
            assert local["blocks.1.mlp.0.weight"] == (4 * width // 4, width)
            assert local["blocks.1.mlp.2.weight"] == (width // 2, 4 * width // 2)
            assert local["norm.weight"] == (width // 2,)


@pytest.fixture
def lonely(tmp_path):
    """A group of one rank, in this process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_has_everything(lonely):
    linear = nn.Linear(3, 5, bias=False)
    x = torch.randn(2, 3)
    for layer in (tensor_parallel.ColumnLinear(linear), tensor_parallel.RowLinear(linear)):
        assert torch.equal(layer(x), linear(x)) and layer.bias is None


def test_what_cannot_be_split_is_refused(lonely, monkeypatch):
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="expected a model without dropout, got 0.1"):
        tensor_parallel.parallelize_gpt(GPT(replace(job.TINY, dropout=0.1)), mesh)
    monkeypatch.setattr(type(mesh), "size", lambda self: 3)
    with pytest.raises(ValueError, match="4 heads cannot be split over 3 ranks"):
        tensor_parallel.parallelize_gpt(GPT(job.TINY), mesh)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="5 rows or columns cannot be split over 2 ranks"):
        tensor_parallel.ColumnLinear(nn.Linear(4, 5))


def test_joined_is_what_a_plain_gpt_loads():
    plain = GPT(GPTConfig(vocabulary=5, context=3, layers=2, heads=2, width=4))
    split = GPT(plain.config)
    split.load_state_dict(plain.state_dict())
    for block in split.blocks:
        block.qkv = tensor_parallel.SplitQKV(block.qkv)
    tokens = torch.tensor([[0, 4, 2]])
    assert torch.allclose(split(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
    state = tensor_parallel.joined(split.state_dict())
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], t) for name, t in plain.state_dict().items())
