import base64
import re

import matplotlib.pyplot as plt
import pytest

from helpers.page import figures


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(figures, "display", lambda bundle, raw: outputs.append(bundle))
    yield outputs
    plt.close("all")


def draw(ax, power, scale=1.0):
    ax.plot([scale * x**power for x in range(4)])
    ax.set_title(f"{power} {scale}")


def test_one_bundle_with_every_form(shown):
    figures.explore(draw, power=[1, 2, 3], scale=[0.5, 2.0])
    (bundle,) = shown
    assert set(bundle) == {
        "text/plain",
        "text/html",
        "image/png",
        "application/vnd.jupyter.widget-view+json",
    }
    assert bundle["text/plain"] == "<interactive figure: power = 1, 2, 3; scale = 0.5, 2>"
    html = bundle["text/html"]
    assert html.count('type="range"') == 2 and 'max="2"' in html and 'max="1"' in html
    assert len(set(re.findall(r"data:image/svg\+xml;base64,[\w+/=]+", html))) == 6
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert len(html) < 150_000


def test_the_same_bytes_every_time(shown):
    figures.explore(draw, power=[1, 2])
    figures.explore(draw, power=[1, 2])
    assert shown[0]["text/html"] == shown[1]["text/html"]


def test_last_bits_do_not_show(shown):
    def noisy(ax, k):
        ax.plot([0, 1 / 3 + k * 1e-7, 1])

    figures.explore(noisy, k=[0, 1])
    first, second = re.search(r"F = \[(.*?)\]", shown[0]["text/html"])[1].split(", ")
    assert first == second


def test_frames_belong_to_their_values(shown):
    """Frame k of the page is the k-th combination, the last slider running fastest."""
    seen = []
    figures.explore(lambda ax, a, b: seen.append((a, b)), a=[1, 2], b=["x", "y", "z"])
    assert seen[:6] == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]


def test_the_live_widget_follows_its_sliders(shown, monkeypatch):
    made = []
    box = figures.ipywidgets.VBox
    monkeypatch.setattr(figures.ipywidgets, "VBox", lambda c: made.append(c) or box(c))
    figures.explore(draw, power=[1, 2], scale=[1.0, 3.0])
    power, scale, picture = made[0]
    before = picture.value
    scale.value = 1
    assert picture.value != before
    power.value, scale.value = 0, 0
    assert picture.value == before


@pytest.mark.parametrize(
    ("values", "count"), [({"k": [1]}, 1), ({"a": range(7), "b": range(6)}, 42)]
)
def test_number_of_frames(values, count):
    with pytest.raises(ValueError, match=f"expected 2 to 40 frames, got {count}"):
        figures.explore(draw, **values)
