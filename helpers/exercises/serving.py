"""Chapter 18, exercises: the first batch, the longest queue, when to send again."""

import random

from helpers.exercises.harness import Exercise

# ---- 1: which requests share the first batch?


def first_batch(arrivals: list[float], max_batch: int, max_wait: float) -> int:
    """Count those that have arrived when the first has waited long enough, up to a full batch."""
    deadline = arrivals[0] + max_wait
    return min(max_batch, sum(1 for at in arrivals if at <= deadline))


def _arrivals() -> list[tuple[list[float], int, float]]:
    fixed = [
        ([0.0, 0.001, 0.0015, 0.01], 8, 0.002),
        ([0.0, 0.001, 0.0015, 0.01], 2, 0.002),
        ([5.0, 5.001, 5.25], 8, 0.25),  # the first does not arrive at 0; the last in time exactly
        ([1.0], 4, 0.5),
        ([0.0, 0.0, 0.0], 32, 0.0),
        ([0.0, 0.5, 1.0, 1.5], 8, 0.75),  # not a wait that starts again with each arrival
    ]
    drawn = []
    for _ in range(6):
        times = sorted(random.uniform(2, 3) for _ in range(random.randint(1, 30)))
        drawn.append((times, random.randint(1, 9), random.choice([0.0, 0.05, 0.3])))
    return fixed + drawn


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


# ---- 3: what a client may send again


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


EXERCISES = {
    "first_batch": Exercise(reference=first_batch, cases=_arrivals),
    "largest_queue": Exercise(reference=largest_queue, cases=_limits),
    "wait_before_retry": Exercise(reference=wait_before_retry, cases=_answers),
}
