import re
from types import ModuleType

import pytest
import torch

from helpers import environment
from helpers.pictures import environment as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("line", pictures.LINES)
def test_each_line_lights_its_boxes(ax, line):
    pictures.draw_layers(ax, line)
    boxes = {name for names in pictures.LAYERS.values() for name in names}
    assert pictures.LINES[line] and pictures.LINES[line] <= boxes
    assert boxes | {line} <= set(texts(ax))
    lit = {t.get_text() for t in ax.texts if t.get_color() == "white"}
    assert lit == pictures.LINES[line]


def test_the_core_is_in_torch():
    modules = {"optim": torch.optim, "data": torch.utils.data, "distributed": torch.distributed}
    names = set(pictures.LAYERS["core: Python"]) - {"compile"}
    assert all(isinstance(modules.get(n, getattr(torch, n, None)), ModuleType) for n in names)
    assert callable(torch.compile)


@pytest.mark.parametrize("driver", ["449.0", "470.57.02", "535.113.01", "580.65.06"])
def test_the_wheels_say_what_runs(ax, driver):
    releases = {"2.14": ["12.6", "13.0"], "2.7": ["11.8", "12.6"]}
    pictures.draw_wheels(ax, driver, releases)
    found = texts(ax)
    wheels = [cuda for wheels in releases.values() for cuda in wheels]
    assert found.count("runs") == sum(environment.driver_starts(driver, cuda) for cuda in wheels)
    assert found.count("runs") + found.count("too new") == len(wheels)
    shown = environment.newest_cuda(driver)
    assert any(re.match(f"driver {driver}: .*CUDA {shown or '11.x or older'}", t) for t in found)
