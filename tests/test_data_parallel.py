"""DDP's gradients against one process with the whole batch; its bytes and timeline."""

import pytest
import torch

from helpers import collectives, data_parallel
from helpers.distributed import spawn
from tests import distributed_job as job


def single(make):
    """The gradients of one process with the whole batch."""
    model, x, y = make()
    job.loss_of(model, x, y).backward()
    return job.gradients(model)


def rounding_bound():
    """For each gradient of `any_numbers`: how far two ways of summing it may be apart.

    A number that k roundings lead to is off by at most γ(k) = ku / (1 - ku) times what it would be
    if nothing cancelled: the same computation with the absolute values of all numbers (Higham,
    Accuracy and Stability of Numerical Algorithms, §3). ReLU passes or stops in both alike: no
    input of it is nearer to 0 than its own bound, which is asserted.
    """
    model, x, y = job.any_numbers()
    w0, b0, w1, b1 = (p.detach().double() for p in model.parameters())
    x, y = x.double(), y.double()
    inside = x @ w0.T + b0
    passes = (inside > 0).double()
    n, outputs = y.shape

    # absolute values
    hidden = (x.abs() @ w0.abs().T + b0.abs()) * passes
    error = (hidden @ w1.abs().T + b1.abs() + y.abs()) * 2 / (n * outputs)
    back = error @ w1.abs() * passes
    sizes = [back.T @ x.abs(), back.sum(0), error.T @ hidden, error.sum(0)]

    unit = torch.finfo(torch.float32).eps / 2

    def gamma(k):
        return k * unit / (1 - k * unit)

    assert (inside.abs() > gamma(len(w0) + 1) * (x.abs() @ w0.abs().T + b0.abs())).all()
    # the longest path: two products forward, two and the mean backward, the sum over the samples
    roundings = sum(job.SIZES) + sum(job.SIZES[1:]) + n + 12
    return [2 * gamma(roundings) * size for size in sizes]


@pytest.fixture(scope="module", params=[2, 4])
def ddp(request):
    return request.param, spawn(job.ddp_gradients, ranks=request.param)


@pytest.mark.parametrize("way", ["plain", "accumulated"])
def test_ddp_equals_one_process_with_the_whole_batch(ddp, way):
    _, results = ddp
    for name, make in (("whole", job.whole_numbers), ("any", job.any_numbers)):
        want = single(make)
        key = name if way == "plain" else (name, way)
        for result in results:
            assert all(map(torch.equal, result[key], results[0][key]))  # the same on all ranks
        got = results[0][key]
        if name == "whole":  # no rounding: equal to the bit
            assert all(map(torch.equal, got, want))
        else:
            for g, w, bound in zip(got, want, rounding_bound(), strict=True):
                assert ((g - w).abs() <= bound).all()


def test_the_bound_is_narrow_enough_to_notice_a_lost_sample():
    model, x, y = job.any_numbers()
    job.loss_of(model, x[:-1], y[:-1]).backward()
    lost = zip(job.gradients(model), single(job.any_numbers), rounding_bound(), strict=True)
    assert all(((g - w).abs() > bound).any() for g, w, bound in lost)


def test_under_no_sync_each_rank_has_its_own(ddp):
    ranks, results = ddp
    own = [r["whole", "alone"] for r in results]
    assert not all(map(torch.equal, own[0], own[1]))
    model, x, y = job.whole_numbers()
    mine, labels = (t.chunk(ranks)[1].chunk(2)[0] for t in (x, y))
    (job.loss_of(model, mine, labels) / 2).backward()
    assert all(map(torch.equal, own[1], job.gradients(model)))


# ---- the wire and the clock


@pytest.fixture(scope="module")
def traced():
    return spawn(job.trace_ddp, ranks=2)


def test_a_step_sends_what_the_ring_would(traced):
    payload = 6 * 512 * 512 * 4
    for result in traced:
        (sends, _) = collectives.ring_bytes(2, payload // 4, 4)
        assert sends <= result["written"] <= 1.01 * sends
        # CommDebugMode counts calls, not bytes
        assert result["calls"]["c10d.allreduce_"] == 3


def test_the_timeline_shows_every_bucket_during_backward(traced):
    for result in traced:
        rows = result["rows"]
        assert rows == sorted(rows, key=lambda r: r["start"]) and rows[0]["start"] == 0
        reduced = [r for r in rows if r["kind"] == "reduce"]
        assert [r["bytes"] for r in reduced] == [2 * 512 * 512 * 4] * 3
        assert [r["bucket"] for r in reduced] == [0, 1, 2]
        names = [r["name"] for r in rows if r["kind"] == "backward"]
        assert names.count("MmBackward0") == names.count("AccumulateGrad") == 6
        # the first bucket is handed over before the last gradient is computed, the last one after;
        # when a thread of gloo takes it is the operating system's affair
        launched = [r["start"] for r in rows if r["kind"] == "launch"]
        last = max(r["start"] for r in rows if r["name"] == "MmBackward0")
        assert len(launched) == 3 and launched[0] < launched[1] < last < launched[2]
        starts = [r["start"] for r in reduced]
        assert all(r >= t for r, t in zip(starts, launched, strict=True))


def test_nothing_traced_gives_no_rows():
    assert data_parallel.bucket_rows([]) == []


def test_a_bucket_starts_when_its_gradients_are_ready():
    for events in spawn(job.order_of_ddp):
        expected = []
        for bucket, layer in enumerate((2, 1, 0)):  # the last layer's gradient is the first
            expected.append(f"gradient of {layer}.weight is ready")
            expected.append(f"all-reduce of bucket {bucket} starts")
        assert events == expected


@pytest.mark.parametrize(("ranks", "rebuilds"), [(2, True), (3, False)])
def test_resumed_bit_for_bit_where_no_sum_changes_its_order(ranks, rebuilds):
    """With two ranks a + b = b + a; with more, only as long as DDP does not rebuild its buckets."""
    for whole, resumed in spawn(job.whole_and_resumed, rebuilds, ranks=ranks):
        assert all(map(torch.equal, whole, resumed))
