"""The container's file: checked by a linter, and its parts are what the server accepts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import serving

ROOT = Path(serving.__file__).parents[1]
LAUNCH = ROOT / "helpers" / "launch"
FILE = LAUNCH / "serving.Containerfile"


def test_the_linter_finds_nothing():
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    assert program, "hadolint is in requirements.txt"
    done = subprocess.run([program, "--no-color", str(FILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_is_a_list_that_the_server_understands(monkeypatch, tmp_path):
    text = FILE.read_text(encoding="utf-8")
    command = json.loads(re.search(r"^CMD (\[.*\])$", text, re.M)[1])
    assert command[:3] == ["python", "-m", "helpers.serving"]
    started = []
    monkeypatch.setattr(
        serving, "load_model", lambda path: serving.DigitReader(784, 10, mean=0, std=1)
    )
    monkeypatch.setattr(serving.DrainingServer, "run", lambda self: started.append(self))
    serving.main(command[3:])
    (server,) = started
    assert (server.config.host, server.config.port, server.drain) == ("0.0.0.0", 8000, 5)


def test_it_has_what_the_server_imports_with_the_pins_of_the_book():
    book = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("#")[0].strip() for line in book}
    wanted = (LAUNCH / "serving.requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = {line for line in wanted if line and not line.startswith("#")}
    assert wanted <= pins
    names = {pin.split("==")[0].replace("-", "_") for pin in wanted} | {"pydantic", "starlette"}
    program = (
        "import sys; import helpers.serving; "
        "print(*sorted({m.split('.')[0] for m in sys.modules if 'site-packages' in "
        "str(getattr(sys.modules[m], '__file__', ''))}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"torchvision", "mlxtend", "scipy", "matplotlib", "aiohttp", "litserve"}
    assert {"torch", "fastapi", "uvicorn", "safetensors", "prometheus_client"} <= loaded & names


@pytest.mark.parametrize("words", ["USER 10001", "HEALTHCHECK", "--no-cache-dir"])
def test_it_is_no_root_and_can_be_watched(words):
    assert words in FILE.read_text(encoding="utf-8")
