from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from helpers.pictures import precision as pictures
from helpers.pictures.draw import PURPOSES
from helpers.precision import FORMATS


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_each_format_has_its_bits(ax):
    pictures.draw_layouts(ax, list(FORMATS))
    assert set(FORMATS) <= set(texts(ax))
    assert "1 + 8 + 23" in texts(ax) and "1 + 4 + 3" in texts(ax)
    assert len(ax.patches) == sum(f.bits for f in FORMATS.values())


def test_only_the_formats_asked_for_are_drawn(ax):
    pictures.draw_layouts(ax, ["fp16"])
    assert "bf16" not in texts(ax) and len(ax.patches) == 16


def test_the_ranges_end_at_the_largest_number(ax):
    pictures.draw_ranges(ax, list(FORMATS))
    normal, subnormal = ax.patches[::2], ax.patches[1::2]
    for number_format, wide, narrow in zip(FORMATS.values(), normal, subnormal, strict=True):
        assert 2.0 ** wide.get_x() == number_format.smallest_normal
        assert 2.0 ** narrow.get_x() == number_format.smallest_subnormal
        assert narrow.get_x() + narrow.get_width() == wide.get_x()
    fp16 = normal[list(FORMATS).index("fp16")]
    assert fp16.get_x() + fp16.get_width() == 16


SHARES = {-30: 0.25, -20: 0.5, 0: 0.25}


@pytest.mark.parametrize(
    ("power", "lost", "subnormal", "infinite"),
    [(0, "25.0%", "50.0%", "0.0%"), (8, "0.0%", "25.0%", "0.0%"), (16, "0.0%", "0.0%", "25.0%")],
)
def test_the_title_says_what_becomes_of_the_numbers(ax, power, lost, subnormal, infinite):
    pictures.draw_fate(ax, SHARES, power)
    title = ax.get_title()
    assert f"= 0: {lost}" in title and f"subnormal: {subnormal}" in title
    assert f"inf: {infinite}" in title and f"2^{{{power}}}" in title


def step(parameters, activations, peak):
    """A `Breakdown` of which only the numbers to be drawn matter."""
    return SimpleNamespace(
        parameters=parameters, gradients=0, optimizer=0, activations=activations, peak=peak
    )


def test_the_bars_of_a_step_and_its_peak(ax):
    steps = {
        "fp32": [step(1e6, 3e6, peak=5e6), step(2e6, 6e6, peak=8e6)],
        "bf16": [step(1e6, 2e6, peak=5e6), step(2e6, 4e6, peak=4e6)],
    }
    pictures.draw_step_memory(ax, [8, 16], steps, 16)
    assert texts(ax) == ["  8.0", "  4.0"]
    assert [set(line.get_xdata()) for line in ax.lines] == [{8.0}, {4.0}]
    assert max(bar.get_x() + bar.get_width() for bar in ax.patches) == 8.0
    assert ax.get_title() == "batch 16:  peak −50%"
    legend = {t.get_text() for t in ax.get_legend().get_texts()}
    assert legend == {*pictures.STEP_PARTS, "peak"}
    faces = [to_hex(bar.get_facecolor()).upper() for bar in ax.patches]
    assert faces == 2 * [PURPOSES[name].upper() for name in pictures.STEP_PARTS]
    right = ax.get_xlim()
    ax.clear()
    pictures.draw_step_memory(ax, [8, 16], steps, 8)
    assert ax.get_xlim() == right  # whatever the batch
