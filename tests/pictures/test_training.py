import matplotlib.pyplot as plt
import pytest
import torch

from helpers.pictures import training as pictures


def test_one_update_tells_what_each_step_did():
    seen = pictures.watch_one_update()
    assert list(seen) == list(pictures.STEPS)
    graph, loss, gradients, weights, momentum = zip(*seen.values(), strict=True)
    saved = [int(text.split()[0]) for text in graph[1:3]]
    assert 0 < saved[0] < saved[1] and set(graph[3:]) == {"freed"}
    assert loss[1] == "–" and len(set(loss[2:])) == 1
    assert gradients[2] == gradients[5] == "None" and gradients[3].startswith("norm")
    assert weights[3] == "as they were" and weights[4].startswith("moved")
    assert momentum[3] == "none yet" and momentum[4] == gradients[4]  # the first velocity is g


@pytest.mark.parametrize("after", pictures.STEPS)
def test_five_steps_mark_the_current_one(ax, after):
    pictures.draw_five_steps(ax, after)
    blue = [
        p for p in ax.patches if p.get_facecolor()[:3] == pytest.approx((0, 0.447, 0.698), abs=1e-2)
    ]
    assert len(ax.patches) == 5 and len(blue) == (after != "start")
    orange = [t for t in ax.texts if t.get_color() == pictures.ORANGE]
    assert len(orange) == {"start": 0, "loss": 2, "backward": 2, "step": 2}.get(after, 1)


def test_valley_is_lowest_at_one_one_and_batches():
    p = torch.rand(3, 4, 2, dtype=torch.float64)
    assert pictures.valley(p).shape == (3, 4) and (pictures.valley(p) > 0).all()
    assert pictures.valley(torch.ones(2)) == 0


@pytest.mark.parametrize("name", pictures.OPTIMIZERS)
def test_every_optimizer_descends_at_some_rate(name):
    ends = [
        pictures.valley(pictures.descend(name, lr)[-1]).item() for lr in (0.001, 0.01, 0.1, 1.0)
    ]
    assert min(ends) < 3 < pictures.valley(pictures.descend(name, 0.1, steps=0)[0])


def test_plain_sgd_takes_the_step_of_its_formula():
    path = pictures.descend("SGD", 0.001, steps=1)
    p = path[0].clone().requires_grad_()
    pictures.valley(p).backward()
    assert torch.equal(path[1], path[0] - 0.001 * p.grad)


def test_a_lost_path_stops_and_says_so(ax):
    pictures.draw_descent(ax, "SGD", 1.0)
    assert ax.get_title().startswith("lost after ")
    assert len(pictures.descend("SGD", 1.0)) < 20


def test_a_good_path_shows_its_loss(ax):
    pictures.draw_descent(ax, "LBFGS", 1.0)
    assert float(ax.get_title().split()[1]) < 1e-6


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


@pytest.mark.parametrize(("angle", "turned"), [(0, 0), (30, 15), (45, 0), (90, 0)])
def test_clipping_by_value_turns_the_gradient(ax, angle, turned):
    pictures.draw_clip(ax, angle)
    assert f"turned {turned}°" in ax.get_title()
