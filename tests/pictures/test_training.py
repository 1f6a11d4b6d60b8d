import matplotlib.pyplot as plt
import pytest
import torch

from helpers.pictures import draw
from helpers.pictures import training as pictures

NAMES = ["graph", "loss", "gradients", "weights", "momentum"]


@pytest.fixture
def seen():
    """At each of the five steps one more of the five texts changes."""
    stages = ["start", *pictures.CODE]
    return {
        stage: {name: f"{name} {int(k < at)}" for k, name in enumerate(NAMES)}
        for at, stage in enumerate(stages)
    }


def faces(ax):
    return [tuple(round(v, 2) for v in patch.get_facecolor()[:3]) for patch in ax.patches]


@pytest.mark.parametrize("after", ["start", *pictures.CODE])
def test_five_steps_mark_the_current_one_and_what_it_changed(ax, seen, after):
    pictures.draw_five_steps(ax, seen, after)
    at = list(seen).index(after)
    blue, pale, white = (0.0, 0.45, 0.7), (0.83, 0.9, 0.95), (1.0, 1.0, 1.0)
    current = [] if after == "start" else [blue]
    done = [pale] * max(at - 1, 0)
    assert faces(ax) == done + current + [white] * (5 - len(done) - len(current))
    orange = [t.get_text() for t in ax.texts if t.get_color() == draw.ORANGE]
    assert orange == ([] if after == "start" else [f"{NAMES[at - 1]} 1"])


def bowl(p):
    return ((p - 1) ** 2).sum(-1)


def test_a_lost_path_says_so(ax):
    pictures.draw_descent(ax, bowl, torch.tensor([[0.0, 0.0], [9.0, 9.0], [5e3, 1.0]]))
    assert ax.get_title() == "lost after 2 steps"
    x, y = ax.lines[0].get_data()
    assert max(abs(v) for v in [*x, *y]) <= 3  # it stays near the picture


def test_a_good_path_shows_its_loss_and_begins_and_ends_where_it_should(ax):
    path = torch.tensor([[-1.0, 0.0], [0.0, 0.5], [1.0, 1.0]])
    pictures.draw_descent(ax, bowl, path)
    assert ax.get_title() == "loss 0e+00"
    line, _, start, star, end = [torch.tensor(line.get_xydata()) for line in ax.lines]
    assert torch.equal(line.float(), path)
    assert start.tolist() == [[-1.0, 0.0]] and star.tolist() == end.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("behind", [True, False])
def test_panels(behind):
    lines = {"rate": [1.0, 0.5]} | ({} if behind else {"valid": [2.0, 1.0]})
    panels = {name: lines for name in ("a", "b", "c", "d", "e", "f, log scale")}
    pictures.draw_panels(panels, {"b": [2.0, 1.0]} if behind else {}, x="x", y="y")
    axes = plt.gcf().axes
    plt.close()
    assert [ax.get_title() for ax in axes[:6]] == list(panels)
    assert len(axes) == (7 if behind else 6)
    assert axes[5].get_yscale() == "log" and axes[0].get_ylim()[0] == 0
    assert (axes[0].get_legend() is None) == behind


@pytest.mark.parametrize(
    ("gradient", "by_value", "title"),
    [
        ([2.5, 0.0], [1.0, 0.0], "by value: turned 0°, length 1.0"),
        ([2.0, 1.0], [1.0, 1.0], "by value: turned 18°, length 1.4"),  # 45° - atan(1/2)
    ],
)
def test_clipping_by_value_turns_the_gradient(ax, gradient, by_value, title):
    gradient, by_value = torch.tensor(gradient), torch.tensor(by_value)
    pictures.draw_clip(ax, gradient, by_value, gradient / gradient.norm())
    assert ax.get_title() == title
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "gradient",
        "by value",
        "by norm",
    ]
    tips = [tuple(a.xy) for a in ax.texts]
    assert tips[:2] == [tuple(gradient.tolist()), tuple(by_value.tolist())]
