import time

import pytest
import torch

from helpers import timing

CPU = torch.device("cpu")


def test_quantiles():
    values = torch.arange(101.0).tolist()
    assert timing.quantiles(values) == [20.0, 50.0, 80.0]
    with pytest.raises(ValueError, match="at least 3 values, got 2"):
        timing.quantiles([1.0, 2.0])


def test_time_ms_is_about_right_and_warms_up():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.1 if len(calls) == 1 else 0.005)  # the first call is slow

    low, middle, high = timing.time_ms(call, CPU, repeats=5)
    assert 5 <= low <= middle <= high < 50
    assert len(calls) == 3 + 1 + 5


def test_short_calls_repeat_inside_a_reading():
    calls = []
    timing.time_ms(lambda: calls.append(1), CPU, repeats=3)
    assert len(calls) > 100


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
    assert found["s"][1] < found["l"][0]
