"""Chapter 18: the same model on TorchServe: a handler, an archive, and its management API."""

import json
import shutil
import subprocess
import sys
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from helpers.serving import Image, load_model, problems

# github.com/pytorch/serve is read-only since then, without security patches: so it says there.
ARCHIVED = date(2025, 8, 7)
READ = date(2026, 11, 23)  # when we looked


class Digits:
    """The handler: TorchServe imports this file from the archive and calls its only class."""

    def initialize(self, context: Any) -> None:
        """Load the model that lies in the archive beside this file."""
        torch.set_num_threads(1)
        folder = Path(context.system_properties["model_dir"])
        self.model = load_model(folder / "model.safetensors")

    def handle(self, data: list[dict], context: Any) -> list[str]:
        """Answer a batch: one text for each request, in the same order.

        A bad request gets its own status, so that the others in its batch are served.
        """
        answers, good = [""] * len(data), {}
        for number, request in enumerate(data):
            body = request.get("body", request.get("data"))
            try:
                image = Image.model_validate(body)
                good[number] = torch.tensor(image.pixels)
            except ValidationError as error:
                context.set_response_status(422, problems(error.errors()), number)
                answers[number] = json.dumps({"detail": problems(error.errors())})
        if good:
            with torch.inference_mode():
                rows = self.model(torch.stack(list(good.values())))
            for number, row in zip(good, rows, strict=True):
                answer = {"digit": int(row.argmax()), "probabilities": row.tolist()}
                answers[number] = json.dumps(answer)
        return answers


def missing() -> str | None:
    """Return why TorchServe cannot be started here, None when it can."""
    for program in ("torchserve", "torch-model-archiver"):
        if _program(program) is None:
            return f"{program} is not installed beside this Python"
    if shutil.which("java") is None:
        return "there is no Java on this machine"
    return None


def _program(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def archive(model: str | Path, version: str, folder: Path) -> Path:
    """Pack a model file and this handler into ``digits-VERSION.mar`` in `folder`."""
    staged = folder / "model.safetensors"
    shutil.copyfile(model, staged)
    name = f"digits-{version}"
    command = [_program("torch-model-archiver"), "--model-name", "digits", "--version", version]
    command += ["--handler", str(Path(__file__).resolve()), "--extra-files", str(staged)]
    command += ["--export-path", str(folder), "--force"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "digits.mar").rename(folder / f"{name}.mar")
    return folder / f"{name}.mar"


def configure(folder: Path, ports: tuple[int, int, int]) -> Path:
    """Write TorchServe's settings: three ports (requests, management, metrics), one worker."""
    inference, management, metrics = ports
    lines = {
        "inference_address": f"http://127.0.0.1:{inference}",
        "management_address": f"http://127.0.0.1:{management}",
        "metrics_address": f"http://127.0.0.1:{metrics}",
        "job_queue_size": "256",
        "default_workers_per_model": "1",
        "install_py_dep_per_model": "false",
        "metrics_mode": "prometheus",
    }
    path = folder / "config.properties"
    path.write_text("".join(f"{k}={v}\n" for k, v in lines.items()), encoding="utf-8")
    return path


def command(folder: Path) -> list[str]:
    """Return the command that starts TorchServe in the foreground, with the archives of `folder`.

    By default 0.12 wants a token for everything and registers no models; on 127.0.0.1, for a test,
    both are switched.
    """
    options = ["--start", "--foreground", "--ncs", "--model-store", str(folder)]
    options += ["--ts-config", str(folder / "config.properties")]
    return [_program("torchserve"), *options, "--disable-token-auth", "--enable-model-api"]


def register(management: str, file: str, *, max_batch: int = 32, max_delay_ms: int = 2) -> str:
    """Load an archive through the management API and return what TorchServe says."""
    query = f"url={file}&batch_size={max_batch}&max_batch_delay={max_delay_ms}"
    query += "&initial_workers=1&synchronous=true"
    request = urllib.request.Request(f"{management}/models?{query}", method="POST")
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["status"]
