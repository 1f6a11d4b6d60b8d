"""LitServe, really started: the model's answers, bad requests, and no process left behind."""

import json
import sys
import urllib.error
import urllib.request

import pytest
import torch

from helpers import serving, serving_load
from helpers.server_process import free_port, running


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    model = serving.DigitReader(784, 32, 10, mean=0.13, std=0.31).eval()
    path = tmp_path_factory.mktemp("model") / "v1.safetensors"
    serving.save_model(model, path)
    return model, path


@pytest.fixture(scope="module")
def server(model):
    port = free_port()
    command = [sys.executable, "-m", "helpers.litserve_digits", str(port)]
    environment = {"DIGITS_MODEL": str(model[1]), "OMP_NUM_THREADS": "1"}
    with running(command, port=port, ready="/health", environment=environment) as server:
        yield server


def post(url, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_answers_under_load_are_those_of_the_model(server, model):
    images = torch.randint(256, (16, 28, 28))
    with torch.inference_mode():
        right = model[0](images.float()).argmax(1).tolist()
    replies = serving_load.load_test(f"{server.url}/predict", images.tolist(), rate=100, seconds=1)
    assert [r.status for r in replies] == [200] * len(replies)
    assert [r.digit for r in replies] == [right[r.image] for r in replies]


def test_a_bad_request_is_named(server):
    status, answer = post(f"{server.url}/predict", {"pixels": [[0]]})
    assert status == 422 and "List should have at least 28" in answer["detail"]
    assert post(f"{server.url}/predict", {"pixels": [[0] * 28] * 28})[0] == 200
