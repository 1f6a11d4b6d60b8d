import numpy as np
import torch

from helpers.pictures import gradients as pictures


def test_one_line_for_each_network_on_the_even_layers(ax):
    pictures.draw_sizes(ax, {"Sigmoid": [1e-8, 1e-4, 1e-2], "Tanh": [1e-3, 1e-3, 2e-3]})
    first, second = ax.lines
    assert first.get_xdata().tolist() == [0, 2, 4] and ax.get_yscale() == "log"
    assert second.get_ydata().tolist() == [1e-3, 1e-3, 2e-3]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["Sigmoid", "Tanh"]


def test_the_staircase_and_its_surrogate(ax):
    x = torch.linspace(-1, 1, 9)
    pictures.draw_staircase(ax, x, {"stairs": x.round(), "clamp": x.clamp(-0.5, 0.5)})
    stairs, line = ax.lines
    assert np.array_equal(stairs.get_ydata(), x.round().numpy())
    assert np.array_equal(line.get_ydata(), x.clamp(-0.5, 0.5).numpy())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["stairs", "clamp"]


def test_an_attack_shows_the_difference_and_both_distributions(ax):
    image, attacked = torch.rand(28, 28), torch.rand(28, 28)
    before, after = torch.eye(10)[3], torch.full((10,), 0.1)
    pictures.draw_attack(ax, image, attacked, before, after, "a title")
    *panels, bars = ax.child_axes
    shown = [panel.images[0].get_array() for panel in panels]
    assert np.array_equal(shown[1], (attacked - image).numpy())
    assert np.array_equal(shown[0], image.numpy()) and np.array_equal(shown[2], attacked.numpy())
    assert [bar.get_height() for bar in bars.patches[:10]] == before.tolist()
    assert np.allclose([bar.get_height() for bar in bars.patches[10:]], 0.1)
    assert ax.get_title() == "a title" and {"+", "="} <= {t.get_text() for t in ax.texts}
