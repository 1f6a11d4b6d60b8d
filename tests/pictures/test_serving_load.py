"""What the pictures of chapter 18 on load show is what they were given."""

from helpers.pictures import serving_load as pictures


def test_both_clients_see_the_pause(ax):
    pictures.draw_pause(ax, 0.5, [0.1, 1.0, 0.1], [0.1, 1.0, 0.6])
    timetable, waiting = ax.lines
    assert list(waiting.get_xdata()) == list(timetable.get_xdata()) == [0, 0.5, 1.0]
    assert list(waiting.get_ydata()) == [0.1, 1.0, 0.1]
    assert list(timetable.get_ydata()) == [0.1, 1.0, 0.6]
    assert waiting.get_color() != timetable.get_color()


def test_latencies_up_to_the_limit(ax):
    pictures.draw_rise(ax, {"p50": [(20, 6.0), (10, 5.0)], "p99": [(10, 9.0), (20, 30.0)]}, 25)
    p50, p99, limit = ax.lines
    assert list(p50.get_xdata()) == [10, 20] and list(p50.get_ydata()) == [5, 6]
    assert list(p99.get_ydata()) == [9, 30] and p50.get_color() != p99.get_color()
    assert list(limit.get_xdata()) == [25, 25] and ax.get_xlim()[1] > 25
    assert ax.get_title() == "limit: 25 requests/s"


def test_rates_in_ascending_order(ax):
    pictures.draw_rates(ax, {"own": [(100, 9.0), (50, 5.0)]}, limit=100)
    assert list(ax.lines[0].get_xdata()) == [50, 100] and list(ax.lines[0].get_ydata()) == [5, 9]
    assert ax.get_legend().get_texts()[0].get_text() == "own"


def test_no_two_of_eight_lines_look_alike(ax):
    pictures.draw_rates(ax, {str(n): [(100, 9.0 + n), (50, 5.0)] for n in range(8)}, limit=100)
    lines = ax.lines[:8]  # the last one is the limit
    assert len({line.get_color() for line in lines}) == len(lines) == 8
