"""Servers as processes: ready or not, and none is left behind."""

import os
import socket
import sys
import time
import urllib.request

import pytest

from helpers.server_process import ServerFailed, free_port, running, serving_command

SERVER = """
import subprocess, sys, http.server
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().split()[2] == "Z"  # dead, and its new parent has not looked yet


def command(port):
    return [sys.executable, "-c", SERVER, str(port)]


@pytest.mark.parametrize("end", ["with", "kill", "error"])
def test_a_server_ends_with_its_children(end):
    port = free_port()
    try:
        with running(command(port), port=port) as server:
            assert urllib.request.urlopen(f"{server.url}/ready").status == 200
            child = int(server.printed().split()[1])
            assert not gone(child)
            if end == "kill":
                server.kill()
                assert server.process.poll() is not None
            if end == "error":
                raise KeyError("a test fails")
    except KeyError:
        assert end == "error"
    deadline = time.monotonic() + 10
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child) and server.process.poll() is not None
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_ignores_the_signal_is_killed(capfd):
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    port = free_port()
    with running([sys.executable, "-c", program, str(port)], port=port) as server:
        server.stop(timeout=0.5)
        assert server.process.poll() == -9
    assert "killed: not stopped after 0.5 s" in capfd.readouterr().err


def test_a_server_that_ends_at_once_shows_why():
    program = "import sys; print('no such model'); sys.exit(3)"
    with pytest.raises(ServerFailed, match="(?s)server ended with status 3.*no such model"):
        with running([sys.executable, "-c", program], port=free_port()):
            raise AssertionError("it was never ready")


def test_a_server_that_never_answers_is_stopped():
    program = "import time; print('thinking', flush=True); time.sleep(100)"
    start = time.monotonic()
    with pytest.raises(ServerFailed, match="(?s)not ready after 1 s.*thinking"):
        with running([sys.executable, "-c", program], port=free_port(), timeout=1):
            raise AssertionError("it was never ready")
    assert time.monotonic() - start < 30


def test_the_command_names_models_and_options():
    found = serving_command(8001, {"v1": "a", "v2": "b"}, "--bare")
    assert found[1:] == (
        ["-m", "helpers.serving", "--port", "8001", "--model", "v1=a", "--model", "v2=b", "--bare"]
    )
