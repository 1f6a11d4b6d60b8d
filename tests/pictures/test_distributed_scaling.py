import pytest

from helpers.pictures import distributed_scaling as pictures


def shown(ax):
    return [text.get_text() for text in ax.texts]


def numbers(ax):
    return [text for text in shown(ax) if text.isdigit()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_begins_with_own_numbers_and_ends_with_sums(ax, ranks):
    pictures.draw_ring(ax, 0, ranks)
    assert numbers(ax) == [str(10**rank) for rank in range(ranks) for _ in range(ranks)]
    assert "reduce-scatter" in shown(ax)


def test_after_three_steps_each_of_four_ranks_has_one_sum(ax):
    pictures.draw_ring(ax, 3)
    columns = [numbers(ax)[4 * rank : 4 * rank + 4] for rank in range(4)]
    assert [column.index("1111") for column in columns] == [1, 2, 3, 0]
    assert all(column.count("1111") == 1 for column in columns)
    assert "all-gather" in shown(ax)


def test_the_end_has_sums_and_no_arrows(ax):
    pictures.draw_ring(ax, 6)
    assert numbers(ax) == ["1111"] * 16
    assert shown(ax)[-1] == ""  # no phase is left


@pytest.mark.parametrize("buckets", [1, 8])
def test_buckets_are_drawn_below_the_computing(ax, buckets):
    pictures.draw_overlap(
        ax, buckets, forward=0.02, backward=0.04, size=100, reduce=lambda size: size / 10_000
    )
    forward, backward, network = ax.collections
    assert len(forward.get_paths()) == len(backward.get_paths()) == 1
    assert len(network.get_paths()) == buckets
    end = 0.06 + (0.01 if buckets == 1 else 0.0013)  # the last bucket has 13 bytes
    assert shown(ax)[-1] == f"{end * 1e3:.1f} ms"
