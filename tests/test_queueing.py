"""The formula, the simulation and the batcher itself agree about how long requests wait."""

import asyncio
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import queueing, serving_load
from helpers.batching import Batcher


@pytest.mark.parametrize(("rate", "service"), [(50, 0.01), (80, 0.01), (1, 0.5)])
def test_the_simulation_of_one_at_a_time_is_the_formula(rate, service):
    times = serving_load.arrivals(rate, 200_000 / rate, seed=0)
    latencies, sizes = queueing.simulate(times, lambda n: service, max_batch=1, max_wait=0)
    mean = sum(latencies) / len(latencies)
    assert set(sizes) == {1}
    # 200,000 waits that depend on their neighbors: 3% is five standard errors at ρ = 0.8, by trial
    assert mean == pytest.approx(queueing.md1_latency(rate, service), rel=0.03)


def test_the_formula_by_hand():
    assert queueing.md1_latency(50, 0.01) == pytest.approx(0.015)  # 10 + 0.5·10/(2·0.5) ms
    assert queueing.md1_latency(0, 0.01) == 0.01
    assert queueing.md1_latency(100, 0.01) == float("inf")


def test_a_schedule_by_hand():
    """Two arrive close together and share a batch; a third comes while the model is busy."""
    latencies, sizes = queueing.simulate(
        [0.0, 0.001, 0.004, 0.1], lambda n: 0.01 * n, max_batch=8, max_wait=0.002
    )
    # 0.002 → 0.022 both; the third has waited longer than 0.002 when the model is free
    assert latencies == pytest.approx([0.022, 0.021, 0.028, 0.012])
    assert sizes == [2, 1, 1]


def test_a_full_batch_does_not_wait():
    latencies, sizes = queueing.simulate([0, 0, 0.5], lambda n: 0.1, max_batch=2, max_wait=1.0)
    assert latencies == pytest.approx([0.1, 0.1, 1.1]) and sizes == [2, 1]


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(st.floats(0, 0.01), min_size=1, max_size=80),
    size=st.integers(1, 9),
    wait=st.floats(0, 0.01),
)
def test_every_request_is_answered_once_and_no_batch_is_too_large(gaps, size, wait):
    times = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    latencies, sizes = queueing.simulate(times, lambda n: 0.002, max_batch=size, max_wait=wait)
    assert len(latencies) == sum(sizes) == len(times)
    assert max(sizes) <= size and min(latencies) >= 0.002 - 1e-12


def test_the_batcher_forms_the_batches_of_the_simulation():
    """Gaps of 40 ms and more between what decides, so that a busy machine decides alike."""
    times = [0.0, 0.01, 0.02, 0.30, 0.31, 0.32, 0.33, 0.34, 1.0]
    options = {"max_batch": 4, "max_wait": 0.1}
    _, expected = queueing.simulate(times, lambda n: 0.1, **options)
    sizes = []

    def model(x):
        time.sleep(0.1)
        return x

    async def main():
        batcher = Batcher(model, on_batch=sizes.append, **options)
        await batcher.start()
        start = time.monotonic()

        async def ask(at):
            await asyncio.sleep(at - (time.monotonic() - start))
            return await batcher.predict(torch.zeros(1))

        await asyncio.gather(*(ask(at) for at in times))
        await batcher.stop()

    asyncio.run(main())
    assert sizes == expected == [3, 4, 1, 1]


def test_times_between_and_beyond_the_measured_sizes():
    time_of = queueing.batch_times([32, 2, 4], [0.030, 0.010, 0.012])
    assert [time_of(n) for n in (2, 4, 32)] == pytest.approx([0.010, 0.012, 0.030])
    assert time_of(3) == pytest.approx(0.011) and time_of(18) == pytest.approx(0.021)
    assert time_of(1) == pytest.approx(0.005) and time_of(64) == pytest.approx(0.060)


def test_a_million_requests():
    assert queueing.cost_per_million(3.6, 100) == pytest.approx(10)  # 10,000 s at 0.001


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: queueing.md1_latency(-1, 1), "expected rate >= 0 and service > 0"),
        (lambda: queueing.md1_latency(1, 0), "expected rate >= 0 and service > 0"),
        (lambda: queueing.simulate([0], float, max_batch=0), "expected max_batch >= 1, max_wait"),
        (lambda: queueing.batch_times([1], [2]), "times of two sizes or more"),
        (lambda: queueing.cost_per_million(1, 0), "expected price >= 0 and rate > 0"),
    ],
)
def test_senseless_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
