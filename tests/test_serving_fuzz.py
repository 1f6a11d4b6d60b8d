"""Bad requests made from the server's own description: no 5xx, and it serves on."""

import collections
import random

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from helpers import serving
from helpers.server_process import free_port, running, serving_command

IMAGE = {"pixels": [[0] * 28] * 28}
TOKEN = {"Authorization": "Bearer fuzz"}
ROUTES = {"POST /predict": 0.75, "PUT /admin/versions": 0.25}  # and their shares


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("fuzz")
    model = serving.DigitReader(784, 16, 10, mean=0.13, std=0.31)
    serving.save_model(model, folder / "v1.safetensors")
    port = free_port()
    command = serving_command(port, {"v1": folder / "v1.safetensors"})
    environment = {"OMP_NUM_THREADS": "1", "SERVING_ADMIN_TOKEN": "fuzz"}
    with running(command, port=port, environment=environment) as server:
        yield server


def from_the_description(server, wanted):
    """Send bad requests that schemathesis derives from /openapi.json; return how many of each."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = collections.Counter()
    for name, share in ROUTES.items():
        method, path = name.split()
        operation = schema[path][method]
        cases = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        count = round(share * wanted)
        sent = 0

        @seed(0)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case):
            nonlocal sent
            answer = case.call(timeout=20)
            sent += 1
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (answer.status_code, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["detail"], answer.text

        send()
        assert sent >= 0.9 * count, f"{name}: {sent} of {count}"
    return statuses


def damaged(generator, body):
    """A good body with a few bytes changed, cut or repeated."""
    body = bytearray(body)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(body))
        kind = generator.randrange(3)
        if kind == 0:
            body[at] = generator.randrange(256)
        elif kind == 1:
            del body[at : at + generator.randint(1, 200)]
        else:
            body[at:at] = body[at : at + 50] * generator.randint(1, 30)
        if not body:
            body = bytearray(b" ")
    return bytes(body)


def from_good_ones(server, wanted):
    generator = random.Random(0)
    good = httpx.Request("POST", server.url, json=IMAGE).read()
    statuses = collections.Counter()
    with httpx.Client(headers={"Content-Type": "application/json"}) as client:
        for _ in range(wanted):
            body = damaged(generator, good)
            answer = client.post(f"{server.url}/predict", content=body)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (answer.text, body)
            if answer.status_code >= 400:
                assert answer.json()["detail"]
    return statuses


def still_serves(server):
    answer = httpx.post(f"{server.url}/predict", json=IMAGE)
    assert answer.status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert server.process.poll() is None


def test_a_few_hundred_bad_requests(server):
    statuses = from_the_description(server, 100) + from_good_ones(server, 300)
    assert sum(count for status, count in statuses.items() if 400 <= status < 500) > 250, statuses
    still_serves(server)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_bad_requests(server):
    statuses = from_the_description(server, 2500) + from_good_ones(server, 9500)
    refused = sum(count for status, count in statuses.items() if 400 <= status < 500)
    print(dict(statuses))
    assert refused >= 10_000, statuses
    still_serves(server)
