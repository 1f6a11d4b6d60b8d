"""Chapter 18: a load test: requests at scheduled times from a second process, and percentiles."""

import argparse
import asyncio
import gc
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np

LOST = 0  # in place of a status: the connection broke, or no answer came in time


@dataclass(frozen=True)
class Reply:
    """What came back for one request. Times in seconds since the start of the test."""

    image: int  # which of the images was sent
    scheduled: float
    sent: float
    finished: float
    status: int
    digit: int | None  # of a status 200
    version: str | None = None

    @property
    def latency(self) -> float:
        """From the time at which the request was to be sent: a late client hides no waiting."""
        return self.finished - self.scheduled


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of independent requests: exponential gaps, `rate` a second on average."""
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"expected a positive rate and duration, got {rate}/s for {seconds} s")
    generator = np.random.default_rng(seed)
    count = int(rate * seconds * 1.5 + 10 * math.sqrt(rate * seconds) + 10)  # enough to fill it
    times = np.cumsum(generator.exponential(1 / rate, count))
    return times[times < seconds].tolist()


def percentile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that at least the share `q` of the values do not exceed.

    Raises ValueError unless ten values can lie beyond it: with fewer, a percentile far out is the
    story of a few requests.
    """
    if not 0 < q < 1:
        raise ValueError(f"expected a share between 0 and 1, got {q}")
    needed = math.ceil(round(10 / (1 - q), 6))
    if len(values) < needed:
        raise ValueError(f"p{100 * q:g} needs {needed} values, got {len(values)}")
    return sorted(values)[math.ceil(round(q * len(values), 6)) - 1]


def percentile_range(
    values: Sequence[float], q: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Return two of the values between which the percentile of the source lies.

    The number of values below it is binomial, whatever the distribution, if the values are
    independent; latencies of neighboring requests are not, and the true range is wider.
    """
    from scipy.stats import binom  # 1 s, which the client of a load test need not wait for

    percentile(values, q)  # the same check
    n, tail = len(values), (1 - confidence) / 2
    low = max(int(binom.ppf(tail, n, q)), 1)
    high = min(int(binom.ppf(1 - tail, n, q)) + 1, n)
    ordered = sorted(values)
    return ordered[low - 1], ordered[high - 1]


async def send_all(
    url: str, bodies: Sequence[bytes], times: Sequence[float], *, timeout: float = 10.0
) -> list[Reply]:
    """Send body `i % len(bodies)` at `times[i]`, whether or not earlier answers have come.

    An open loop: users do not wait for each other. Connections are kept and reused.
    """
    replies: list[Reply] = []
    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=timeout)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=headers) as client:
        start = time.perf_counter()

        async def send(number: int, at: float) -> None:
            image = number % len(bodies)
            sent = time.perf_counter() - start
            status, content = LOST, {}
            try:
                async with client.post(url, data=bodies[image]) as response:
                    content = json.loads(await response.read())
                    status = response.status
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                content = {}  # no answer, or half of one
            finished = time.perf_counter() - start
            digit, version = content.get("digit"), content.get("version")
            replies.append(Reply(image, at, sent, finished, status, digit, version))

        tasks = []
        for number, at in enumerate(times):
            left = at - (time.perf_counter() - start)
            if left > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(send(number, at)))
        await asyncio.gather(*tasks)
    return sorted(replies, key=lambda reply: reply.scheduled)


def load_test(
    url: str,
    images: Sequence[Any],
    *,
    rate: float,
    seconds: float,
    seed: int = 0,
    timeout: float = 10.0,
) -> list[Reply]:
    """Run `send_all` in a second process, so that the client does not slow down this one.

    images: nested lists [28][28] of numbers in 0..255.
    """
    with start_load(url, images, rate=rate, seconds=seconds, seed=seed, timeout=timeout) as client:
        return collect(client)


def start_load(
    url: str,
    images: Sequence[Any],
    *,
    rate: float,
    seconds: float,
    seed: int = 0,
    timeout: float = 10.0,
) -> subprocess.Popen:
    """Start the client of `load_test` and return at once; `collect` waits for its replies."""
    arrivals(rate, 1, seed)  # complain here, not in the other process
    job = {"url": url, "images": list(images), "rate": rate, "seconds": seconds, "seed": seed}
    command = [sys.executable, "-m", "helpers.serving_load", "--timeout", str(timeout)]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    client.stdin.write(json.dumps(job))
    client.stdin.close()
    return client


def collect(client: subprocess.Popen) -> list[Reply]:
    """Return the replies of a client that `start_load` started, in the order of the schedule."""
    text = client.stdout.read()
    if client.wait() != 0:
        raise RuntimeError(f"the client of the load test ended with {client.returncode}")
    return [Reply(**reply) for reply in json.loads(text)]


def summary(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return counts by status, the rate of right-status answers, and latencies in milliseconds.

    p99 is None where there are fewer than 1000 answers, p50 where there are fewer than 20.
    """
    answered = [reply for reply in replies if reply.status == 200]
    latencies = [1e3 * reply.latency for reply in answered]
    span = max((reply.finished for reply in replies), default=0.0)
    delays = [1e3 * (reply.sent - reply.scheduled) for reply in replies]
    return {
        "sent": len(replies),
        "statuses": dict(Counter(reply.status for reply in replies)),
        "rate": len(answered) / span if span else 0.0,
        "p50": percentile(latencies, 0.5) if len(latencies) >= 20 else None,
        "p99": percentile(latencies, 0.99) if len(latencies) >= 1000 else None,
        "client late by": max(delays, default=0.0),
    }


def highest_rate(tested: Sequence[tuple[float, bool]]) -> float | None:
    """Return the highest rate that was held before two in a row were not, None when none was.

    tested: (rate, was it held?), in any order. A p99 near its limit may lie above it by chance, so
    one failure between rates that were held does not count. A rate above two failures does not
    count either: to hold it was luck.
    """
    best, failed = None, 0
    for rate, held in sorted(tested):
        failed = 0 if held else failed + 1
        if failed == 2:
            break
        if held:
            best = rate
    return best


def main() -> None:
    """Be the second process: read the job from standard input, write the replies as JSON."""
    parser = argparse.ArgumentParser(description="Send requests; the job comes on standard input.")
    parser.add_argument("--timeout", type=float, default=10.0)
    timeout = parser.parse_args().timeout
    job = json.load(sys.stdin)
    bodies = [json.dumps({"pixels": image}).encode() for image in job["images"]]
    times = arrivals(job["rate"], job["seconds"], job["seed"])
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection takes tens of ms, in which the client would be late
    replies = asyncio.run(send_all(job["url"], bodies, times, timeout=timeout))
    json.dump([asdict(reply) for reply in replies], sys.stdout)


if __name__ == "__main__":
    main()
