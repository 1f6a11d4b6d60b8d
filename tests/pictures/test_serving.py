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
