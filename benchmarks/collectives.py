"""Chapter 14: all-reduces between hosts whose cables are the bottleneck, measured and predicted.

2, 4 and 8 network namespaces on this machine, each behind a cable of 80 Mbit/s (tc tbf), sum
messages in five ways: through rank 0, as a ring, as a tree, as a tree whose messages are
acknowledged, and with the backend's own all-reduce.
The cables are so slow that they set the time, although all hosts share the machine's cores.
`predicted` is what the formulas of `helpers.collectives` say (for the backend that of the ring),
with the bandwidth of the cable and no latency: tbf lets short bursts pass at once, so that these
cables show none, and a latency fitted to what a formula leaves out would be an error of bandwidth.

Needs the rights of root and iproute2; nothing touches the machine's own interfaces.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers import collectives, distributed, distributed_scaling, environment, timing
from helpers.page import records

REPEATS = 5  # the cables set the time, which hardly varies
HOSTS = (2, 4, 8)
SIZES = (2**18, 2**20, 2**22)  # bytes
RATE = "80mbit"
CABLE = 80e6 / 8 * 1448 / 1514  # bytes/s of data; the rest are headers of Ethernet, IP and TCP
FORMULAS = {
    "rank 0": distributed_scaling.rank0_seconds,
    "ring": collectives.ring_seconds,
    "tree": collectives.tree_seconds,
    "tree, acknowledged": collectives.tree_seconds,
    "backend": collectives.ring_seconds,
}
UNITS = {"way": "name", "ranks": "hosts", "bytes": "bytes", "ms": "ms", "predicted": "ms"}


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Namespaces with one throttled cable each, joined by a switch; the addresses are 10.77.0.1…"""
    tag = f"scale{os.getpid()}"
    switch, names = f"{tag}s", [f"{tag}h{number}" for number in range(count)]
    try:
        _command("ip", "netns", "add", switch)
        _command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _command("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port, address = f"port{number}", f"10.77.0.{number + 1}/24"
            _command("ip", "netns", "add", name)
            cable = ["ip", "link", "add", "eth0", "netns", name]
            _command(*cable, "type", "veth", "peer", "name", port, "netns", switch)
            _command("ip", "-n", switch, "link", "set", port, "master", "br0")
            _command("ip", "-n", switch, "link", "set", port, "up")
            _command("ip", "-n", name, "addr", "add", address, "dev", "eth0")
            _command("ip", "-n", name, "link", "set", "eth0", "up")
            _command("ip", "-n", name, "link", "set", "lo", "up")
            tbf = ["root", "tbf", "rate", RATE, "burst", "16kb", "latency", "400ms"]
            _command("tc", "-n", name, "qdisc", "add", "dev", "eth0", *tbf)
            _command("tc", "-n", switch, "qdisc", "add", "dev", port, *tbf)
        yield names
    finally:
        for name in [switch, *names]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def _command(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)


def between_hosts(count: int) -> dict[str, dict[str, list[float]]]:
    """Run this file once on each host; return way -> bytes -> milliseconds of the slowest rank."""
    with hosts(count) as names:
        jobs = []
        for rank, name in enumerate(names):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29500",  # the namespace is ours alone
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            }
            words = ["ip", "netns", "exec", name, sys.executable, __file__, str(REPEATS)]
            words += map(str, SIZES)
            pipe = subprocess.PIPE if rank == 0 else None
            jobs.append(subprocess.Popen(words, env=env, stdout=pipe))
        try:
            printed = jobs[0].communicate(timeout=1200)[0]
            for job in jobs[1:]:
                job.wait(60)
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"a host failed: exit codes {[job.returncode for job in jobs]}")
    return json.loads(printed)


def on_a_host(repeats: int, sizes: list[int]) -> dict[str, dict[str, list[float]]]:
    """What each host runs: every way in turn, all ranks from a barrier."""
    ways = {
        "rank 0": distributed_scaling.rank0_all_reduce,
        "ring": collectives.ring_all_reduce,
        "tree": collectives.tree_all_reduce,
        "tree, acknowledged": partial(collectives.tree_all_reduce, acknowledge=True),
        "backend": dist.all_reduce,
    }
    taken: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    with distributed.process_group("gloo", timeout=600):
        for size in sizes:
            tensor = torch.ones(size // 4)
            for number in range(1 + repeats):
                for name, way in ways.items():
                    dist.barrier()
                    start = time.perf_counter()
                    way(tensor.fill_(1))
                    slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                    if number:  # the first is a warm-up
                        taken[name].setdefault(str(size), []).append(slowest.item() * 1e3)
    return taken


def host_rows() -> list[dict[str, Any]]:
    taken = {count: between_hosts(count) for count in HOSTS}
    return [
        row(way, count, int(size), ms)
        for count, ways in taken.items()
        for way, sizes in ways.items()
        for size, ms in sizes.items()
    ]


def row(way: str, ranks: int, size: int, ms: list[float]) -> dict[str, Any]:
    seconds = FORMULAS[way](ranks, size, 0.0, CABLE)  # no latency: see above
    known = {"way": way, "ranks": ranks, "bytes": size, "ms": timing.quantiles(ms)}
    found = {**known, "predicted": float(f"{seconds * 1e3:.4g}")}
    print(found, flush=True)
    return found


def measure(device: torch.device) -> records.Record:
    if device.type != "cpu":
        raise RuntimeError(f"hosts on one machine have no GPU of their own, {device}: --device cpu")
    here = environment.versions(device) | {"cable": RATE}
    clock = "perf_counter of the slowest rank, all begin after a barrier"
    provenance = records.provenance(here, repeats=REPEATS, clock=clock)
    return records.Record("collectives", provenance, UNITS, host_rows())


if __name__ == "__main__":  # on a host
    times = on_a_host(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
    if os.environ["RANK"] == "0":
        print(json.dumps(times))
