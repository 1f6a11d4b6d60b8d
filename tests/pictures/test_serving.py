"""What the pictures of chapter 18 show is what they were given."""

from helpers.pictures import serving as pictures


def test_a_curve_and_its_share(ax):
    pictures.draw_curve(ax, {1: (4, 5, 6), 32: (15, 16, 20)})
    whole, each = ax.lines[0], ax.lines[-1]
    assert list(whole.get_ydata()) == [5, 16] and list(each.get_ydata()) == [5, 0.5]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "32"]


def test_requests_end_at_their_answers(ax):
    pictures.draw_requests(
        ax, [0.0, 0.01, 0.5], [0.02, 0.01, 0.1], [2, 1], until=0.1, title="two shown"
    )
    lines, ends = ax.collections
    assert [part[:, 0].tolist() for part in lines.get_segments()] == [[0, 20], [10, 20]]
    assert (lines.get_color()[0] == lines.get_color()[1]).all()
    assert ends.get_offsets().tolist() == [[20, 0], [20, 1]]
    assert ax.get_title() == "two shown"


def test_rates_in_ascending_order(ax):
    pictures.draw_rates(ax, {"own": [(100, 9.0), (50, 5.0)]}, limit=100)
    assert list(ax.lines[0].get_xdata()) == [50, 100] and list(ax.lines[0].get_ydata()) == [5, 9]
    assert ax.get_legend().get_texts()[0].get_text() == "own"


def test_no_two_of_eight_lines_look_alike(ax):
    pictures.draw_rates(ax, {str(n): [(100, 9.0 + n), (50, 5.0)] for n in range(8)}, limit=100)
    lines = ax.lines[:8]  # the last one is the limit
    assert len({line.get_color() for line in lines}) == len(lines) == 8
