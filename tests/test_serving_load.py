"""The load test: arrival times, percentiles that need enough values, latencies, lost answers."""

import asyncio
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from helpers import serving_load
from helpers.serving_load import Reply


def test_arrivals_are_a_poisson_process():
    times = np.array(serving_load.arrivals(500, 20, seed=1))
    gaps = np.diff(times)
    assert (gaps > 0).all() and times[-1] < 20
    # five standard deviations: of a Poisson count, of the mean and variance of exponential gaps
    assert abs(len(times) - 10_000) < 5 * 100
    assert abs(gaps.mean() * 500 - 1) < 5 / 100
    assert abs(gaps.var() * 500**2 - 1) < 5 * math.sqrt(8) / 100


def test_the_same_seed_gives_the_same_times():
    assert (
        serving_load.arrivals(50, 2, 3)
        == serving_load.arrivals(50, 2, 3)
        != serving_load.arrivals(50, 2, 4)
    )


@pytest.mark.parametrize("rate, seconds", [(0, 1), (-1, 1), (1, 0)])
def test_senseless_loads_are_refused(rate, seconds):
    with pytest.raises(ValueError, match="expected a positive rate and duration"):
        serving_load.arrivals(rate, seconds, 0)
    if seconds:
        with pytest.raises(ValueError, match="expected a positive rate and duration"):
            serving_load.start_load("http://127.0.0.1:9", [], rate=rate, seconds=seconds)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_percentiles_as_numpy_counts_them(q):
    values = np.random.default_rng(0).exponential(size=2345)
    assert serving_load.percentile(values.tolist(), q) == np.quantile(
        values, q, method="inverted_cdf"
    )


def test_a_percentile_is_one_of_the_values():
    assert serving_load.percentile(list(range(1, 1001)), 0.99) == 990
    assert serving_load.percentile(list(range(20)), 0.5) == 9


@pytest.mark.parametrize(("q", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000)])
def test_too_few_values_are_refused(q, needed):
    serving_load.percentile([1.0] * needed, q)
    with pytest.raises(ValueError, match=f"needs {needed} values, got {needed - 1}"):
        serving_load.percentile([1.0] * (needed - 1), q)


@pytest.mark.parametrize("q", [0, 1, 99])
def test_a_share_is_between_0_and_1(q):
    with pytest.raises(ValueError, match="expected a share between 0 and 1"):
        serving_load.percentile([1.0] * 2000, q)


def test_the_range_holds_the_percentile_as_often_as_it_says():
    generator = np.random.default_rng(0)
    true = -math.log(0.01)
    held = 0
    for _ in range(400):
        low, high = serving_load.percentile_range(generator.exponential(size=1500).tolist(), 0.99)
        held += low <= true <= high
    # coverage is at least 0.95; five standard deviations of 400 trials below it
    assert held / 400 > 0.95 - 5 * math.sqrt(0.95 * 0.05 / 400)


def test_latency_counts_from_the_schedule():
    assert Reply(0, scheduled=1.0, sent=1.5, finished=2.0, status=200, digit=3).latency == 1.0


def test_a_summary():
    good = [Reply(0, n / 100, n / 100, n / 100 + 0.005, 200, 1) for n in range(1000)]
    bad = [Reply(0, 1.0, 1.2, 11.0, 429, None), Reply(0, 1.0, 1.0, 1.0, serving_load.LOST, None)]
    found = serving_load.summary(good + bad)
    assert found["statuses"] == {200: 1000, 429: 1, 0: 1} and found["sent"] == 1002
    assert found["rate"] == 1000 / 11
    assert found["p50"] == pytest.approx(5) and found["p99"] == pytest.approx(5)
    assert found["client late by"] == pytest.approx(200)
    few = serving_load.summary(good[:999])
    assert few["p99"] is None and few["p50"] is not None
    assert serving_load.summary([])["rate"] == 0


@pytest.mark.parametrize(
    ("tested", "expected"),
    [
        ([(10, True), (20, True), (40, False)], 20),
        ([(40, True), (10, True), (20, False)], 40),  # one failure between is chance
        ([(80, True), (40, False), (10, True), (20, False)], 10),  # above two it was luck
        ([(10, False), (20, True)], 20),
        ([(10, False), (20, False), (40, True)], None),
        ([(10, True), (20, False), (40, True), (80, False), (160, True)], 160),
        ([(10, True)], 10),
        ([], None),
    ],
)
def test_the_highest_rate(tested, expected):
    assert serving_load.highest_rate(tested) == expected


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        pixel = json.loads(body)["pixels"][0][0]
        if pixel == 4:  # half an answer
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"digit": 4')
            self.close_connection = True
            return
        if pixel == 5:
            time.sleep(1.5)
        answer = json.dumps({"digit": pixel, "version": "v1"}).encode()
        self.send_response(422 if pixel == 3 else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def echo():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def bodies(count):
    return [json.dumps({"pixels": [[n]]}).encode() for n in range(count)]


def test_each_reply_belongs_to_its_request(echo):
    times = [0.01 * n for n in range(12)]
    replies = asyncio.run(serving_load.send_all(echo, bodies(4), times))
    assert [(r.image, r.digit) for r in replies] == [(n % 4, n % 4) for n in range(12)]
    assert [r.status for r in replies] == [200, 200, 200, 422] * 3
    assert [r.scheduled for r in replies] == times
    assert all(r.scheduled <= r.sent < r.finished for r in replies)


def test_half_an_answer_and_a_late_one_are_lost(echo):
    replies = asyncio.run(serving_load.send_all(echo, bodies(6)[4:], [0, 0], timeout=0.5))
    assert [(r.status, r.digit) for r in replies] == [(serving_load.LOST, None)] * 2


def test_the_loop_is_open(echo):
    """A slow answer holds up nothing that is scheduled later."""
    slow_first = [bodies(6)[5], bodies(6)[0]]
    slow, quick = asyncio.run(serving_load.send_all(echo, slow_first, [0.0, 0.05]))
    assert slow.finished > 1.4 and quick.finished < 1.0


def test_a_second_process(echo):
    replies = serving_load.load_test(echo, [[[0]], [[1]]], rate=60, seconds=0.5, seed=2)
    assert [r.scheduled for r in replies] == serving_load.arrivals(60, 0.5, 2)
    assert all(r.digit == r.image and r.version == "v1" for r in replies)


def test_a_client_that_fails_is_noticed(echo):
    with serving_load.start_load(echo, [], rate=10, seconds=0.5) as client:  # nothing to send
        with pytest.raises(RuntimeError, match="client of the load test ended with 1"):
            serving_load.collect(client)
