"""Answers to the exercises of chapter 18, right and wrong."""

import asyncio
from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field

from helpers.batching import Closed, QueueFull
from helpers.exercises.harness import WrongAnswer, find


def question(strict=True, extra="forbid", shortest=1, longest=500, least=1, most=10, default=1):
    class Question(BaseModel):
        model_config = ConfigDict(strict=strict, extra=extra)
        text: Annotated[str, Field(min_length=shortest, max_length=longest)]
        top: Annotated[int, Field(ge=least, le=most)] = default

    return Question


class Required(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=500)]
    top: Annotated[int, Field(ge=1, le=10)]


class Optional(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=500)]
    top: Annotated[int, Field(ge=1, le=10)] | None = 1


def halves(upper=False):
    def by_halves(model, samples):
        try:
            return model(samples)
        except ValueError:
            if len(samples) == 1:
                return [None]
        middle = (len(samples) + upper) // 2
        return by_halves(model, samples[:middle]) + by_halves(model, samples[middle:])

    return by_halves


def one_by_one(model, samples):
    try:
        return model(samples)
    except ValueError:
        if len(samples) == 1:
            return [None]
    return [one_by_one(model, [sample])[0] for sample in samples]


def all_or_nothing(model, samples):
    try:
        return model(samples)
    except ValueError:
        return [None] * len(samples)


def without_the_bad(model, samples):
    return [row for row in halves()(model, samples) if row is not None]


def never_at_once(model, samples):
    if len(samples) > 1:
        middle = len(samples) // 2
        left, right = samples[:middle], samples[middle:]
        return never_at_once(model, left) + never_at_once(model, right)
    return halves()(model, samples)


def with_empty_halves(model, samples):
    try:
        return model(samples)
    except ValueError:
        middle = len(samples) // 2
        left = with_empty_halves(model, samples[:middle])
        return left + with_empty_halves(model, samples[middle:])


def queue(running=1, partial=False, negative=False, up=False):
    def largest_queue(max_batch, batch_ms, timeout_ms):
        calls = -(-timeout_ms // batch_ms) if up else timeout_ms // batch_ms
        if partial:
            return max(int(max_batch * (timeout_ms / batch_ms - running)), 0)
        free = calls - running
        return (free if negative else max(free, 0)) * max_batch

    return largest_queue


def retry(again=(429, 503, 504), last=3, base=0.5, factor=2, obey=True, add=False):
    def wait_before_retry(status, attempt, retry_after):
        if status not in again or attempt > last:
            return None
        wait = base * factor ** (attempt - 1)
        if retry_after is None or not obey:
            return wait
        return wait + retry_after if add else max(wait, retry_after)

    return wait_before_retry


def responding(full=429, closed=503, late=504, failed=None, by=asyncio.timeout):
    async def respond(batcher, sample, seconds):
        try:
            async with by(seconds):
                return 200, await batcher.predict(sample)
        except QueueFull:
            return full, None
        except Closed:
            return closed, None
        except TimeoutError:
            return late, None
        except ZeroDivisionError:
            if failed is None:
                raise
            return failed, None

    return respond


async def with_wait_for(batcher, sample, seconds):
    try:
        row = await asyncio.wait_for(batcher.predict(sample), timeout=seconds)
    except QueueFull:
        return 429, None
    except Closed:
        return 503, None
    except TimeoutError:
        return 504, None
    return 200, row


async def leaves_it_waiting(batcher, sample, seconds):
    task = asyncio.create_task(batcher.predict(sample))
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        return 504, None
    try:
        return 200, task.result()
    except QueueFull:
        return 429, None
    except Closed:
        return 503, None


def not_async(batcher, sample, seconds):
    return 200, 10 * sample


RIGHT = {
    "question": [question()],
    "by_halves": [halves(), halves(upper=True)],
    "largest_queue": [queue()],
    "wait_before_retry": [retry()],
    "respond": [responding(), with_wait_for],
}

WRONG = {
    "question": [
        question(strict=False),
        question(extra="ignore"),
        question(shortest=0),
        question(longest=501),
        question(least=0),
        question(most=11),
        question(default=2),
        Required,
        Optional,
    ],
    "by_halves": [
        one_by_one,
        all_or_nothing,
        without_the_bad,
        never_at_once,
        with_empty_halves,
        lambda model, samples: model(samples),
    ],
    "largest_queue": [
        queue(running=0),
        queue(running=2),
        queue(partial=True),
        queue(negative=True),
        queue(up=True),
        lambda max_batch, batch_ms, timeout_ms: max(timeout_ms // batch_ms - 1, 0),
        lambda max_batch, batch_ms, timeout_ms: (
            max((timeout_ms - 1) // batch_ms - 1, 0) * max_batch
        ),
    ],
    "wait_before_retry": [
        retry(again=(429, 500, 503, 504)),
        retry(again=(422, 429, 503, 504)),
        retry(again=(429,)),
        retry(last=99),
        retry(last=4),
        retry(factor=1),
        retry(base=1),
        retry(obey=False),
        retry(add=True),
        lambda status, attempt, retry_after: retry_after,
    ],
    "respond": [
        responding(full=503),
        responding(closed=500),
        responding(late=500),
        responding(failed=500),
        leaves_it_waiting,
        not_async,
    ],
}


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (with_empty_halves, WrongAnswer, "the model was called with an empty batch"),
        (one_by_one, WrongAnswer, "expected at most 11 calls of the model, got 33"),
        (lambda model, samples: model(samples), ValueError, "a bad sample"),
    ],
)
def test_what_is_wrong_with_the_halves(answer, error, words):
    with pytest.raises(error, match=words):
        find("serving.by_halves").through(answer)([None, *range(31)])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (leaves_it_waiting, "after the answer, the batcher still computes for this request"),
        (not_async, "expected a function that begins with async def"),
    ],
)
def test_what_is_wrong_with_a_response(answer, words):
    with pytest.raises(WrongAnswer, match=words):
        find("serving.respond").through(answer)("is slow", 1.0, 0.02)


def test_an_error_of_the_model_is_passed_on():
    with pytest.raises(ZeroDivisionError, match="the model"):
        find("serving.respond").through(responding())("fails", 1.0, 30.0)
