"""Chapter 18, exercises: a type, the longest queue, bad samples, retries, a time limit."""

import asyncio
import inspect
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helpers.batching import Closed, QueueFull
from helpers.exercises.harness import Exercise, WrongAnswer

# ---- 1: a type for a request


class Question(BaseModel):
    """A text and the number of answers that are wanted."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=500)]
    top: Annotated[int, Field(ge=1, le=10)] = 1


def _checked_by(answer: type[BaseModel]) -> Callable[[dict], Any]:
    """Turn a type into a function of a body: what the type makes of it, or that it is refused."""

    def check_body(body: dict) -> Any:
        if not (isinstance(answer, type) and issubclass(answer, BaseModel)):
            return answer(body)  # a function says so itself, or fails in the reader's words
        if not answer.model_fields:
            return ...  # not answered yet
        try:
            return answer.model_validate(body).model_dump()
        except ValidationError:
            return "refused"

    return check_body


def _bodies() -> list[tuple[dict]]:
    good = [{"text": "a"}, {"text": "x" * 500, "top": 10}, {"text": "很好", "top": 1}]
    texts = ["", "x" * 501, 5, None, ["a"]]
    tops = [0, 11, -1, "3", True, 2.0, None]
    bad = [{"text": text} for text in texts] + [{"text": "a", "top": top} for top in tops]
    bad += [{}, {"top": 3}, {"text": "a", "tops": 3}, {"text": "a", "top": 3, "lang": "en"}]
    return [(body,) for body in good + bad]


# ---- 2: how long the queue may be


def largest_queue(max_batch: int, batch_ms: int, timeout_ms: int) -> int:
    """Count the places of the batches that end in time, without the one that runs already."""
    return max(timeout_ms // batch_ms - 1, 0) * max_batch


def _limits() -> list[tuple[int, int, int]]:
    fixed = [
        (32, 100, 1000),
        (32, 100, 1050),  # half a batch more does not help
        (1, 10, 25),
        (8, 50, 100),  # exactly in time
        (8, 50, 99),
        (8, 50, 20),  # not even the batch that runs ends in time
        (4, 300, 300),
    ]
    drawn = []
    for _ in range(6):
        drawn.append((random.randint(1, 64), random.randint(1, 90), random.randint(1, 3000)))
    return fixed + drawn


# ---- 3: a batch with bad samples, in halves


def by_halves(model: Callable[[list], list], samples: list) -> list:
    """Return the answers of `model`, and None for each sample for which it raises alone."""
    try:
        return model(samples)
    except ValueError:
        if len(samples) == 1:
            return [None]
    half = len(samples) // 2
    return by_halves(model, samples[:half]) + by_halves(model, samples[half:])


def _counted(answer: Callable) -> Callable[[list[int | None]], Any]:
    """Call an answer with a model that counts its calls: too many of them are a wrong answer."""

    def on(samples: list[int | None]) -> Any:
        calls = 0

        def model(batch: list[int | None]) -> list[int]:
            nonlocal calls
            if not batch:
                raise WrongAnswer("the model was called with an empty batch")
            calls += 1
            if None in batch:
                raise ValueError("a bad sample")
            return [10 * sample for sample in batch]

        found = answer(model, samples)
        # halving ends after log2(n) levels, and on each a bad sample spoils one of two halves
        levels = math.ceil(math.log2(len(samples)))
        most = 1 + 2 * levels * samples.count(None)
        if found is not ... and calls > most:
            raise WrongAnswer(f"expected at most {most} calls of the model, got {calls}")
        return found

    return on


def _batches() -> list[tuple[list[int | None]]]:
    found = [[1, 2, 3], [7], [None], [1, None], [None, None, None], [None, *range(31)]]
    found += [[*range(16), None, *range(15)], [*range(9), None]]
    for _ in range(4):
        count = random.randint(5, 40)
        bad = set(random.sample(range(count), random.randint(1, 2)))
        found.append([None if at in bad else at for at in range(count)])
    return [(batch,) for batch in found]


# ---- 4: what a client may send again


def wait_before_retry(status: int, attempt: int, retry_after: float | None) -> float | None:
    """Return seconds, or None where the same request would only fail again."""
    if status not in (429, 503, 504) or attempt >= 4:
        return None
    wait = 0.5 * 2 ** (attempt - 1)
    if retry_after is not None:
        wait = max(wait, retry_after)
    return wait


def _answers() -> list[tuple[int, int, float | None]]:
    cases = [(status, 1, None) for status in (200, 400, 404, 413, 415, 422, 429, 500, 503, 504)]
    cases += [(503, attempt, None) for attempt in (2, 3, 4, 5)]
    return [*cases, (429, 1, 3.0), (429, 3, 1.0), (503, 3, 5.0), (422, 1, 1.0), (429, 4, 1.0)]


# ---- 5: a time limit, and the errors of a batcher as status codes


async def respond(batcher: Any, sample: float, seconds: float) -> tuple[int, float | None]:
    """Return 200 and the row, or 429, 503 or 504 and None."""
    try:
        async with asyncio.timeout(seconds):
            row = await batcher.predict(sample)
    except QueueFull:
        return 429, None
    except Closed:
        return 503, None
    except TimeoutError:
        return 504, None
    return 200, row


class _StandIn:
    """A batcher that does what a case wants, and counts the calls that nobody has ended."""

    def __init__(self, does: str):
        self.does = does
        self.waiting = 0

    async def predict(self, sample: float) -> float:
        self.waiting += 1
        try:
            if self.does == "is full":
                raise QueueFull("2 samples are waiting already")
            if self.does == "has stopped":
                raise Closed("the batcher is not running")
            if self.does == "fails":
                raise ZeroDivisionError("the model")
            if self.does == "is slow":
                await asyncio.Event().wait()  # for ever
            await asyncio.sleep(0)
            return 10 * sample
        finally:
            self.waiting -= 1


def _run_through(answer: Callable) -> Callable[[str, float, float], Any]:
    """Run an answer with a batcher of that kind; a sample that still waits after it is wrong."""

    async def run(does: str, sample: float, seconds: float) -> Any:
        batcher = _StandIn(does)
        found = answer(batcher, sample, seconds)
        if found is ...:
            return found
        if not inspect.isawaitable(found):
            raise WrongAnswer("expected a function that begins with async def")
        found = await found
        if found is not ... and batcher.waiting:
            raise WrongAnswer("after the answer, the batcher still computes for this request")
        return found

    def on(does: str, sample: float, seconds: float) -> Any:
        with ThreadPoolExecutor(1) as thread:  # the loop of the notebook is running in this one
            return thread.submit(asyncio.run, run(does, sample, seconds)).result()

    return on


def _batchers() -> list[tuple[str, float, float]]:
    cases = [("answers", float(sample), 30.0) for sample in (1, 2)]
    cases += [("is full", 3.0, 30.0), ("has stopped", 4.0, 30.0)]
    return [*cases, ("is slow", 5.0, 0.02), ("fails", 6.0, 30.0)]


EXERCISES = {
    "question": Exercise(reference=Question, cases=_bodies, through=_checked_by),
    "largest_queue": Exercise(reference=largest_queue, cases=_limits),
    "by_halves": Exercise(reference=by_halves, cases=_batches, through=_counted),
    "wait_before_retry": Exercise(reference=wait_before_retry, cases=_answers),
    "respond": Exercise(reference=respond, cases=_batchers, through=_run_through),
}
