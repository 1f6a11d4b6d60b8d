import math

import pytest

from helpers import layers
from helpers.pictures import models as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_the_model_is_drawn_part_by_part(ax):
    parts = [("0  Conv2d", (4, 14, 14), 400, 3136), ("1  Linear", (10,), 10250, 10)]
    pictures.draw_parts(ax, parts)
    found = texts(ax)
    for words in ("0  Conv2d", "4 × 14 × 14", "400", "3,136", "1  Linear", "10", "10,250"):
        assert words in found
    widths = [round(bar.get_width(), 3) for bar in ax.patches]
    assert widths == [round(1.8 * 400 / 10250, 3), 1.8, 1.8, round(1.8 * 10 / 3136, 3)]


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_the_convolution_states_its_size_and_what_it_does_not_read(ax, kernel, stride, padding):
    pictures.draw_conv(ax, kernel, stride, padding)
    size = layers.conv_size(7, kernel, stride, padding)
    found = texts(ax)
    assert f"output {size}" in found and f"input 7, padded {7 + 2 * padding}" in found
    assert f"⌊(7 + 2·{padding} − {kernel}) / {stride}⌋ + 1 = {size}" in found
    read = {i * stride + j for i in range(size) for j in range(kernel)}
    unread = 7 + 2 * padding - len(read)
    assert (f"rows and columns not read: {unread}" in found) == (unread > 0)


def test_the_signal_has_both_ends_in_its_title(ax):
    pictures.draw_signal(ax, [1.0, 1e-3, 1e-20], [0.0, 1e4, 1.0])
    assert ax.get_title() == "last activations 1e-20, first gradients 0"
    forward, backward = (line.get_ydata() for line in ax.get_lines())
    assert math.isclose(forward[1], -3) and backward[0] == -12.3 and forward[2] == -12.3
