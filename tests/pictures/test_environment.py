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


def test_the_chain_shows_sizes_where_something_is_installed(ax):
    pictures.draw_chain(ax, {"torch": 1000.4, "cuDNN": 800, "NCCL": 200, "CUDA runtime": 0})
    found = texts(ax)
    assert found.count("torch\n1,000 MB here") == 2
    assert "cuBLAS, cuDNN, NCCL, Triton\n1,000 MB here" in found
    assert "CUDA runtime" in found  # nothing there, nothing said
    assert not any("MKL" in text and "MB" in text for text in found)


@pytest.mark.parametrize("driver", ["449.0", "470.57.02", "535.113.01", "580.65.06"])
def test_the_wheels_say_what_runs(ax, driver):
    releases = {"2.14": ["12.6", "13.0"], "2.7": ["11.8", "12.6"]}
    pictures.draw_wheels(ax, driver, releases)
    found = texts(ax)
    wheels = [cuda for wheels in releases.values() for cuda in wheels]
    assert found.count("runs") == sum(environment.runs(driver, cuda) for cuda in wheels)
    assert found.count("runs") + found.count("too new") == len(wheels)
    shown = environment.newest_cuda(driver)
    assert any(re.match(f"driver {driver}: .*CUDA {shown or '11.x or older'}", t) for t in found)


def test_a_table_has_its_head_and_rows():
    html = pictures.table(("a", "b"), [(1, '<a href="x">y</a>'), (2, "")]).data
    assert html.count("<tr>") == 3 and html.count("<th>") == 2 and html.count("<td>") == 4
    assert '<td><a href="x">y</a></td>' in html
