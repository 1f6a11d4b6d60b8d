"""Two hosts on one machine: network namespaces, each with its own addresses, joined by a cable.

Nothing here touches the machine's own interfaces. Needs the rights of root, and iproute2.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PORT = 29400  # of the rendezvous; the namespace is ours alone


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout


def why_not():
    """Why there can be no namespaces here; "" if there can."""
    name = f"try{os.getpid()}"
    try:
        command("tc", "-Version")
        command("ip", "netns", "add", name)
        command("ip", "netns", "del", name)
    except FileNotFoundError as error:
        return f"two hosts need iproute2: {error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str
    interface: str

    def start(self, leader, program, *arguments, nodes, log):
        """Start torchrun for `program` on this host; the leader hosts the rendezvous."""
        conf = {
            # in a namespace torchrun does not recognise its own address, and nobody would host
            "is_host": int(self == leader),
            "timeout": 180,
            "join_timeout": 180,
            "last_call_timeout": 1,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
        }
        words = ["ip", "netns", "exec", self.namespace, sys.executable]
        words += ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={leader.address}:{PORT}"]
        words += ["--rdzv-id=job", "--max-restarts=5", "--monitor-interval=0.2"]
        words += [f"--local-addr={self.address}"]
        words += ["--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items())]
        words += [str(program), *map(str, arguments)]
        env = os.environ | {
            "GLOO_SOCKET_IFNAME": self.interface,
            # in 2.15 a job cannot grow without it: the new host waits for MASTER_ADDR for ever
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        with open(log, "ab") as file:
            return subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def kill(self):
        """Kill -9 everything that runs on this host, as a power cut would."""
        deadline = time.monotonic() + 10
        while pids := command("ip", "netns", "pids", self.namespace).split():
            for pid in map(int, pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"still on {self.namespace}: {pids}")
            time.sleep(0.02)

    def sent(self):
        """Bytes that have left this host, with the headers of Ethernet, IP and TCP."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(command("ip", "netns", "exec", self.namespace, "cat", path))


@contextmanager
def two_hosts(rate=""):
    """Two hosts with a cable; `rate` such as "80mbit" throttles both directions (tc tbf)."""
    hosts = [
        Host(f"book{os.getpid()}{x}", f"10.77.0.{i}", f"ve{x}") for i, x in ((1, "A"), (2, "B"))
    ]
    a, b = hosts
    try:
        for host in hosts:
            command("ip", "netns", "add", host.namespace)
        command(
            *["ip", "link", "add", a.interface, "netns", a.namespace, "type", "veth"],
            *["peer", "name", b.interface, "netns", b.namespace],
        )
        for host in hosts:
            ip = ["ip", "-n", host.namespace]
            command(*ip, "addr", "add", f"{host.address}/24", "dev", host.interface)
            command(*ip, "link", "set", host.interface, "up")
            command(*ip, "link", "set", "lo", "up")
            if rate:
                tbf = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
                command("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, *tbf)
        yield a, b
    finally:
        listed = command("ip", "netns", "list")
        for host in hosts:
            if host.namespace in listed:
                host.kill()
                command("ip", "netns", "del", host.namespace)
