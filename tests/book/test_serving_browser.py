"""The page of `make serve` in a real browser: draw a digit, get the answer from the server."""

import re

import pytest
import torch

from helpers import data, serving
from helpers.server_process import free_port, running, serving_command

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digits = data.digits()
    model = serving.train_reader(
        digits.train_images, digits.train_labels, sizes=(784, 128, 10), epochs=4
    )
    torch.set_num_threads(threads)
    path = tmp_path_factory.mktemp("page") / "v1.safetensors"
    serving.save_model(model, path)
    port = free_port()
    with running(serving_command(port, {"v1": path}), port=port) as server:
        yield server


@pytest.fixture
def page(chromium, server):
    page = chromium.new_page(viewport={"width": 375, "height": 700})
    trouble = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text))
    page.goto(server.url)
    yield page, trouble
    page.close()


def draw_one(page):
    sheet = page.locator("#sheet").bounding_box()
    x, y = sheet["x"] + sheet["width"] / 2, sheet["y"]
    page.mouse.move(x, y + 40)
    page.mouse.down()
    for step in range(1, 21):
        page.mouse.move(x, y + 40 + 10 * step)
    page.mouse.up()


def test_a_drawn_one_is_read_by_the_server(page):
    page, trouble = page
    with page.expect_response(re.compile("predict")) as got:
        draw_one(page)
    answer = got.value.json()
    assert got.value.status == 200 and answer["digit"] == 1
    page.wait_for_function("document.getElementById('digit').textContent === '1'")
    assert "v1" in page.locator("#words").inner_text()
    page.locator("#clear").click()
    assert page.locator("#digit").inner_text() == ""
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert trouble == []


def test_a_server_that_is_gone_is_said(page):
    page, _ = page
    page.route("**/predict", lambda route: route.abort())
    draw_one(page)
    page.wait_for_function("document.getElementById('words').textContent.startsWith('no answer')")


def test_a_refused_request_shows_the_server_s_words(page):
    page, _ = page
    body = '{"detail": "256 samples are waiting already; try again"}'
    page.route(
        "**/predict",
        lambda route: route.fulfill(status=429, content_type="application/json", body=body),
    )
    draw_one(page)
    page.wait_for_function("document.getElementById('words').textContent.startsWith('429: 256')")
