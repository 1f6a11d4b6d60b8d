import pytest

from helpers.pictures import compilation as pictures


def texts(ax):
    return [text.get_text() for text in ax.texts]


COLUMNS = {
    "dynamo": [["matmul", "sum_1"]],
    "split": [["mm"], ["threshold_backward", "mm_1"]],
    "kernels": [["extern_kernels.mm"], ["cpp_fused_cos_expand_mul_relu_sin_threshold_backward_0"]],
    "nothing": [[]],
}


@pytest.mark.parametrize("stage", list(COLUMNS))
def test_a_stage_shows_every_operation_whole(ax, stage):
    pictures.draw_stage(ax, COLUMNS, stage)
    found = [text.replace("\n", "") for text in texts(ax)]
    for name in sum(COLUMNS[stage], []):
        assert name in found
    assert ("backward" in found) == (len(COLUMNS[stage]) == 2)
    assert all(len(line) <= 28 for text in texts(ax) for line in text.split("\n"))


def row(name, cold, warm, eager, compiled):
    times = {"eager": [eager] * 3, "compiled": [compiled] * 3}
    return {"workload": name, "cold": cold, "warm": warm} | times


def test_the_total_is_compile_time_plus_calls(ax):
    rows = [row("fast", 9.0, 1.0, 2.0, 1.0), row("slow", 9.0, 1.0, 1.0, 2.0)]
    pictures.draw_total(ax, rows, 1000)
    assert texts(ax) == ["5.00×", "1.00×", "11×", "3.00×"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fast", "slow"]
    assert ax.get_title(loc="left") == "after 1,000 calls"


def test_in_the_long_run_only_the_ratio_counts(ax):
    pictures.draw_total(ax, [row("fast", 9.0, 1.0, 2.0, 1.0)], 10**9)
    assert texts(ax) == ["0.50×", "0.50×"]
    bars = [patch.get_facecolor() for patch in ax.patches]
    assert bars[0][:3] == bars[1][:3] and bars[0][2] > bars[0][0]  # blue: it has paid
