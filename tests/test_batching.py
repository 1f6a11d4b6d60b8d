"""The batcher: right rows, full and partial batches, errors, cancelled callers, a graceful stop."""

import asyncio
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.batching import Batcher, Closed, QueueFull


def run(test, model=lambda x: x * 2, **options):
    """Run `await test(batcher)` with a started batcher that is stopped at the end."""

    async def main():
        batcher = Batcher(model, **options)
        await batcher.start()
        try:
            return await asyncio.wait_for(test(batcher), 20)
        finally:
            await batcher.stop()

    return asyncio.run(main())


def ask(batcher, numbers):
    return asyncio.gather(
        *(batcher.predict(torch.tensor([float(n)])) for n in numbers), return_exceptions=True
    )


def values(answers):
    return [a if isinstance(a, BaseException) else a.item() for a in answers]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), size=st.integers(1, 9), wait=st.sampled_from([0.0, 0.001]))
def test_each_caller_gets_its_own_row(count, size, wait):
    sizes = []
    answers = run(
        lambda b: ask(b, range(count)), max_batch=size, max_wait=wait, on_batch=sizes.append
    )
    assert values(answers) == [2.0 * n for n in range(count)]
    assert max(sizes) <= size and sum(sizes) == count
    assert len(sizes) == -(-count // size)  # all arrived before the first batch was taken


def test_samples_that_arrive_within_the_wait_share_a_batch():
    sizes = []

    async def test(batcher):
        first = asyncio.create_task(batcher.predict(torch.ones(1)))
        await asyncio.sleep(0.02)
        await batcher.predict(torch.ones(1))
        await first

    run(test, max_wait=0.5, max_batch=2, on_batch=sizes.append)
    assert sizes == [2]


def test_a_lone_sample_waits_no_longer_than_told():
    start = time.monotonic()
    run(lambda b: ask(b, [1]), max_wait=0.05)
    assert 0.05 <= time.monotonic() - start < 5


def test_the_wait_counts_from_the_arrival_of_the_first():
    """What waited while the model was busy is not kept waiting again."""
    began = []

    def model(x):
        began.append(time.monotonic())
        time.sleep(0.3)
        return x

    async def test(batcher):
        first = asyncio.create_task(batcher.predict(torch.zeros(1)))
        await asyncio.sleep(0.21)  # the model has begun, after a wait of 0.2
        await batcher.predict(torch.zeros(1))
        await first

    run(test, model, max_wait=0.2, max_batch=4)
    assert began[1] - began[0] < 0.3 + 0.15  # not 0.3 + 0.2


def one_fails(x):
    if (x == 3).any():
        raise ArithmeticError("three is not allowed")
    return x * 2


def test_only_the_sample_to_blame_gets_the_error():
    async def test(batcher):
        answers = await ask(batcher, range(8))
        return answers, await ask(batcher, [5])

    answers, later = run(test, one_fails, max_batch=8)
    assert isinstance(answers[3], ArithmeticError)
    assert values(answers[:3] + answers[4:]) == [2.0 * n for n in range(8) if n != 3]
    assert values(later) == [10.0]


def test_a_caller_that_left_is_not_tried_again():
    sizes, begun, release = [], threading.Event(), threading.Event()

    def model(x):
        begun.set()
        release.wait(10)
        return one_fails(x)

    async def test(batcher):
        waiting = [asyncio.create_task(batcher.predict(torch.tensor([n]))) for n in range(4)]
        await asyncio.to_thread(begun.wait, 10)
        for task in waiting[:2]:
            task.cancel()
        await asyncio.sleep(0)
        release.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    answers = run(test, model, max_batch=4, on_batch=sizes.append)
    assert answers[2].item() == 4 and isinstance(answers[3], ArithmeticError)
    assert sizes == [4, 1, 1]


def test_a_batcher_that_was_stopped_can_start_again():
    async def test(batcher):
        first = await ask(batcher, [1])
        await batcher.stop()
        await batcher.start()
        return values(first + await ask(batcher, [2]))

    assert run(test) == [2.0, 4.0]


def test_a_sample_of_another_shape_fails_alone():
    async def test(batcher):
        odd = asyncio.create_task(batcher.predict(torch.ones(2, 2)))
        answers = await ask(batcher, range(3))
        return answers, await odd

    answers, odd = run(test, max_batch=8)
    assert values(answers) == [0.0, 2.0, 4.0]
    assert torch.equal(odd, torch.full((2, 2), 2.0))


def test_nan_stays_in_its_row():
    answers = run(lambda b: ask(b, [1, float("nan"), 2]), max_batch=3)
    assert values(answers)[0::2] == [2.0, 4.0]
    assert answers[1].isnan().all()


def test_a_model_that_loses_rows_is_an_error():
    answers = run(lambda b: ask(b, [1]), lambda x: x[:0])
    with pytest.raises(ValueError, match="expected 1 rows from the model, got 0"):
        raise answers[0]


def test_a_cancelled_caller_leaves_the_queue_and_the_others_get_theirs():
    release, sizes = threading.Event(), []

    def model(x):
        release.wait(10)
        return x * 2

    async def test(batcher):
        busy = asyncio.create_task(batcher.predict(torch.zeros(1)))
        await asyncio.sleep(0.05)
        leaving = [asyncio.create_task(batcher.predict(torch.ones(1))) for _ in range(3)]
        staying = asyncio.create_task(batcher.predict(torch.full((1,), 4.0)))
        await asyncio.sleep(0.05)
        assert len(batcher) == 4
        for task in [busy, *leaving]:  # one is in the model already
            task.cancel()
        await asyncio.sleep(0.05)
        assert len(batcher) == 1
        release.set()
        return await staying, await batcher.predict(torch.ones(1))

    first, second = run(test, model, max_batch=1, max_wait=0, on_batch=sizes.append)
    assert (first.item(), second.item()) == (8.0, 2.0)
    assert sizes == [1, 1, 1]


def test_all_callers_cancelled_while_a_batch_is_collected():
    async def test(batcher):
        leaving = asyncio.create_task(batcher.predict(torch.ones(1)))
        await asyncio.sleep(0.02)
        leaving.cancel()
        await asyncio.sleep(0.2)
        return await batcher.predict(torch.ones(1))

    assert run(test, max_wait=0.1).item() == 2.0


def test_any_number_of_batches_in_a_row_whose_callers_were_all_cancelled():
    """More than Python's limit of recursion: each leaves after its batch was begun."""
    sizes = []

    async def turns(count):
        for _ in range(count):
            await asyncio.sleep(0)

    async def test(batcher):
        for _ in range(2000):
            leaving = asyncio.create_task(batcher.predict(torch.ones(1)))
            await turns(2)  # it waits, and the batcher waits for more
            leaving.cancel()
            await turns(4)  # it has left, and the batcher has noticed
        return await batcher.predict(torch.ones(1))

    assert run(test, max_wait=0, on_batch=sizes.append).item() == 2.0
    assert sizes == [1]


def test_a_full_queue_refuses_at_once_and_recovers():
    release = threading.Event()

    def model(x):
        release.wait(10)
        return x

    async def test(batcher):
        busy = asyncio.create_task(batcher.predict(torch.zeros(1)))
        await asyncio.sleep(0.05)
        waiting = asyncio.gather(*(batcher.predict(torch.ones(1)) for _ in range(3)))
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull, match="3 samples are waiting already"):
            await batcher.predict(torch.ones(1))
        release.set()
        await busy
        await waiting
        return await batcher.predict(torch.ones(1))

    assert run(test, model, max_batch=1, max_wait=0, max_queue=3).item() == 1.0


def test_stop_answers_what_was_accepted_and_refuses_what_comes_later():
    def slow(x):
        time.sleep(0.02)
        return x * 2

    async def main():
        batcher = Batcher(slow, max_batch=2, max_wait=10)  # a stop must not wait 10 s either
        await batcher.start()
        asked = ask(batcher, range(7))
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Closed, match="batcher is not running"):
            await batcher.predict(torch.ones(1))
        await asyncio.wait_for(stopping, 5)
        return values(await asked), batcher.accepted, batcher.answered

    assert asyncio.run(main()) == ([2.0 * n for n in range(7)], 7, 7)


def test_an_error_and_a_caller_that_left_are_no_answers():
    def picky(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x

    async def test(batcher):
        results = await asyncio.gather(*[ask_one(batcher, n) for n in (1, -1, 2)])
        leaving = asyncio.create_task(batcher.predict(torch.ones(1)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        return results, batcher.accepted, batcher.answered

    async def ask_one(batcher, number):
        try:
            return (await batcher.predict(torch.tensor([float(number)]))).item()
        except ValueError as error:
            return str(error)

    assert run(test, picky, max_wait=0.05) == ([1.0, "negative", 2.0], 4, 2)


def test_the_event_loop_runs_on_while_the_model_computes():
    def slow(x):
        time.sleep(0.2)
        return x

    async def test(batcher):
        asked = asyncio.create_task(batcher.predict(torch.ones(1)))
        ticks = 0
        while not asked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert run(test, slow, max_wait=0) >= 5


def test_the_model_runs_without_autograd():
    weight = torch.ones(1, requires_grad=True)
    (answer,) = run(lambda b: ask(b, [1]), lambda x: x * weight)
    assert not answer.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "expected sizes of at least 1, got max_batch 0"),
        ({"max_queue": 0}, "expected sizes of at least 1, got max_batch 32, max_queue 0"),
        ({"max_wait": -1}, "expected max_wait of at least 0 seconds, got -1"),
    ],
)
def test_senseless_limits_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Batcher(lambda x: x, **options)
