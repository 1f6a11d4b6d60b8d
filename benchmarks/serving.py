"""Chapter 18: servers, one model, one machine: latencies at rising rates, and the batch curve.

The same rule for all. A server has one processor with all its processes and threads, and the client
has another; the model computes with one thread and the same weights. The client sends the same
images as JSON at the same random times (an open loop), and a latency counts from the time at which
the request was to be sent. Each server is started, warmed up at a low rate, and measured at rising
rates until two in a row cannot be held: p99 above `LIMIT_MS` or a request without an answer. One
that does not hold the first rate is measured at lower ones. Between two rates we wait until it has
nothing to do. Each reading has at least 1000 requests, so that ten lie beyond p99; one in which the
client itself was late is taken again. Each round takes all servers, in an order drawn anew.

"bare" is a handler written with `async def`, which computes on the event loop, "bare, def" is the
same one in FastAPI's pool of threads, and "own, collector on" is the own server without
`gc.freeze`. The own server has limits (429 when 256 wait, 504 after 2 s), which the bare ones have
not. A server whose software is not there is left out, and said so. `SERVERS` may be cut to try one
of them.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from helpers import data, environment, serving, serving_load, timing
from helpers import torchserve_digits as torchserve
from helpers.page import records
from helpers.server_process import ServerProcess, free_port, running, serving_command

SIZES = (784, 4096, 4096, 10)
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
RATES = (100, 125, 150, 175, 200, 225, 250, 300, 350, 400, 450, 500, 550, 600, 700, 800, 1000)
LOWER = (75, 50, 25)  # for a server that does not hold the first
LIMIT_MS = 100.0
LATE_MS = 25.0  # a client later than this measures itself
TRIES = 3
REQUESTS = 1100  # at least, for each reading
SECONDS = 8.0  # at least, for each reading
WARM_UP = (20.0, 3.0)  # rate, seconds
ROUNDS = 3
Rates = tuple[int, ...]
REPEATS = 15  # of the batch curve

UNITS = {"kind": "batch or load", "server": "name", "batch": "samples", "time": "ms"}
UNITS |= {"round": "number", "rate": "requests/s", "sent": "requests", "answered": "requests"}
UNITS |= {
    "held": f"p99 <= {LIMIT_MS:g} ms and all answered",
    "p50": "ms",
    "p99": "ms",
    "late": "ms",
}


@contextmanager
def own(model: Path, folder: Path, *options: str) -> Iterator[tuple[ServerProcess, str]]:
    """Start `helpers.serving`."""
    port = free_port()
    with running(serving_command(port, {"v1": model}, *options), port=port) as server:
        yield server, "/predict"


@contextmanager
def module(model: Path, name: str, ready: str) -> Iterator[tuple[ServerProcess, str]]:
    """Start a module that takes a port, and the model from DIGITS_MODEL."""
    port = free_port()
    command = [sys.executable, "-m", name, str(port)]
    place = {"DIGITS_MODEL": str(model)}
    with running(command, port=port, ready=ready, environment=place) as server:
        yield server, "/predict"


@contextmanager
def with_torchserve(model: Path, folder: Path) -> Iterator[tuple[ServerProcess, str]]:
    """Archive the model, start TorchServe, register the archive."""
    ports = free_port(), free_port(), free_port()
    archived = torchserve.archive(model, "1.0", folder)
    torchserve.configure(folder, ports)
    place = {"LOG_LOCATION": str(folder / "logs"), "METRICS_LOCATION": str(folder / "logs")}
    command = torchserve.command(folder)
    with running(command, port=ports[0], ready="/ping", environment=place) as server:
        torchserve.register(f"http://127.0.0.1:{ports[1]}", archived.name)
        yield server, "/predictions/digits"


def servers() -> dict[str, Callable[[Path, Path], Any]]:
    """Name -> what starts it, for those that can be started here."""
    found: dict[str, Callable[[Path, Path], Any]] = {
        "bare": lambda model, folder: own(model, folder, "--bare=async"),
        "bare, def": lambda model, folder: own(model, folder, "--bare=def"),
        "own": lambda model, folder: own(model, folder),
        "own, collector on": lambda model, folder: own(model, folder, "--no-freeze"),
        "LitServe": lambda model, folder: module(model, "helpers.litserve_digits", "/health"),
    }
    if environment_has("ray"):
        found["Ray Serve"] = lambda model, folder: module(model, "helpers.ray_digits", "/ready")
    if torchserve.missing() is None:
        found["TorchServe"] = with_torchserve
    return found


def environment_has(name: str) -> bool:
    """Can this Python import it?"""
    from importlib.util import find_spec

    return find_spec(name) is not None


SERVERS = ("bare", "bare, def", "own", "own, collector on", "LitServe", "Ray Serve", "TorchServe")


def at_rising_rates(
    url: str, images: list, server: str, number: int, rates: Rates, lower: Rates
) -> Iterator[dict]:
    """Measure one server until two rates in a row are not held, or lower ones until one is."""
    serving_load.load_test(url, images, rate=WARM_UP[0], seconds=WARM_UP[1])
    failed = 0
    for rate in rates:
        measured = reading(url, images, server, number, rate)
        yield measured
        failed = 0 if measured["held"] else failed + 1
        if failed == 2:
            break
    else:
        return
    if rate == rates[1]:  # not even the first
        for rate in lower:
            measured = reading(url, images, server, number, rate)
            yield measured
            if measured["held"]:
                return


def reading(url: str, images: list, server: str, number: int, rate: float) -> dict[str, Any]:
    """Measure one rate, again if the client was late; the least late of `TRIES` counts."""
    seconds = max(SECONDS, REQUESTS / rate)
    taken = []
    for _ in range(TRIES):
        settle(url, images)
        found = serving_load.summary(
            serving_load.load_test(url, images, rate=rate, seconds=seconds, seed=number)
        )
        print(f"{server}, round {number}, {rate}/s: {found}", flush=True)
        taken.append(found)
        if found["client late by"] <= LATE_MS:
            break
    found = min(taken, key=lambda each: each["client late by"])
    answered = found["statuses"].get(200, 0)
    p99 = found["p99"]
    return row(
        kind="load",
        server=server,
        round=number,
        rate=rate,
        sent=found["sent"],
        answered=answered,
        held=answered == found["sent"] and p99 is not None and p99 <= LIMIT_MS,
        p50=rounded(found["p50"]),
        p99=rounded(p99),
        late=rounded(found["client late by"]),
    )


def settle(url: str, images: list) -> None:
    """Wait for three quick answers: by then, what earlier clients gave up waiting for is done."""
    quick, start = 0, time.monotonic()
    with httpx.Client(timeout=60) as client:
        while quick < 3:
            begin = time.perf_counter()
            client.post(url, json={"pixels": images[0]}).raise_for_status()
            quick = quick + 1 if 1e3 * (time.perf_counter() - begin) < LIMIT_MS else 0
            if time.monotonic() - start > 120:
                raise RuntimeError(f"{url} was still busy 120 s after the last request")


def two_processors() -> tuple[int, int]:
    """One processor for the server and one for the client, which must not take turns on one."""
    if not hasattr(os, "sched_getaffinity"):
        raise RuntimeError("servers are compared on Linux, where a process can be kept on a CPU")
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise RuntimeError(f"expected two processors, for server and client, got {len(mine)}")
    return mine[0], mine[-1]


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def row(**values: Any) -> dict[str, Any]:
    """A line of the record; what it has no value for is None."""
    return {**dict.fromkeys(UNITS), **values}


def batch_curve(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Milliseconds of one call for each batch size, in turns, one thread."""
    calls = {}
    for size in BATCHES:
        x = torch.rand(size, 28, 28) * 255
        calls[size] = lambda x=x: model(x)
    with torch.inference_mode():
        times = timing.interleaved(calls, torch.device("cpu"), repeats=REPEATS)
    return [
        row(kind="batch", server="model", batch=size, time=[round(t, 4) for t in ms])
        for size, ms in times.items()
    ]


def measure(device: torch.device) -> records.Record:
    """Measure everything that can be started here. On a CPU: that is what the chapter is about."""
    return compare("serving", device, SIZES, SERVERS, RATES, LOWER)


def compare(
    record: str,
    device: torch.device,
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    rates: Rates,
    lower: Rates,
) -> records.Record:
    """Measure servers with a model of these layers at these rates, each once a round."""
    if device.type != "cpu":
        raise RuntimeError(f"the servers are measured on a CPU, got {device}")
    os.environ["OMP_NUM_THREADS"] = "1"  # the servers inherit it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = records.provenance(
        environment.versions(device), repeats=ROUNDS, clock="perf_counter of the client"
    )
    model = serving.DigitReader(*sizes, mean=data.MEAN, std=data.STD).eval()
    images = data.digits().test_images[:100, 0].tolist()
    rows = batch_curve(model)
    available = servers()
    for_server, for_client = two_processors()
    everywhere = os.sched_getaffinity(0)
    try:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place, "v1.safetensors")
            serving.save_model(model, path)
            for number in range(1, ROUNDS + 1):
                for name in random.Random(number).sample(names, len(names)):
                    if name not in available:
                        print(f"{name} is left out: not installed beside this Python")
                        continue
                    folder = Path(tempfile.mkdtemp(dir=place))
                    os.sched_setaffinity(0, {for_server})  # what is started now inherits it
                    with available[name](path, folder) as (server, route):
                        os.sched_setaffinity(0, {for_client})
                        url = server.url + route
                        rows += at_rising_rates(url, images, name, number, rates, lower)
    finally:
        os.sched_setaffinity(0, everywhere)
    return records.Record(record, made, UNITS, rows)
