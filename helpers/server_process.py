"""Chapter 18: a server as a process of its own: started, waited for, stopped with its children."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ServerFailed(Exception):
    """A server ended before it was ready, or was not ready in time; what it printed follows."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A running server: its address, what it printed, and three ways to end it."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def printed(self) -> str:
        """Return all that the server has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ask_to_stop(self) -> None:
        """Send SIGTERM: finish what was accepted, then leave."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the server and all processes that it started: nothing is finished."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(10)

    def stop(self, timeout: float = 20) -> None:
        """Ask to stop, wait, and kill what is left after `timeout` seconds; twice does no harm."""
        if self.process.poll() is None:
            self.ask_to_stop()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                print(f"killed: not stopped after {timeout} s", file=sys.stderr)
        self.kill()  # a child may have outlived its parent
        atexit.unregister(self.stop)


def start(
    command: Sequence[str],
    *,
    port: int,
    ready: str = "/ready",
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Start `command`, wait until the path `ready` answers 200, and return the running server.

    The server gets a session of its own, so that the processes that it starts can be ended with
    it; it is stopped when this program ends, at the latest. environment: variables that it gets
    besides those of this process. Raises `ServerFailed` with the last lines that the server
    printed when it is not ready after `timeout` seconds.
    """
    log = Path(tempfile.mkdtemp(prefix="server-"), "log.txt")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **({} if environment is None else environment)},
        )
    server = ServerProcess(process, port, log)
    atexit.register(server.stop)
    try:
        _wait_until_ready(server, ready, timeout)
    except BaseException:
        server.stop()
        raise
    return server


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[ServerProcess]:
    """Start a server with the options of `start`, and stop it at the end of the block."""
    server = start(command, **options)
    try:
        yield server
    finally:
        server.stop()


def _wait_until_ready(server: ServerProcess, path: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not _answers(server.url + path):
        ended = server.process.poll()
        if ended is not None:
            raise ServerFailed(f"the server ended with status {ended}:\n{_tail(server)}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server was not ready after {timeout:g} s:\n{_tail(server)}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.HTTPError):
        return False


def _tail(server: ServerProcess) -> str:
    return "\n".join(server.printed().splitlines()[-15:])


def serving_command(port: int, models: Mapping[str, str | Path], *options: str) -> list[str]:
    """Return the command that starts `helpers.serving` with models, name -> file, on a port."""
    command = [sys.executable, "-m", "helpers.serving", "--port", str(port)]
    for name, path in models.items():
        command += ["--model", f"{name}={path}"]
    return [*command, *options]
