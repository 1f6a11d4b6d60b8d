"""Answers to the exercises of chapter 18 on load, right and wrong."""

import math


def percentile(begin=0, lost=math.inf, index=-1, ordered=True, up=True):
    def honest_percentile(replies, share):
        latencies = [r[2] - r[begin] if r[3] == 200 else lost for r in replies]
        latencies = [latency for latency in latencies if latency is not None]
        if ordered:
            latencies.sort()
        count = share * len(latencies)
        return latencies[(math.ceil(count) if up else math.floor(count)) + index]

    return honest_percentile


def held(most=True, row=2, strict=False, losses=True, reset=True, first=False):
    def highest_held(steps, limit):
        best = failed = 0
        for rate, p99, lost in steps:
            good = p99 < limit if strict else p99 <= limit
            if good and (lost == 0 or not losses):
                best = best if first and best else rate
                failed = 0 if reset else failed
            else:
                failed += 1
            if most and failed == row:
                break
        return best

    return highest_held


def inverse(factor=2, service_twice=False, guard=True):
    def largest_rate(service, limit):
        wait = limit - service
        if guard and wait <= 0:
            return 0
        busy = factor * wait / (factor * wait + service)
        return busy if service_twice else busy / service

    return largest_rate


def day(up=True, least=1, seconds=3600, whole=False):
    def cost_of_a_day(hourly, held, price):
        if not sum(hourly):
            return math.inf
        machines = [max(least, math.ceil(r / held) if up else r / held) for r in hourly]
        if whole:
            machines = [max(machines)] * len(hourly)
        return 1e6 * price * sum(machines) / (seconds * sum(hourly))

    return cost_of_a_day


RIGHT = {
    "honest_percentile": [percentile()],
    "highest_held": [held()],
    "largest_rate": [inverse()],
    "cost_of_a_day": [day()],
}

WRONG = {
    "honest_percentile": [
        percentile(begin=1),
        percentile(lost=0.0),
        percentile(lost=None),
        percentile(index=0),
        percentile(index=-2),
        percentile(ordered=False),
        percentile(up=False),
    ],
    "highest_held": [
        held(most=False),
        held(row=1),
        held(row=3),
        held(strict=True),
        held(losses=False),
        held(reset=False),
        held(first=True),
    ],
    "largest_rate": [
        inverse(factor=1),
        inverse(service_twice=True),
        inverse(guard=False),
    ],
    "cost_of_a_day": [
        day(up=False),
        day(least=0),
        day(seconds=1),
        day(whole=True),
        lambda hourly, held, price: 1e6 * price * 24 / (3600 * max(sum(hourly), 1)),
    ],
}
