"""Chapter 18: how long requests wait: a formula for one at a time, a simulation of the batcher."""

from collections.abc import Callable, Sequence


def md1_latency(rate: float, service: float) -> float:
    """Return the mean latency in seconds where requests are served one at a time.

    The queue M/D/1: random (Poisson) arrivals, `rate` a second; each takes exactly `service`
    seconds; one server. The mean wait is ρ·s / (2(1 − ρ)) with ρ = rate·s (Pollaczek–Khinchine).
    Infinite from ρ = 1 on: more arrive than can be served.
    """
    if rate < 0 or service <= 0:
        raise ValueError(f"expected rate >= 0 and service > 0, got {rate} and {service}")
    load = rate * service
    if load >= 1:
        return float("inf")
    return service + load * service / (2 * (1 - load))


def simulate(
    arrivals: Sequence[float],
    batch_time: Callable[[int], float],
    *,
    max_batch: int = 32,
    max_wait: float = 0.002,
) -> tuple[list[float], list[int]]:
    """Return the latency of every request, and the sizes of the batches, as `Batcher` forms them.

    arrivals: ascending times in seconds. batch_time: seconds that a batch of n takes.
    A batch is taken when the model is free and `max_batch` wait, or the first of them has waited
    for `max_wait`.
    """
    if max_batch < 1 or max_wait < 0:
        raise ValueError(f"expected max_batch >= 1, max_wait >= 0, got {max_batch}, {max_wait}")
    latencies: list[float] = []
    sizes: list[int] = []
    free = 0.0  # when the model is free
    first = 0  # the first request that waits
    while first < len(arrivals):
        start = max(free, arrivals[first] + max_wait)
        last = first + max_batch - 1
        if last < len(arrivals):  # a full batch need not wait
            start = min(start, max(free, arrivals[last]))
        end = first
        while end < len(arrivals) and end - first < max_batch and arrivals[end] <= start:
            end += 1
        free = start + batch_time(end - first)
        latencies += [free - at for at in arrivals[first:end]]
        sizes.append(end - first)
        first = end
    return latencies, sizes


def batch_times(sizes: Sequence[int], times: Sequence[float]) -> Callable[[int], float]:
    """Return the time of a batch of n as a function, from measured times of a few sizes.

    Between two measured sizes the time follows a straight line; beyond them, the nearest one's
    time per sample holds.
    """
    points = sorted(zip(sizes, times, strict=True))
    if len(points) < 2:
        raise ValueError(f"expected times of two sizes or more, got {len(points)}")

    def at(n: int) -> float:
        (smallest, first), (largest, last) = points[0], points[-1]
        if n <= smallest:
            return first * n / smallest
        if n >= largest:
            return last * n / largest
        pairs = zip(points, points[1:], strict=False)
        (low, below), (high, above) = next(p for p in pairs if p[0][0] <= n <= p[1][0])
        return below + (above - below) * (n - low) / (high - low)

    return at


def cost_per_million(price_per_hour: float, rate: float) -> float:
    """Return what a million requests cost on a machine with this price at `rate` a second."""
    if price_per_hour < 0 or rate <= 0:
        raise ValueError(f"expected price >= 0 and rate > 0, got {price_per_hour} and {rate}")
    return price_per_hour / 3600 * 1e6 / rate
