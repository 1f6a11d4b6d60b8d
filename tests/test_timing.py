import json
import time

import pytest
import torch

from helpers import timing

CPU = torch.device("cpu")


def test_quantiles():
    values = torch.arange(101.0).tolist()
    assert timing.quantiles(values) == (20.0, 50.0, 80.0)
    with pytest.raises(ValueError, match="at least 3 values, got 2"):
        timing.quantiles([1.0, 2.0])


def test_quantiles_have_names_and_are_a_list_for_print_and_json():
    found = timing.quantiles([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    low, middle, high = found
    assert (low, middle, high) == (found.p20, found.median, found.p80) == (2.0, 3.5, 5.0)
    assert str(found) == json.dumps(found) == "[2.0, 3.5, 5.0]"
    assert repr(found) == "Quantiles(p20=2.0, median=3.5, p80=5.0)"


def test_time_ms_is_about_right_and_warms_up():
    calls = []

    def call():
        calls.append(time.perf_counter())
        time.sleep(0.1 if len(calls) == 1 else 0.005)  # the first call is slow

    low, middle, high = timing.time_ms(call, CPU, repeats=5)
    read_ms = (time.perf_counter() - calls[-5]) * 1e3  # all five readings, however busy it is
    assert 5 <= low <= middle <= high
    assert 5 * low <= read_ms
    assert len(calls) == 3 + 3 + 5


def test_short_calls_repeat_inside_a_reading():
    calls = []
    timing.time_ms(lambda: calls.append(1), CPU, repeats=3)
    assert len(calls) > 100


def test_one_interruption_does_not_make_every_reading_short():
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 4:  # the first that decides how often a reading repeats
            time.sleep(0.02)

    timing.time_ms(call, CPU, repeats=3)
    assert len(calls) > 100


def test_the_host_clock_reads_once_and_warms_nothing_up():
    calls = []
    for times in (1, 4):
        before, start = len(calls), time.perf_counter()
        took = timing.host_ms(lambda: (calls.append(1), time.sleep(0.005)), CPU, times)
        whole_ms = (time.perf_counter() - start) * 1e3
        assert len(calls) - before == times
        assert 5 <= took <= whole_ms / times  # of one call, in ms


def test_readings_are_those_behind_the_quantiles():
    calls = {"a": lambda: time.sleep(0.001), "b": lambda: time.sleep(0.003)}
    taken = timing.readings(calls, CPU, repeats=4)
    assert {name: len(values) for name, values in taken.items()} == {"a": 4, "b": 4}
    assert min(taken["a"]) >= 1 and min(taken["b"]) >= 3


def test_longer_readings_hold_more_calls():
    counts = []
    for shortest in (1.0, 10.0):
        calls = []
        timing.readings(
            {"a": lambda c=calls: c.append(time.sleep(5e-4))}, CPU, 3, shortest_ms=shortest
        )
        counts.append(len(calls) - 6)
    assert counts[0] <= 3 * 2 and counts[1] >= 3 * 5


def test_a_gpu_is_read_by_its_own_clock_unless_the_host_is_asked_for(monkeypatch):
    """Without a GPU: which of the two takes the readings."""
    monkeypatch.setattr(timing, "wait_for", lambda device: None)
    monkeypatch.setattr(timing, "_cuda_reader", lambda call: lambda: -1.0)
    cuda = torch.device("cuda")
    calls = {"a": lambda: None}
    assert timing.readings(calls, cuda, 3)["a"] == [-1.0] * 3
    assert min(timing.readings(calls, cuda, 3, by_host=True)["a"]) > 0
    assert timing.time_ms(calls["a"], cuda, 3) == (-1.0, -1.0, -1.0)
    assert timing.time_ms(calls["a"], cuda, 3, by_host=True).p20 > 0
    assert timing.interleaved(calls, cuda, 3, by_host=True)["a"].p20 > 0


def test_waiting_for_a_cpu_returns_at_once():
    assert timing.wait_for(CPU) is None


def test_calls_are_read_in_turns():
    order = []
    calls = {name: (lambda name=name: (order.append(name), time.sleep(0.001))) for name in "ab"}
    found = timing.interleaved(calls, CPU, repeats=3)
    assert list(found) == ["a", "b"]
    assert order[-6:] == list("ababab")
    assert all(1 <= low <= middle <= high for low, middle, high in found.values())


@pytest.mark.gpu
def test_a_gpu_is_waited_for():
    device = torch.device("cuda")
    small, large = torch.rand(64, 64, device=device), torch.rand(4096, 4096, device=device)
    found = timing.interleaved({"s": lambda: small @ small, "l": lambda: large @ large}, device)
    assert found["s"].median < found["l"].p20
