"""TorchServe: the handler by itself, and, where it and Java are there, the server."""

import json
import types
import urllib.request

import pytest
import torch

from helpers import serving, serving_load
from helpers import torchserve_digits as ts
from helpers.server_process import free_port, running
from tests.test_litserve_digits import post

IMAGE = [[(r + c) % 256 for c in range(28)] for r in range(28)]


def saved(path, seed):
    torch.manual_seed(seed)
    model = serving.DigitReader(784, 32, 10, mean=0.13, std=0.31).eval()
    serving.save_model(model, path)
    return model


@pytest.fixture
def handler(tmp_path):
    model = saved(tmp_path / "model.safetensors", 0)
    handler = ts.Digits()
    handler.initialize(types.SimpleNamespace(system_properties={"model_dir": str(tmp_path)}))
    return handler, model


class Context:
    def __init__(self):
        self.statuses = {}

    def set_response_status(self, code, phrase, index):
        self.statuses[index] = code, phrase


def test_a_batch_with_a_bad_request_in_it(handler):
    handler, model = handler
    other = [[255 - v for v in row] for row in IMAGE]
    context = Context()
    data = [{"body": {"pixels": IMAGE}}, {"body": {"pixels": [[1]]}}, {"data": {"pixels": other}}]
    first, bad, last = map(json.loads, handler.handle(data, context))
    with torch.inference_mode():
        expected = model(torch.tensor([IMAGE, other], dtype=torch.float32))
    assert torch.allclose(torch.tensor(first["probabilities"]), expected[0], rtol=1e-5, atol=1e-7)
    assert torch.allclose(torch.tensor(last["probabilities"]), expected[1], rtol=1e-5, atol=1e-7)
    assert list(context.statuses) == [1] and context.statuses[1][0] == 422
    assert "List should have at least 28" in bad["detail"]


def test_a_batch_of_bad_requests_only(handler):
    context = Context()
    answers = handler[0].handle([{"body": 7}, {}], context)
    assert len(answers) == 2 and sorted(context.statuses) == [0, 1]


def test_settings(tmp_path):
    text = ts.configure(tmp_path, (1, 2, 3)).read_text(encoding="utf-8")
    assert "inference_address=http://127.0.0.1:1\n" in text
    assert "management_address=http://127.0.0.1:2\n" in text


@pytest.mark.slow
def test_two_versions_in_one_torchserve(tmp_path):
    """Archive, register, default version, batches, metrics: all through its own interfaces."""
    reason = ts.missing()
    if reason:
        pytest.skip(reason)
    ports = free_port(), free_port(), free_port()
    models = {}
    for seed, version in enumerate(("1.0", "2.0")):
        models[version] = saved(tmp_path / f"{version}.safetensors", seed)
        ts.archive(tmp_path / f"{version}.safetensors", version, tmp_path)
    ts.configure(tmp_path, ports)
    images = torch.randint(256, (16, 28, 28))
    expected = {v: model(images.float()).argmax(1).tolist() for v, model in models.items()}
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in ports)
    environment = {"PYTHONPATH": str(serving.Path(serving.__file__).parents[1])}
    environment |= {"LOG_LOCATION": str(tmp_path / "logs")}
    environment |= {"METRICS_LOCATION": str(tmp_path / "logs"), "OMP_NUM_THREADS": "1"}
    with running(ts.command(tmp_path), port=ports[0], ready="/ping", environment=environment):
        for version in models:
            assert "registered" in ts.register(management, f"digits-{version}.mar")
        for version in models:
            path = f"/predictions/digits/{version}"
            replies = serving_load.load_test(inference + path, images.tolist(), rate=100, seconds=2)
            assert {r.status for r in replies} == {200}
            assert all(r.digit == expected[version][r.image] for r in replies)
        default = f"{management}/models/digits/2.0/set-default"
        request = urllib.request.Request(default, method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
        replies = serving_load.load_test(
            f"{inference}/predictions/digits", images.tolist(), rate=20, seconds=1
        )
        assert all(r.digit == expected["2.0"][r.image] for r in replies)
        assert post(f"{inference}/predictions/digits", {"pixels": [[0]]})[0] == 422
        with urllib.request.urlopen(f"{metrics}/metrics", timeout=20) as response:
            assert "ts_inference_requests_total" in response.read().decode()


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(ts, "_program", lambda name: None)
    assert ts.missing() == "torchserve is not installed beside this Python"
    monkeypatch.setattr(ts, "_program", lambda name: name)
    monkeypatch.setattr(ts.shutil, "which", lambda name: None)
    assert ts.missing() == "there is no Java on this machine"
    monkeypatch.setattr(ts.shutil, "which", lambda name: name)
    assert ts.missing() is None
    assert ts.command(ts.Path("x"))[0] == "torchserve"
