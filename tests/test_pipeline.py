"""Pipelines: the schedules as data against PyTorch's real ones, gradients against one process."""

import pytest
import torch

from helpers import pipeline
from helpers.distributed import spawn
from helpers.models import GPT
from helpers.pipeline import Action
from tests import sharding_job as job

ORDERS = {"gpipe": pipeline.gpipe, "1f1b": pipeline.one_forward_one_backward}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return request.param, spawn(job.pipeline_job, ranks=request.param)


@pytest.mark.parametrize("name", ORDERS)
def test_the_real_schedule_works_in_this_order(ranks, name):
    count, results = ranks
    assert [r[name, "order"] for r in results] == ORDERS[name](count, job.PARTS)


@pytest.mark.parametrize("name", ORDERS)
def test_gradients_are_those_of_one_process(ranks, name):
    count, results = ranks
    names = [n for n, _ in job.gpt().named_parameters()]
    single = dict(zip(names, zip(*job.single_process()["gradients"], strict=True), strict=True))
    seen = set()
    for result in results:
        for key, got in result[name].items():
            want, bound = single["tokens.weight" if key == "head.weight" else key]
            assert ((got - want).abs() <= 2 * bound).all(), key
            seen.add(key)
    assert seen == {*names, "head.weight"}
    # before they are summed, neither is the gradient of the matrix
    want, bound = single["tokens.weight"]
    for own in (
        results[0][name, "own"]["tokens.weight"],
        results[-1][name, "own"]["head.weight"],
    ):
        assert ((own - want).abs() > 2 * bound).any()


@pytest.mark.parametrize("name", ORDERS)
def test_the_loss_curve_is_that_of_one_process(ranks, name):
    _, results = ranks
    want, bound = job.single_process()["curve"]
    got = torch.stack(results[-1][name, "curve"])
    assert ((got - want).abs() <= 2 * bound).all()
    assert results[0][name, "curve"] == [None] * job.STEPS
    first, last = results[0][name, "weights"], results[-1][name, "weights"]
    assert torch.equal(first["tokens.weight"], last["head.weight"])


# ---- schedules as data


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("more", [0, 1, 5, 24])
def test_the_bubble_is_that_of_the_formula(name, stages, more):
    micro_batches = stages + more
    orders = ORDERS[name](stages, micro_batches)
    for forward, backward in ((1, 2), (1, 1), (3, 5)):
        works = pipeline.timeline(orders, forward, backward)
        assert len(works) == 2 * stages * micro_batches
        assert max(w.end for w in works) == (micro_batches + stages - 1) * (forward + backward)
        assert pipeline.bubble(works) == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_no_stage_does_two_things_at_once_and_nothing_comes_before_what_it_needs():
    for order in ORDERS.values():
        works = pipeline.timeline(order(4, 6), 1, 2)
        ends = {(w.stage, w.micro_batch, w.backward): w.end for w in works}
        free = [0.0] * 4
        for w in works:
            assert w.start >= free[w.stage]
            free[w.stage] = w.end
            if w.backward:
                assert w.start >= ends[w.stage, w.micro_batch, False]
                assert w.stage == 3 or w.start >= ends[w.stage + 1, w.micro_batch, True]
            else:
                assert w.stage == 0 or w.start >= ends[w.stage - 1, w.micro_batch, False]


def test_what_waits_for_backward():
    assert [pipeline.most_stored(o) for o in pipeline.gpipe(4, 10)] == [10, 10, 10, 10]
    orders = pipeline.one_forward_one_backward(4, 10)
    assert [pipeline.most_stored(o) for o in orders] == [4, 3, 2, 1]


@pytest.mark.parametrize("order", ORDERS.values())
def test_a_schedule_without_work_is_refused(order):
    with pytest.raises(ValueError, match="at least 1 stage and 1 micro-batch, got 0 and 3"):
        order(0, 3)


def test_1f1b_wants_a_micro_batch_for_each_stage():
    with pytest.raises(ValueError, match="expected at least 4 micro-batches, got 3"):
        pipeline.one_forward_one_backward(4, 3)


def test_stages_that_wait_for_each_other_are_noticed():
    first = [Action(0, True), Action(0, False)]
    with pytest.raises(ValueError, match="these stages wait for each other: {0: Action"):
        pipeline.timeline([first, [Action(0, False), Action(0, True)]])


# ---- stages


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_stages_one_after_the_other_are_the_model(stages):
    model = job.gpt()
    found = pipeline.split(model, stages)
    x, _ = job.batch()
    y = x
    for stage in found:
        y = stage(y)
    assert torch.equal(y, model(x))
    names = [name for stage in found for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted([*(n for n, _ in model.named_parameters()), "head.weight"])


@pytest.mark.parametrize("stages", [1, 5])
def test_stages_that_cannot_be_made_are_refused(stages):
    with pytest.raises(ValueError, match=f"expected from 2 to 4 stages, got {stages}"):
        pipeline.split(GPT(job.TINY), stages)
