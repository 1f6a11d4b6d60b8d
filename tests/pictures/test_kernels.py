import math

import pytest

from helpers.page import records
from helpers.pictures import kernels as pictures
from tests.page.test_records import GOOD


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    ("program", "block", "mask"),
    [(0, 4, "[1 1 1 1]"), (3, 4, "[1 0 0 0]"), (1, 8, "[1 1 1 1 1 0 0 0]")],
)
def test_a_program_and_its_mask(ax, program, block, mask):
    pictures.draw_programs(ax, program, block)
    found = texts(ax)
    assert f"mask = at < 13 = {mask}" in found
    assert f"{mask.count('1')} of {block} elements load and store" in found
    assert f"program {-(-13 // block) - 1}" in found and f"program {-(-13 // block)}" not in found


def test_a_program_outside_the_grid(ax):
    pictures.draw_programs(ax, 2, 8)
    assert "take 2 programs, 0 to 1" in texts(ax) and not any("mask" in t for t in texts(ax))


@pytest.mark.parametrize(
    ("sectors", "words"),
    [
        (
            [0, 1, 2, 3],
            ["sectors of 32 B: 4, lines of 128 B: 1", "128 B asked for, 128 B moved: 100% useful"],
        ),
        ([0, 1, 2, 3, 4], ["sectors of 32 B: 5, lines of 128 B: 2", "160 B moved: 80% useful"]),
        (range(0, 128, 4), ["sectors of 32 B: 32, lines of 128 B: 32", "1024 B moved: 12% useful"]),
    ],
)
def test_sectors(ax, sectors, words):
    pictures.draw_sectors(ax, sectors, 128)
    for word in words:
        assert any(word in text for text in texts(ax)), word


def test_occupancy_names_the_tightest_resource(ax):
    pictures.draw_occupancy(ax, {"warp slots": 16, "registers": 4, "shared memory": 13}, warps=4)
    assert "4 × 4 warps resident: occupancy 25%" in texts(ax)
    bold = [text.get_text() for text in ax.texts if text.get_weight() == "bold"]
    assert bold == ["registers"]


def test_a_resource_that_hardly_limits_stays_inside_the_figure(ax):
    pictures.draw_occupancy(ax, {"registers": 4, "shared memory": 228}, warps=4)
    assert all(text.get_position()[0] < 65 for text in ax.texts) and "228" in texts(ax)


def test_nothing_fits(ax):
    pictures.draw_occupancy(ax, {"registers": 0, "shared memory": 2}, warps=8)
    assert "0 × 8 warps resident: occupancy 0%" in texts(ax)


def test_online_softmax(ax):
    states = [(3.0, 1.5, 0.0), (5.0, 1.2, math.exp(-2))]
    pictures.draw_online(ax, [1, 3, 5, 2], states, block=2, step=2)
    assert "maximum so far  5\nsum so far  1.200\nold sum was multiplied by 0.135" in texts(ax)
    assert [line.get_ydata()[0] for line in ax.lines if line.get_color() == pictures.GREEN] == [5]


@pytest.mark.parametrize("step", [0, 1])
def test_online_softmax_before_the_second_block(ax, step):
    pictures.draw_online(ax, [1, 3, 5, 2], [(3.0, 1.5, 0.0), (5.0, 1.2, 0.1)], 2, step)
    assert any(("nothing" if step == 0 else "first block") in text for text in texts(ax))


@pytest.mark.parametrize(("order", "rows", "columns"), [("rows", 2, 4), ("groups", 3, 2)])
def test_tiles_count_the_strips(ax, order, rows, columns):
    tiles = [(k // 4, k % 4) for k in range(16)] if order == "rows" else []
    tiles = tiles or [(k % 3, k // 3) for k in range(12)]
    pictures.draw_tiles(ax, tiles, size=4, wave=6)
    found = texts(ax)
    assert f"{rows} strips of A" in found and f"+ {columns} strips of B" in found
    assert f"= {rows + columns} strips read" in found and "for 6 tiles of C" in found


def test_the_shares_have_a_point_for_each_contender_that_ran(ax):
    none = dict.fromkeys(("ours", "eager", "compile", "liger", "cudnn"))
    shares = [
        {"kernel": "layer_norm", "pass": "forward"} | none | {"ours": 0.5, "liger": 1.0},
        {"kernel": "layer_norm", "pass": "backward"} | none | {"ours": 0.25, "eager": 0.75},
        {"kernel": "matmul", "pass": "forward"} | none | {"ours": 0.75},
    ]
    record = records.Record("kernels", {**GOOD, "summary": {"shares": shares}}, {}, [])
    pictures.draw_shares(ax, record)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["layer norm, forward", "backward", "matmul, forward"]
    points = {line.get_label(): list(line.get_xdata()) for line in ax.get_lines()}
    assert points["ours"] == [50, 25, 75] and points["liger"] == [100] and "cudnn" not in points
    assert [list(line.get_xdata()) for line in ax.get_lines() if line.get_lw() == 0.8] == [
        [50, 100],  # from the slowest to the fastest
        [25, 75],
        [75, 75],
    ]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ours", "eager", "liger"]
    assert "recorded on a chip" in ax.get_title(loc="right")
