"""The server: every limit, every message, versions, metrics, the page, and its end under load."""

import asyncio
import json
import math
import os
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from torch import nn

from helpers import data, mnist, serving, serving_load
from helpers.server_process import free_port, running, serving_command
from helpers.serving import DigitReader, Routing, Settings

IMAGE = [[(r * 28 + c) % 256 for c in range(28)] for r in range(28)]
SMALL = {"sizes": (784, 16, 10), "mean": data.MEAN, "std": data.STD}


def reader(seed=0, sizes=(784, 16, 10)):
    torch.manual_seed(seed)
    return DigitReader(*sizes, mean=data.MEAN, std=data.STD).eval()


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.reader = seconds, reader()

    def forward(self, x):
        time.sleep(self.seconds)
        return self.reader(x)


@contextmanager
def client(models=None, **options):
    app = serving.create_app({"v1": reader()} if models is None else models, Settings(**options))
    with TestClient(app, raise_server_exceptions=False) as asked:
        yield asked


@pytest.fixture(scope="module")
def server():
    with client() as asked:
        yield asked


def detail(response):
    return response.status_code, response.json()["detail"]


# ---- the model and its file


def test_the_model_normalizes_as_the_book_does():
    model, images = reader(), torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    expected = mnist.predict(nn.Sequential(nn.Flatten(), model.layers), images)
    with torch.inference_mode():
        got = model(images[:, 0].float())
    # two orders of the same few roundings, on probabilities: some units in the last place
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_a_file_brings_back_the_model(tmp_path):
    model = reader()
    serving.save_model(model, tmp_path / "a.safetensors")
    again = serving.load_model(tmp_path / "a.safetensors")
    x = torch.rand(3, 28, 28) * 255
    assert torch.equal(model(x), again(x)) and not again.training


def test_a_file_of_something_else_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="was not written by save_model"):
        serving.load_model(tmp_path / "b.safetensors")


def test_training_learns_the_digits():
    digits = data.digits()
    model = serving.train_reader(
        digits.train_images[:1000], digits.train_labels[:1000], sizes=(784, 32, 10), epochs=2
    )
    with torch.inference_mode():
        best = model(digits.test_images[:, 0].float()).argmax(1)
    assert (best == digits.test_labels).float().mean() > 0.6 and not model.training


def test_a_model_on_the_command_line_has_a_name():
    with pytest.raises(ValueError, match="expected NAME=FILE, got 'v1'"):
        serving.main(["--model", "v1"])


def test_at_least_one_model():
    with pytest.raises(ValueError, match="at least one model to serve"):
        serving.create_app({})


# ---- good requests


def test_an_answer_is_that_of_the_model(server):
    response = server.post("/predict", json={"pixels": IMAGE})
    assert response.status_code == 200
    expected = reader()(torch.tensor(IMAGE, dtype=torch.float32)[None])[0]
    answer = response.json()
    assert torch.allclose(torch.tensor(answer["probabilities"]), expected, rtol=1e-5, atol=1e-7)
    assert answer["digit"] == int(expected.argmax())
    assert answer["probability"] == max(answer["probabilities"])
    assert answer["version"] == "v1"


@pytest.mark.parametrize("pixel", [0, 255, 0.5, 1e-300])
def test_the_edges_of_what_is_allowed(server, pixel):
    assert server.post("/predict", json={"pixels": [[pixel] * 28] * 28}).status_code == 200


def test_requests_at_the_same_time_get_their_own_answers():
    """Through a real batcher: 40 images, a batch of 8."""
    images = [torch.rand(28, 28).mul(255).tolist() for _ in range(40)]
    app = serving.create_app({"v1": reader()}, Settings(max_batch=8, max_wait=0.01))

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as asked:
            async with app.router.lifespan_context(app):
                posts = [asked.post("/predict", json={"pixels": image}) for image in images]
                metrics = await asyncio.gather(*posts), await asked.get("/metrics")
        return metrics

    answers, metrics = asyncio.run(ask())
    with torch.inference_mode():
        expected = reader()(torch.tensor(images))
    got = torch.tensor([answer.json()["probabilities"] for answer in answers])
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7)
    assert value(metrics.text, "serving_batch_size_count") < 40
    assert value(metrics.text, "serving_batch_size_sum") == 40


# ---- bad requests: each with the words that name what is wrong


def changed(row=3, column=5, pixel=0):
    image = [list(line) for line in IMAGE]
    image[row][column] = pixel
    return image


BAD = {
    "27 rows": ({"pixels": IMAGE[:27]}, r"body.pixels: List should have at least 28 items"),
    "29 rows": ({"pixels": [*IMAGE, IMAGE[0]]}, r"body.pixels: List should have at most 28"),
    "a short row": ({"pixels": [*IMAGE[:27], [1, 2]]}, r"body.pixels[27]: List should have"),
    "flat": ({"pixels": [0.0] * 784}, "body.pixels"),
    "a batch": ({"pixels": [IMAGE]}, "body.pixels"),
    "too large": ({"pixels": changed(pixel=256)}, "body.pixels[3][5]: Input should be less than"),
    "negative": ({"pixels": changed(pixel=-1)}, "body.pixels[3][5]: Input should be greater than"),
    "a word": ({"pixels": changed(pixel="9")}, "body.pixels[3][5]: Input should be a valid number"),
    "true": ({"pixels": changed(pixel=True)}, "body.pixels[3][5]: Input should be a valid number"),
    "null": ({"pixels": changed(pixel=None)}, "body.pixels[3][5]: Input should be a valid number"),
    "a typo": ({"pixel": IMAGE}, "body.pixels: Field required"),
    "an extra": ({"pixels": IMAGE, "x": 1}, "body.x: Extra inputs are not permitted"),
    "a list": ([IMAGE], "body: Input should be a valid dictionary"),
    "a number": (7, "body: Input should be a valid dictionary"),
    "null body": (None, "body"),
}


@pytest.mark.parametrize(("body", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_body_is_named(server, body, words):
    content = json.dumps(body)
    response = server.post(
        "/predict", content=content, headers={"Content-Type": "application/json"}
    )
    status, text = detail(response)
    assert status == 422 and words in text, text
    assert len(response.content) < 600


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_a_number_that_is_not_finite_or_too_large_is_named(server, number):
    text = json.dumps({"pixels": changed(pixel=7777)}).replace("7777", number)
    response = server.post("/predict", content=text, headers={"Content-Type": "application/json"})
    status, words = detail(response)
    assert status == 422 and "body.pixels[3][5]" in words, words


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 60000, b'{"a":' * 9000, b"hello", b"\x00", b"9" * 5000],
)
def test_what_is_no_json_is_refused(server, content):
    response = server.post(
        "/predict", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (400, 422), response.text
    assert response.json()["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "image/png"])
def test_another_content_type_is_named(server, kind):
    response = server.post("/predict", content=b"{}", headers={"Content-Type": kind})
    assert detail(response) == (415, f"Content-Type: expected application/json, got {kind}")


def test_a_missing_content_type_is_named(server):
    response = server.post("/predict", content=b"{}")
    assert detail(response) == (415, "Content-Type: expected application/json, got nothing")


def test_a_content_type_with_a_charset_is_good(server):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = server.post("/predict", content=json.dumps({"pixels": IMAGE}), headers=headers)
    assert response.status_code == 200


def test_a_huge_body_is_refused_before_it_is_parsed(server):
    body = b"[" + b"0," * 100_000 + b"0]"
    response = server.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert detail(response) == (413, "body: expected at most 65536 bytes, got 200003")
    assert response.headers["connection"] == "close"


def test_a_body_without_a_length_is_counted(server):
    chunks = (b"0" * 1000 for _ in range(100))
    response = server.post("/predict", content=chunks, headers={"Content-Type": "application/json"})
    assert detail(response) == (413, "body: expected at most 65536 bytes, got more")


def test_a_body_of_exactly_the_limit_is_read(server):
    text = json.dumps({"pixels": IMAGE}).ljust(65536).encode()
    headers = {"Content-Type": "application/json"}
    assert server.post("/predict", content=text, headers=headers).status_code == 200
    assert server.post("/predict", content=text + b" ", headers=headers).status_code == 413


def gate(messages, **options):
    """What `Gate` sends for a request that arrives in `messages`; then nothing more comes."""
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(await receive())

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.sleep(10)

    async def send(message):
        sent.append(message)

    state = serving.create_app({"v1": reader()}).state
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    asyncio.run(serving.Gate(app, settings=Settings(**options), state=state)(scope, receive, send))
    return sent, passed


def test_a_body_that_does_not_come_is_not_waited_for():
    sent, passed = gate(
        [{"type": "http.request", "body": b"{", "more_body": True}], read_timeout=0.05
    )
    assert sent[0]["status"] == 408 and not passed
    assert json.loads(sent[1]["body"])["detail"] == "body: not complete after 0.05 s"


def test_a_client_that_leaves_in_the_middle_is_no_request():
    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    assert gate(parts) == ([], [])


COMPLETE = {"type": "http.request", "body": b"{}", "more_body": False}


def watched(app, *, hang_up):
    """Run `app` behind `Gate` for a complete request whose client hangs up at once, or stays."""
    messages, sent = [COMPLETE], []

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(0 if hang_up else 10)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message["type"])

    state = serving.create_app({"v1": reader()}).state
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    asyncio.run(serving.Gate(app, settings=Settings(), state=state)(scope, receive, send))
    return sent


def test_work_for_a_client_that_hangs_up_is_cancelled():
    done = []

    async def app(scope, receive, send):
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            done.append("cancelled")
            raise

    assert watched(app, hang_up=True) == [] and done == ["cancelled"]


def test_an_answer_that_has_begun_is_finished():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": b""})

    for hang_up in (False, True):
        assert watched(app, hang_up=hang_up) == ["http.response.start", "http.response.body"]


def test_the_watch_does_not_hide_an_error():
    async def app(scope, receive, send):
        raise RuntimeError("of the app")

    with pytest.raises(RuntimeError, match="of the app"):
        watched(app, hang_up=False)


def test_a_body_in_parts_arrives_whole():
    parts = [{"type": "http.request", "body": b"{", "more_body": True}]
    parts += [{"type": "http.request", "body": b"}", "more_body": False}]
    _, (message,) = gate(parts)
    assert message == {"type": "http.request", "body": b"{}", "more_body": False}


@pytest.mark.parametrize("count", [3, 4])
def test_only_the_first_problems_are_listed(count):
    errors = [{"loc": ("body", "pixels", n), "msg": "wrong"} for n in range(count)]
    expected = "body.pixels[0]: wrong; body.pixels[1]: wrong; body.pixels[2]: wrong"
    assert serving.problems(errors) == expected + ("; and 1 more" if count == 4 else "")


def test_a_long_name_is_cut(server):
    response = server.post("/predict", json={"x" * 60_000: 1})
    assert response.status_code == 422
    assert detail(response)[1].endswith(f"; body.{'x' * 30}: Extra inputs are not permitted")
    assert len(response.content) < 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=7), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(body=JSON_VALUES | st.fixed_dictionaries({"pixels": JSON_VALUES}))
def test_no_small_json_gets_through(server, body):
    """No image has fewer than 784 numbers, so each of these is a bad request."""
    content = json.dumps(body)
    response = server.post(
        "/predict", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 422, response.text
    assert response.json()["detail"]


def test_after_all_that_it_still_serves(server):
    assert server.post("/predict", json={"pixels": IMAGE}).status_code == 200
    assert server.get("/ready").status_code == 200


# ---- limits under load


def test_too_many_waiting_requests_are_told_to_come_back():
    app = serving.create_app({"v1": Slow(0.2)}, Settings(max_batch=1, max_wait=0, max_queue=2))

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as asked:
            async with app.router.lifespan_context(app):
                posts = [asked.post("/predict", json={"pixels": IMAGE}) for _ in range(6)]
                return await asyncio.gather(*posts)

    answers = asyncio.run(ask())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert [a.status_code for a in answers].count(200) == len(answers) - len(refused)
    assert refused and refused[0].headers["retry-after"] == "1"
    assert refused[0].json()["detail"] == "2 samples are waiting already; try again"


def test_no_answer_in_time():
    with client({"v1": Slow(0.4)}, timeout=0.1) as asked:
        response = asked.post("/predict", json={"pixels": IMAGE})
        assert detail(response) == (504, "no answer within 0.1 s")


def test_a_broken_model_gives_an_error_and_no_number():
    model = reader()
    model.layers[0].weight.data.fill_(math.nan)
    with client({"v1": model}) as asked:
        response = asked.post("/predict", json={"pixels": IMAGE})
        assert detail(response) == (500, "the model returned a number that is not finite")


def test_a_stopping_batcher_is_503():
    async def ask():
        batcher = serving.Batcher(reader())  # never started
        with pytest.raises(serving.HTTPException) as caught:
            await serving._row_or_status(batcher, torch.zeros(28, 28), Settings())
        return caught.value.status_code, caught.value.detail

    assert asyncio.run(ask()) == (503, "the server is stopping")


# ---- health, metrics, versions


def found(text, name, **labels):
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def value(text, name, **labels):
    number = found(text, name, **labels)
    assert number is not None, f"no {name} {labels} in {text}"
    return number


def test_metrics_count_by_version_and_status():
    with client() as asked:
        for _ in range(3):
            asked.post("/predict", json={"pixels": IMAGE})
        text = asked.get("/metrics").text
    assert value(text, "serving_requests_total", version="v1", status="200") == 3
    assert value(text, "serving_latency_seconds_count", version="v1") == 3
    assert value(text, "serving_batch_size_sum") == 3
    assert value(text, "serving_queue_length", version="v1") == 0


def test_refusals_are_counted_and_are_no_latencies():
    with client({"v1": Slow(0.2)}, max_batch=1, max_queue=1, max_wait=0) as asked:
        with ThreadPoolExecutor(6) as pool:
            posts = [pool.submit(asked.post, "/predict", json={"pixels": IMAGE}) for _ in range(6)]
        statuses = Counter(post.result().status_code for post in posts)
        text = asked.get("/metrics").text
    assert set(statuses) == {200, 429} and statuses.total() == 6
    assert value(text, "serving_requests_total", version="v1", status="429") == statuses[429]
    assert value(text, "serving_latency_seconds_count", version="v1") == statuses[200]


def test_ready_turns_to_no_and_live_stays(server):
    assert server.get("/ready").text == "ready"
    server.app.state.draining = True
    try:
        response = server.get("/ready")
        assert detail(response) == (503, "not ready: the server is starting or stopping")
        assert response.headers["connection"] == "close"
        assert server.get("/live").text == "alive"
        served = server.post("/predict", json={"pixels": IMAGE})
        assert (served.status_code, served.headers["connection"]) == (200, "close")
    finally:
        server.app.state.draining = False
    assert "connection" not in server.get("/ready").headers


def test_a_version_by_name():
    with client({"v1": reader(0), "v2": reader(1)}) as asked:
        for name in ("v1", "v2"):
            answer = asked.post(f"/predict?version={name}", json={"pixels": IMAGE}).json()
            assert answer["version"] == name
        response = asked.post("/predict?version=v3", json={"pixels": IMAGE})
        assert detail(response) == (404, "version: expected one of ['v1', 'v2'], got 'v3'")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_canary_gets_its_share_and_each_client_one_version(share):
    routing = Routing("v1", "v2", share)
    chosen = [routing.choose(f"client {n}") for n in range(4000)]
    assert chosen == [routing.choose(f"client {n}") for n in range(4000)]
    # five standard deviations of a binomial share
    assert abs(chosen.count("v2") / 4000 - share) <= 5 * math.sqrt(share * (1 - share) / 4000)


def test_a_larger_share_keeps_the_clients_of_the_canary():
    few, many = Routing("v1", "v2", 0.1), Routing("v1", "v2", 0.3)
    names = [str(n) for n in range(1000)]
    assert all(many.choose(n) == "v2" for n in names if few.choose(n) == "v2")


TOKEN = {"Authorization": "Bearer secret"}


def test_canary_and_rollback():
    with client({"v1": reader(0), "v2": reader(1)}, admin_token="secret") as asked:

        def versions():
            headers = [{"X-Client": str(n)} for n in range(40)]
            posts = [asked.post("/predict", json={"pixels": IMAGE}, headers=h) for h in headers]
            return {post.json()["version"] for post in posts}

        assert versions() == {"v1"}
        wanted = {"current": "v1", "canary": "v2", "share": 0.5}
        done = asked.put("/admin/versions", json=wanted, headers=TOKEN)
        assert done.json() == {"loaded": ["v1", "v2"], **wanted}
        assert versions() == {"v1", "v2"}
        asked.put("/admin/versions", json={"current": "v1"}, headers=TOKEN)
        assert versions() == {"v1"}
        assert asked.get("/versions").json()["canary"] is None


@pytest.mark.parametrize(
    ("wanted", "headers", "status", "words"),
    [
        ({"current": "v1"}, {}, 401, "Authorization: expected the admin's token"),
        ({"current": "v1"}, {"Authorization": "Bearer x"}, 401, "expected the admin's token"),
        ({"current": "v9"}, TOKEN, 404, "version: expected one of ['v1'], got 'v9'"),
        ({"current": "v1", "canary": "v9"}, TOKEN, 404, "got 'v9'"),
        ({"current": "v1", "share": 2}, TOKEN, 422, "body.share: Input should be less than"),
    ],
)
def test_admin_requests_that_are_refused(wanted, headers, status, words):
    with client(admin_token="secret") as asked:
        got, text = detail(asked.put("/admin/versions", json=wanted, headers=headers))
        assert got == status and words in text


def test_without_a_token_there_is_no_admin(server):
    assert server.put("/admin/versions", json={"current": "v1"}).status_code == 404


def test_the_page_is_whole(server):
    page = server.get("/").text
    assert "function center(ink, width)" in page and "[[" not in page


@pytest.mark.parametrize("in_threads", [False, True])
def test_the_bare_app_answers_as_the_model_does(in_threads):
    with TestClient(serving.bare_app(reader(), in_threads=in_threads)) as asked:
        answer = asked.post("/predict", json={"pixels": IMAGE}).json()
    expected = reader()(torch.tensor(IMAGE, dtype=torch.float32)[None])[0]
    assert answer["digit"] == int(expected.argmax())


# ---- a real process: stopped gracefully, killed


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    serving.save_model(reader(0, (784, 512, 10)), folder / "v1.safetensors")
    return {"v1": folder / "v1.safetensors"}


@pytest.fixture(scope="module")
def images():
    return torch.randint(256, (20, 28, 28)).tolist()


@pytest.fixture(scope="module")
def right(images):
    with torch.inference_mode():
        probabilities = reader(0, (784, 512, 10))(torch.tensor(images, dtype=torch.float32))
    return probabilities.argmax(1).tolist()


def start(files, *options):
    port = free_port()
    environment = {"OMP_NUM_THREADS": "1"}
    return running(serving_command(port, files, *options), port=port, environment=environment)


def wait_for(server, name, wanted, **labels):
    """Wait until a metric of the server is at least `wanted`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = httpx.get(f"{server.url}/metrics").text
        if (now := found(text, name, **labels)) is not None and now >= wanted:
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} {labels} below {wanted} for 60 s")


def wait_for_answers(server, count):
    """Wait until the server has answered so many requests, as its metrics say."""
    wait_for(server, "serving_requests_total", count, version="v1", status="200")


def test_a_graceful_stop_loses_nothing_that_was_accepted(files, images, right):
    """Under load, several times: every accepted request is answered, and the client has it."""
    for seed in range(2):
        with start(files, "--drain", "0.3") as server:
            going = serving_load.start_load(
                f"{server.url}/predict", images, rate=150, seconds=3, seed=seed
            )
            wait_for_answers(server, 100)
            server.ask_to_stop()
            with going:
                replies = serving_load.collect(going)
            server.process.wait(10)
            printed = server.printed()
        answered = [reply for reply in replies if reply.status == 200]
        assert f"stopped: accepted {len(answered)}, answered {len(answered)}" in printed
        assert all(reply.digit == right[reply.image] for reply in answered)
        assert 100 <= len(answered) < len(replies)
        assert {reply.status for reply in replies} == {200, serving_load.LOST}


def test_a_client_that_hangs_up_takes_no_place(files):
    """Its request waits for others in a batch: 499 in the metrics, and nothing is computed."""
    with start(files, "--max-wait", "30", "--timeout", "60") as server:
        body = json.dumps({"pixels": IMAGE}).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            wait_for(server, "serving_queue_length", 1, version="v1")
        wait_for(server, "serving_requests_total", 1, version="v1", status="499")
        assert value(httpx.get(f"{server.url}/metrics").text, "serving_batch_size_sum") == 0
        server.stop()
        assert "stopped: accepted 1, answered 0" in server.printed()


def test_a_killed_server_is_an_error_and_never_a_wrong_answer(files, images, right):
    with start(files) as server:
        going = serving_load.start_load(f"{server.url}/predict", images, rate=150, seconds=3)
        wait_for_answers(server, 100)
        server.kill()
        with going:
            replies = serving_load.collect(going)
    answered = [reply for reply in replies if reply.status == 200]
    assert 100 <= len(answered) < len(replies)
    assert all(reply.digit == right[reply.image] for reply in answered)
    assert {reply.status for reply in replies} == {200, serving_load.LOST}


def test_a_second_signal_leaves_at_once():
    config = serving.uvicorn.Config(serving.create_app({"v1": reader()}))
    state = config.app.state
    server = serving.DrainingServer(config, state, drain=60)
    server.handle_exit(15, None)
    assert state.draining and not asyncio.run(server.on_tick(0))
    server.handle_exit(15, None)
    assert server.should_exit


def test_the_collector_is_frozen_unless_told_otherwise(files):
    """What the process says of itself: how many objects the collector leaves alone."""
    program = (
        "import asyncio, gc, torch; from helpers import serving; "
        "models = {'v1': serving.DigitReader(784, 10, mean=0.1, std=0.3)}\n"
        "async def main(freeze):\n"
        "    app = serving.create_app(models, serving.Settings(freeze=freeze))\n"
        "    async with app.router.lifespan_context(app):\n"
        "        print(gc.get_freeze_count() > 50_000)\n"
        "asyncio.run(main(False)); asyncio.run(main(True))"
    )
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == [
        "False", "stopped:", "accepted", "0,", "answered", "0",
        "True", "stopped:", "accepted", "0,", "answered", "0",
    ]  # fmt: skip
