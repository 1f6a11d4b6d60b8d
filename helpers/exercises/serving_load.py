"""Chapter 18, exercises: an honest percentile, the highest rate, a formula, a cost."""

import math
import random
from collections.abc import Sequence

from helpers.exercises.harness import Exercise

# ---- 1: a percentile from the scheduled times, lost requests included


def honest_percentile(replies: Sequence[tuple], share: float) -> float:
    """Return the smallest latency that at least `share` of the requests do not exceed."""
    latencies = sorted(
        finished - scheduled if status == 200 else math.inf
        for scheduled, _, finished, status in replies
    )
    return latencies[math.ceil(round(share * len(latencies), 6)) - 1]


def _replies() -> list[tuple[list[tuple[float, float, float, int]], float]]:
    late = [(0.25 * at, 0.25 * at + 0.125, 0.25 * at + 0.5, 200) for at in range(10)]
    slow = [(float(at), float(at), at + (at + 1) / 16, 200) for at in range(8)]
    lost = [
        (at, sent, done, 504 if number % 3 == 0 else 200)
        for number, (at, sent, done, _) in enumerate(slow)
    ]
    cases = [
        (late, 0.5),  # the client was late
        (slow, 0.5),  # four of eight do not exceed it
        (slow[::-1], 0.75),  # in any order
        (slow, 1.0),
        (late, 0.55),  # between two of them
        (slow, 0.7),
        (lost, 0.5),
        (lost, 0.75),  # so many were lost
        ([(0.0, 0.0, 0.25, 200)], 0.5),
        ([(0.0, 0.0, 0.25, 0)], 0.5),
    ]
    for share in (0.25, 0.5, 0.75, 0.875):
        drawn = []
        for at in range(random.choice((8, 16, 24))):
            sent = at + random.uniform(0, 0.2)
            status = random.choice((200, 200, 200, 429))
            drawn.append((float(at), sent, sent + random.uniform(0.01, 2), status))
        cases.append((drawn, share))
    return cases


# ---- 2: the highest rate that was held


def highest_held(steps: Sequence[tuple[float, float, int]], limit: float) -> float:
    """Return the highest rate held before two in a row were not, 0 without one."""
    best, failed = 0, 0
    for rate, p99, lost in steps:
        if p99 <= limit and lost == 0:
            best, failed = rate, 0
        else:
            failed += 1
        if failed == 2:
            break
    return best


def _steps() -> list[tuple[list[tuple[int, float, int]], float]]:
    good, slow, lost = (10.0, 0), (200.0, 0), (10.0, 3)
    kinds = [
        [],
        [good],
        [slow],
        [good, good, slow, slow],
        [good, slow, good, slow, slow],  # one failure between is chance
        [good, slow, slow, good],  # after two in a row, a success is
        [slow, good, good],
        [good, lost, good],
        [good, lost, slow, good],
        [(100.0, 0)],  # exactly the limit is within it
        [good, (100.5, 0)],
        [good, slow, good, slow, good, slow, good],  # three, but never two in a row
    ]
    for _ in range(4):
        kinds.append([random.choice((good, good, slow, lost)) for _ in range(8)])
    cases = []
    for kind in kinds:
        steps = [(100 + 25 * at, p99, gone) for at, (p99, gone) in enumerate(kind)]
        cases.append((steps, 100.0))
    return cases


# ---- 3: the formula of M/D/1 the other way round


def largest_rate(service: float, limit: float) -> float:
    """Return requests/s whose mean latency is `limit`; 0 where even one alone takes as long."""
    wait = limit - service
    if wait <= 0:
        return 0
    return 2 * wait / (2 * wait + service) / service


def _limits() -> list[tuple[float, float]]:
    fixed = [(0.005, 0.0075), (0.005, 0.05), (0.005, 5.0), (0.25, 0.5), (0.5, 0.5), (0.5, 0.25)]
    return fixed + [(random.uniform(0.001, 0.1), random.uniform(0.11, 1.0)) for _ in range(6)]


# ---- 4: a day with as many machines as each hour needs


def cost_of_a_day(hourly: Sequence[float], held: float, price: float) -> float:
    """Return the price of a million requests, infinite on a day without any."""
    paid = sum(price * max(1, math.ceil(rate / held)) for rate in hourly)
    requests = 3600 * sum(hourly)
    return 1e6 * paid / requests if requests else math.inf


def _days() -> list[tuple[list[float], float, float]]:
    day = [2.0] * 7 + [100.0] * 12 + [40.0] * 5
    fixed = [
        ([100.0] * 24, 100.0, 0.36),  # exactly one machine
        ([101.0] * 24, 100.0, 0.36),
        (day, 225.0, 0.36),
        (day, 25.0, 1.5),
        ([0.0] * 24, 100.0, 0.36),
        ([0.0] * 23 + [50.0], 10.0, 2.0),
    ]
    for _ in range(4):
        hourly = [float(random.randint(0, 500)) for _ in range(24)]
        fixed.append((hourly, float(random.randint(20, 200)), random.uniform(0.1, 3.0)))
    return fixed


EXERCISES = {
    "honest_percentile": Exercise(reference=honest_percentile, cases=_replies),
    "highest_held": Exercise(reference=highest_held, cases=_steps),
    "largest_rate": Exercise(reference=largest_rate, cases=_limits),
    "cost_of_a_day": Exercise(reference=cost_of_a_day, cases=_days),
}
