import math
import re

import pytest

from helpers.exercises.harness import WrongAnswer, find
from helpers.exercises.sharding import resumed_alone, trained_alone


def gpus_by_hand(parameters, memory, level):
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][level]
    room = memory - fixed * parameters
    if sharded == 0:
        return 1 if room >= 0 else None
    return math.ceil(sharded * parameters / room) if room > 0 else None


def gpus_always_all(parameters, memory, level):
    return math.ceil(16 * parameters / memory)


def gpus_for_ever(parameters, memory, level):
    """Right, but where none suffice it gives a number."""
    found = gpus_by_hand(parameters, memory, level)
    return 10**6 if found is None else found


def gpus_rounded_down(parameters, memory, level):
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][level]
    room = memory - fixed * parameters
    if room < 0 or (room == 0 and sharded):
        return None
    return max(1, sharded * parameters // room) if sharded else 1


def gpus_searched(parameters, memory, level):
    """Right up to 1000 GPUs."""
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][level]
    for ranks in range(1, 1001):
        if fixed * parameters + sharded * parameters / ranks <= memory:
            return ranks
    return None


def gpus_part_rounded_down(parameters, memory, level):
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][level]
    for ranks in range(1, 10**5):
        if fixed * parameters + sharded * parameters // ranks <= memory:
            return ranks
    return None


def place(rank, data, tensor, samples, width):
    row, _ = divmod(rank, tensor)
    each = samples // data
    return [
        row * each,
        each,
        [4 * width // tensor // data, width],
        [width // data, 4 * width // tensor],
    ]


def place_by_column(rank, data, tensor, samples, width):
    """The columns of the mesh taken for its rows."""
    _, *found = place(rank, data, tensor, samples, width)
    return (rank % tensor * samples // data, *found)


def place_of_every_rank(rank, data, tensor, samples, width):
    """Each rank has samples of its own, as in data parallel training alone."""
    _, _, *shapes = place(rank, data, tensor, samples, width)
    each = samples // (data * tensor)
    return (rank * each, each, *shapes)


def place_on_rows_of_tensor(rank, data, tensor, samples, width):
    """data and tensor exchanged."""
    return place(rank, tensor, data, samples, width)


def place_without_fsdp(rank, data, tensor, samples, width):
    first, count, *_ = place(rank, data, tensor, samples, width)
    return first, count, [4 * width // tensor, width], [width, 4 * width // tensor]


def place_with_rows_of_down(rank, data, tensor, samples, width):
    """down.weight cut twice along dimension 0."""
    first, count, up, _ = place(rank, data, tensor, samples, width)
    return first, count, up, [width // data // tensor, 4 * width]


def counted(forward, backward, predicted=(6, 11)):
    return {
        "counted": {"forward": forward, "backward": backward},
        "predicted": {"forward": predicted[0], "backward": predicted[1]},
    }


BEFORE, AFTER = trained_alone()
FRESH, RESUMED = resumed_alone()

RIGHT = {
    "gpus_needed": [gpus_by_hand],
    "mended": [[AFTER] * 2, [AFTER + 2e-7] * 2],
    "on_mesh": [place],
    "tower": [counted(6, 11)],
    "resumed": [RESUMED, [loss + 1e-9 for loss in RESUMED]],
}
WRONG = [
    ("gpus_needed", gpus_always_all, "expected NoneType"),
    ("gpus_needed", gpus_for_ever, "expected NoneType"),
    ("gpus_needed", gpus_rounded_down, "value"),
    ("gpus_needed", gpus_searched, "expected int, got NoneType"),
    ("gpus_needed", gpus_part_rounded_down, "value"),
    ("mended", [BEFORE] * 2, "rank 0 returned a loss of 1.7333, the loss before the first step"),
    ("mended", [AFTER + 2e-6] * 2, "rank 0 returned a loss of 0.0811, which"),
    ("mended", [AFTER, AFTER + 1e-3], "rank 1 returned"),  # right on one rank only
    ("mended", [AFTER + 1e-3] * 2, "which is not that of a single process"),
    ("mended", [AFTER], "expected the results of 2 ranks, got 1"),
    ("on_mesh", place_by_column, "result 1: value is not right"),
    ("on_mesh", place_of_every_rank, "result 2: value is not right"),
    ("on_mesh", place_on_rows_of_tensor, "value is not right"),
    ("on_mesh", place_without_fsdp, "result 3: result 1: value is not right: 16"),
    ("on_mesh", place_with_rows_of_down, "result 4: result 1: value is not right: 2"),
    ("tower", counted(1, 1), "1 collectives in forward: is each block a group"),  # the root alone
    ("tower", counted(4, 7), "4 collectives in forward"),  # one of two lists
    ("tower", counted(5, 5), "5 collectives in forward"),  # without the root
    ("tower", counted(6, 12), "12 collectives in backward"),
    ("tower", counted(6, 11, (6, 6)), "you predicted 6 collectives in backward"),
    ("tower", counted(6, 11, (7, 11)), "you predicted 7 collectives in forward"),
    ("resumed", FRESH, "the first loss is that of a new model: nothing was loaded"),
    ("resumed", [RESUMED[0], *FRESH[1:]], "the first loss is right, a later one is not"),
    ("resumed", [loss + 0.1 for loss in RESUMED], "neither that of the saved model nor"),
    ("resumed", RESUMED[1:], "expected 5 losses, got 4"),
    ("resumed", [*RESUMED, 0.0], "expected 5 losses, got 6"),
]
STUBS = {"tower": {"counted": ..., "predicted": {"forward": ..., "backward": ...}}}

TOLD = [entry for entry in WRONG if entry[0] in ("mended", "tower", "resumed")]


@pytest.mark.parametrize(("name", "answer", "words"), TOLD)
def test_a_check_says_what_is_wrong(name, answer, words):
    exercise = find(f"sharding.{name}")
    with pytest.raises(WrongAnswer, match=re.escape(words)):
        for arguments in exercise.cases():
            exercise.through(answer)(*arguments)
