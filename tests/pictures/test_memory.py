import pytest
import torch
from torch import nn

from helpers.allocator import CachingAllocator
from helpers.memory import PeakMemory
from helpers.pictures import memory as pictures

MIB = 2**20


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.fixture
def step():
    """The second step of Adam, watched."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(128, 64)
    for _ in range(2):
        optimizer.zero_grad()
        with PeakMemory(model, optimizer, x) as memory:
            memory.mark("forward")
            loss = model(x).square().mean()
            memory.mark("backward")
            loss.backward()
            memory.mark("step")
            optimizer.step()
    return memory


def test_the_timeline_is_stacked_to_the_live_bytes(ax, step):
    pictures.draw_timeline(ax, step)
    (dot, *_) = [line for line in ax.lines if line.get_marker() == "o"]
    at, height = dot.get_xydata()[0]
    assert step.timeline[int(at)][1] == step.peak == pytest.approx(height * MIB)
    tallest = max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths())
    assert tallest * MIB == pytest.approx(step.peak)
    assert texts(ax) == ["forward", "backward", "step"]
    phase = max(step.phases(), key=step.phases().get)
    assert ax.get_title() == f"peak {step.peak / MIB:.1f} MiB, in {phase}"
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert set(shown) == {"parameters", "gradients", "optimizer", "activations", "other"}


def test_the_axis_can_be_fixed(ax, step):
    pictures.draw_timeline(ax, step, top=64)
    assert ax.get_ylim() == (0, 64)


def test_the_bar_is_to_scale_and_its_end_is_enlarged(ax):
    pictures.draw_bar(ax, {"allocated": 6.0, "cached": 1.0, "context": 0.5, "others": 0.5}, "GiB")
    widths = [round(patch.get_width(), 6) for patch in ax.patches]
    assert widths == [0.75, 0.125, 0.0625, 0.0625, 0.5, 0.25, 0.25]
    found = [text for text in texts(ax) if text]
    assert found == ["allocated 6.00 GiB", "cached 1.00", "context 0.50", "others 0.50"]


def test_segments_show_blocks_in_use_free_ones_and_what_is_not_reserved(ax):
    device = CachingAllocator(capacity=100 * MIB)
    keep, drop = device.malloc(3 * MIB), device.malloc(5 * MIB)
    other = device.malloc(40 * MIB)
    device.free(drop)
    names = {keep.address: "A", other.address: "B"}
    pictures.draw_segments(ax, device, names, "a title")
    found = [text for text in texts(ax) if text]
    line = "allocated 43    reserved 60    capacity 100"
    assert found == ["A  3", "17", "B  40", "40", line, "a title"]
    assert [round(patch.get_width(), 6) for patch in ax.patches] == [0.03, 0.17, 0.4, 0.4]
    assert [patch.get_linestyle() for patch in ax.patches] == ["-", "--", "-", "-"]


def test_the_calculator_is_one_output_that_repeats(monkeypatch):
    shown = []
    monkeypatch.setattr(pictures.page, "display", lambda bundle, raw: shown.append(bundle))
    pictures.calculator()
    pictures.calculator()
    assert shown[0] == shown[1]
    assert len(shown[0]["text/html"]) < 50_000
    assert (
        "optimizer=adam, attention=fused, checkpointing=none: peak 10.54 GiB>"
        in shown[0]["text/plain"]
    )
