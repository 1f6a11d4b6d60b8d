"""The drawing pad in a real browser: the same numbers as PyTorch, and a pad that can be used."""

import base64
import math
import re

import pytest
import torch
from torch import nn

from helpers import data, mnist, models
from helpers.page import drawing

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def digits():
    return data.digits()


@pytest.fixture(scope="module")
def model(digits):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # 0.6 s; on a busy machine threads that wait for each other take 20 s
    trained = mnist.train(digits, mnist.Recipe(epochs=1, batch_size=50, width=8), seed=0)
    torch.set_num_threads(threads)
    return trained


@pytest.fixture
def html(monkeypatch):
    """The text/html that `pad` shows."""
    shown = []
    monkeypatch.setattr(drawing, "display", lambda bundle, raw: shown.append(bundle["text/html"]))

    def make(*args):
        drawing.pad(*args, mean=data.MEAN, std=data.STD)
        return shown.pop()

    return make


PREDICT = "(images) => images.map((i) => document.querySelector('.digit-pad').pad.predict(i))"
CENTER = """([base64, width]) => {
    const drawing = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    return Array.from(document.querySelector('.digit-pad').pad.center(drawing, width) || []);
}"""


def centered(page, drawn):
    """What the script makes of a drawing uint8 [N, N]: 784 gray values, or [] of no ink."""
    packed = base64.b64encode(drawn.numpy().tobytes()).decode()
    return page.evaluate(CENTER, [packed, drawn.shape[1]])


def predictions(page, images):
    return torch.tensor(page.evaluate(PREDICT, images.flatten(1).tolist()))


def numbers(page, nth=0):
    """What the bars say, in percent."""
    texts = page.locator(".digit-pad").nth(nth).locator(".digit-pad__bar > :last-child")
    return [int(text.removesuffix("%")) for text in texts.all_inner_texts()]


def best(page, nth=0):
    return page.locator(".digit-pad__best").nth(nth).inner_text()


def draw(page, points, nth=0):
    """Draw a line through `points`, given in hundredths of the sheet."""
    sheet = page.locator(".digit-pad__sheet canvas").nth(nth)
    sheet.scroll_into_view_if_needed()
    frame = sheet.bounding_box()
    place = [(frame["x"] + x * frame["width"] / 100, frame["y"] + y * frame["height"] / 100)
             for x, y in points]  # fmt: skip
    page.mouse.move(*place[0])
    page.mouse.down()
    for point in place[1:]:
        page.mouse.move(*point, steps=8)
    page.mouse.up()
    settle(page)


def settle(page):
    page.evaluate(
        "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
    )


def test_probabilities_are_those_of_the_model(open_page, html, model, digits):
    page = open_page(html(model))
    images = digits.test_images[:100]
    expected, got = mnist.predict(model, images), predictions(page, images)
    assert (got - expected).abs().max() < 0.01
    assert (got.argmax(1) == expected.argmax(1)).all()
    assert (got.argmax(1) == digits.test_labels[:100]).float().mean() > 0.8  # it has learned


@pytest.mark.parametrize(
    "layers",
    [
        lambda: models.ConvNet(width=5),
        lambda: nn.Sequential(nn.Flatten(), *models.MLP(784, 30, 10)),
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, (5, 3), stride=(3, 2), padding=(0, 1)),
            nn.ReLU(),
            nn.Dropout2d(),
            nn.Conv2d(3, 4, 2, bias=False),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(4 * 7 * 13, 10, bias=False),
        ),
    ],
    ids=["ConvNet", "MLP", "uneven"],
)
def test_the_script_follows_the_layers(open_page, html, digits, layers):
    model = layers()
    page = open_page(html(model))
    images = digits.test_images[:10]
    got = predictions(page, images)
    assert (got - mnist.predict(model, images)).abs().max() < 0.01


def stroke(*points, width=11.0, side=280):
    """White line through (y, x) points on black, with a soft edge: uint8 [side, side]."""
    y, x = torch.meshgrid(*[torch.arange(side) + 0.5] * 2, indexing="ij")
    ink = torch.zeros(side, side)
    for (y0, x0), (y1, x1) in zip(points, points[1:], strict=False):
        dy, dx = y1 - y0, x1 - x0
        along = (((y - y0) * dy + (x - x0) * dx) / (dy**2 + dx**2 or 1)).clamp(0, 1)
        distance = ((y - y0 - along * dy) ** 2 + (x - x0 - along * dx) ** 2).sqrt()
        ink = torch.maximum(ink, (width + 0.5 - distance).clamp(0, 1))
    return (255 * ink).to(torch.uint8)


STROKES = {
    "slanted line": stroke((30, 190.3), (250, 111.7)),
    "seven": stroke((60, 70.5), (52.4, 210), (240, 130)),
    "two": stroke(*[(90 - 50 * math.sin(a), 140 - 60 * math.cos(a)) for a in (0.2, 1, 2, 3)],
                  (230, 60), (225, 220)),
    "in the corner": stroke((3, 2), (70, 40), (35, 47)),
    "out of the sheet": stroke((-20, 100), (140, 190), (300, 80)),
    "flat": stroke((140, 10), (151, 263)),
    "smaller than the box": stroke((140, 139), (146, 142), width=2),
    "tap": stroke((91.3, 77.8), (91.3, 77.8)),
}  # fmt: skip


def test_centring_is_that_of_mnist_center(open_page, html):
    page = open_page(html(models.ConvNet(width=2)))
    for name, drawn in STROKES.items():
        got = torch.tensor(centered(page, drawn)).view(28, 28)
        difference = (got - mnist.center(drawn)[0, 0].int()).abs().max()
        assert difference <= 1, name  # float64 against float32, then rounded to a gray level


def test_nothing_drawn_has_no_center(open_page, html):
    page = open_page(html(models.ConvNet(width=2)))
    assert centered(page, torch.zeros(280, 280, dtype=torch.uint8)) == []


def test_the_example_and_its_prediction_stand_there_first(open_page, html, model, digits):
    index = int(mnist.predict(model, digits.test_images[:50]).max(1).values.argmax())
    page = open_page(html(model, digits.test_images[index]))
    assert best(page) == str(int(mnist.predict(model, digits.test_images[[index]]).argmax()))
    assert sum(numbers(page)) in range(95, 106)
    pixels = page.evaluate(
        """() => { const seen = document.querySelector('.digit-pad__seen canvas');
        return Array.from(seen.getContext('2d').getImageData(0, 0, 28, 28).data)
            .filter((_, i) => i % 4 === 0) }"""
    )
    assert pixels == digits.test_images[index].flatten().tolist()


def test_a_line_drawn_with_the_mouse_is_read(open_page, html, model, digits):
    page = open_page(html(model, digits.test_images[0]))
    before = numbers(page)
    draw(page, [(50, 15), (48, 85)])
    assert best(page) == "1"
    assert numbers(page) != before
    assert numbers(page)[1] == max(numbers(page))
    lit = page.evaluate(
        """() => { const sheet = document.querySelector('.digit-pad__sheet canvas');
        return sheet.getContext('2d').getImageData(0, 0, 280, 280).data
            .filter((v, i) => i % 4 === 0 && v > 127).length }"""
    )
    assert 22 * 180 < lit < 22 * 240  # the line alone: the example went with the first stroke


def test_clear_empties_by_mouse_and_by_keyboard(open_page, html, model):
    page = open_page(html(model))
    for press in (
        lambda button: button.click(),
        lambda button: (button.focus(), page.keyboard.press("Enter")),
    ):
        draw(page, [(50, 15), (48, 85)])
        assert best(page) == "1"
        press(page.get_by_role("button"))
        settle(page)
        assert best(page) == ""
        assert numbers(page) == [0] * 10


def test_a_finger_draws_and_does_not_scroll(open_page, html, model):
    page = open_page(html(model), has_touch=True, viewport={"width": 375, "height": 667})
    sheet = page.locator(".digit-pad__sheet canvas")
    sheet.tap()
    settle(page)
    assert best(page) != ""
    assert sheet.evaluate("(e) => getComputedStyle(e).touchAction") == "none"


def test_other_buttons_and_a_second_finger_draw_nothing(open_page, html):
    page = open_page(html(models.ConvNet(width=2)))
    page.locator(".digit-pad__sheet canvas").click(button="right")
    page.locator(".digit-pad__sheet canvas").dispatch_event("pointerdown", {"isPrimary": False})
    settle(page)
    assert best(page) == ""


def test_two_pads_do_not_meet(open_page, html, model, digits):
    other = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with torch.no_grad():
        other[1].weight.zero_()
        other[1].bias.copy_(9.0 * (torch.arange(10) == 3))
    page = open_page(html(model, digits.test_images[0]) + html(other))
    first = numbers(page)
    draw(page, [(50, 15), (48, 85)], nth=1)
    assert (numbers(page), best(page, 1)) == (first, "3")
    draw(page, [(50, 15), (48, 85)], nth=0)
    assert (best(page, 0), best(page, 1)) == ("1", "3")
    page.get_by_role("button").nth(1).click()
    settle(page)
    assert (best(page, 0), best(page, 1)) == ("1", "")


def test_no_name_leaks(open_page, html):
    names = "() => Object.getOwnPropertyNames(window)"
    empty = open_page("").evaluate(names)
    assert set(open_page(html(models.ConvNet(width=2))).evaluate(names)) == set(empty)


def test_the_script_finds_its_pad_where_the_page_moved_it(open_page, html):
    """Classic notebooks run the script from <head>; JupyterLab replaces it in its place."""
    body = html(models.ConvNet(width=2))
    markup, script = re.search(r"(.*)<script>(.*)</script>", body, re.DOTALL).groups()
    page = open_page(markup)
    page.add_script_tag(content=script)
    draw(page, [(50, 15), (48, 85)])
    assert best(page) != ""


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize(("paper", "ink"), [("#ffffff", "#222222"), ("#121212", "#eeeeee")])
def test_accessible_in_both_languages_and_themes(open_page, html, digits, language, paper, ink):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    other = "en" if language == "zh" else "zh"
    body = html(models.ConvNet(width=2), digits.test_images[0])
    body = re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", body)
    page = open_page(body, f"body {{ background: {paper}; color: {ink} }}")
    label = page.locator(".digit-pad__sheet canvas").get_attribute("aria-label")
    assert bool(re.search("[一-鿿]", label)) == (language == "zh")
    violations = axe.run(page).response["violations"]
    assert [v["id"] for v in violations] == []
    bar = page.locator(".digit-pad__track > span").first
    assert bar.evaluate("(e) => getComputedStyle(e).backgroundColor") == page.evaluate(
        "() => getComputedStyle(document.body).color"
    )


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_it_fits_the_window(open_page, html, width):
    page = open_page(html(models.ConvNet(width=2)), viewport={"width": width, "height": 700})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.locator(".digit-pad__sheet canvas").bounding_box()["width"] >= 250
    assert page.get_by_role("button").bounding_box()["height"] >= 44
