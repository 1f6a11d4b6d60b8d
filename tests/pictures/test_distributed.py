import pytest
import torch
import torch.distributed as dist

from helpers.distributed import process_group, spawn
from helpers.pictures import distributed as pictures


def shown(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_deals_eight_samples_and_averages(ax, ranks):
    pictures.draw_step(ax, ranks)
    assert [text for text in shown(ax) if text in set("01234567")] == list("01234567")
    assert [text for text in shown(ax) if text.endswith(": model")] == [
        f"rank {rank}: model" for rank in range(ranks)
    ]
    assert shown(ax)[-1] == ("grad 0" if ranks == 1 else shown(ax)[-1])
    assert shown(ax)[-1].count("grad") == ranks


@pytest.mark.parametrize("name", pictures.WAITING)
def test_a_call_waits_for_one_that_another_process_makes_later_or_never(ax, name):
    pictures.draw_waiting(ax, name)
    scene = pictures.WAITING[name]
    waiting = [call for call in scene.calls if call.state == "waits"]
    assert set(scene.lanes) <= set(shown(ax))
    assert {f"{call.text}: waits" for call in waiting} <= set(shown(ax))
    assert sorted(scene.calls.index(call) for call in waiting) == sorted(
        waits for waits, _ in scene.waits_for
    )
    for waits, awaited in scene.waits_for:
        assert scene.calls[waits].lane != scene.calls[awaited].lane
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == len(scene.waits_for)


def test_an_unknown_scene():
    with pytest.raises(ValueError, match="expected a scene, one of late, both_receive"):
        pictures.draw_waiting(None, "early")


def everything():
    """What `gloo` makes of the numbers that are drawn before."""
    found = {}
    with process_group("gloo") as place:
        for name in pictures.COLLECTIVES:
            mine = torch.tensor(pictures.collective(name)[0][place.rank])
            found[name] = run(name, mine, place.rank)
    return found


def run(name, mine, rank):
    """Call the collective; return what this rank is said to hold."""
    root, room, one = rank == 0, torch.zeros(4, dtype=torch.int64), torch.tensor([0])
    calls = {
        "broadcast": (mine, lambda: dist.broadcast(mine, 0)),
        "scatter": (one, lambda: dist.scatter(one, list(mine.chunk(4)) if root else None, 0)),
        "gather": (room, lambda: dist.gather(mine, list(room.chunk(4)) if root else None, 0)),
        "reduce": (mine, lambda: dist.reduce(mine, 0)),
        "all_reduce": (mine, lambda: dist.all_reduce(mine)),
        "all_gather": (room, lambda: dist.all_gather_into_tensor(room, mine)),
        "reduce_scatter": (one, lambda: dist.reduce_scatter_tensor(one, mine)),
        "all_to_all": (room, lambda: dist.all_to_all_single(room, mine)),
    }
    result, call = calls[name]
    call()
    return [] if name in ("gather", "reduce") and not root else result.tolist()


def test_what_is_drawn_is_what_gloo_does():
    results = spawn(everything, ranks=4)
    for name in pictures.COLLECTIVES:
        assert [held[name] for held in results] == pictures.collective(name)[1], name


@pytest.mark.parametrize("operation", pictures.COLLECTIVES)
def test_a_collective_shows_all_numbers_before_and_after(ax, operation):
    pictures.draw_collective(ax, operation)
    before, after = pictures.collective(operation)
    numbers = [str(number) for held in (*before, *after) for number in held]
    drawn = [text for text in shown(ax) if text.isdigit()]
    assert drawn == numbers and operation in shown(ax)


def test_a_number_of_one_rank_and_a_sum():
    assert [pictures.origin(number) for number in (1, 40, 300, 2000)] == [0, 1, 2, 3]
    assert pictures.single(3000) and not pictures.single(1111) and not pictures.single(2222)


def test_an_unknown_collective():
    with pytest.raises(ValueError, match="expected a collective, one of broadcast"):
        pictures.collective("all_mix")


def test_local_ranks_start_from_0_on_every_node(ax):
    pictures.draw_places(ax, 2, 3)
    numbers = [text for text in shown(ax) if text.isdigit()]
    assert numbers[::2] == list("012345") and numbers[1::2] == list("012012")
    assert {"node 0", "node 1", "RANK", "LOCAL"} <= set(shown(ax))


def test_buckets_below_backward(ax):
    rows = [
        {"kind": "backward", "start": 0.0, "end": 2000.0, "bucket": None},
        {"kind": "launch", "start": 900.0, "end": 950.0, "bucket": 0},
        {"kind": "reduce", "start": 1000.0, "end": 1500.0, "bucket": 0},
    ]
    pictures.draw_buckets(ax, rows)
    backward, reduce = (collection.get_paths()[0].get_extents() for collection in ax.collections)
    assert (backward.x0, backward.x1) == (0, 2) and (reduce.x0, reduce.x1) == (1, 1.5)
    assert backward.y1 < reduce.y0 and ax.yaxis_inverted()  # below
    assert [label.get_text() for label in ax.get_yticklabels()] == ["backward", "bucket 0"]
