import math
import re

import pytest

from helpers.exercises.harness import WrongAnswer, find
from helpers.exercises.sharding import trained_alone


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


def plan(stages, stage, percent):
    """Searched, instead of solved."""
    count = stages  # 1F1B needs as many
    while 100 * (stages - 1) > percent * (count + stages - 1):
        count += 1
    return [count, stages - stage]


def plan_of_any_count(stages, stage, percent):
    """Fewer micro-batches than stages, which 1F1B refuses."""
    _, stored = plan(stages, stage, percent)
    return max(1, -(-100 * (stages - 1) // percent) - stages + 1), stored


def plan_of_gpipe(stages, stage, percent):
    count, _ = plan(stages, stage, percent)
    return count, count


def plan_counted_from_the_front(stages, stage, percent):
    count, _ = plan(stages, stage, percent)
    return count, stage + 1


def plan_by_stages(stages, stage, percent):
    """The bubble as (s - 1) / m: its share of the work, not of the time."""
    return max(stages, -(-100 * (stages - 1) // percent)), stages - stage


def plan_rounded_down(stages, stage, percent):
    return max(stages, 100 * (stages - 1) // percent - stages + 1), stages - stage


def plan_with_one_too_many(stages, stage, percent):
    """The bubble below the limit, and never equal to it."""
    return max(stages, 100 * (stages - 1) // percent - stages + 2), stages - stage


def batch(machines, gpus, cards, card, operations, length):
    per_gpu = 1
    while per_gpu * length * cards * card < operations and per_gpu < 10**6:
        per_gpu += 1
    if per_gpu == 10**6:
        per_gpu = (operations + cards * card * length - 1) // (cards * card * length)
    return machines * gpus * per_gpu


def batch_by_one_card(machines, gpus, cards, card, operations, length):
    """As if each GPU gathered everything through a card of its own."""
    return batch(machines, gpus, 1, card, operations, length)


def batch_by_all_machines(machines, gpus, cards, card, operations, length):
    """As if the cards of all machines delivered to each GPU."""
    return batch(machines, gpus, cards * machines, card, operations, length)


def batch_per_machine(machines, gpus, cards, card, operations, length):
    """As if the GPUs of a machine needed the tokens together."""
    needed = -(-operations // (cards * card * length))
    return machines * max(gpus, needed)


def batch_of_part_of_a_sequence(machines, gpus, cards, card, operations, length):
    return -(-machines * gpus * operations // (cards * card * length))


def batch_rounded_down(machines, gpus, cards, card, operations, length):
    return machines * gpus * max(1, operations // (cards * card * length))


def batch_of_floats(machines, gpus, cards, card, operations, length):
    return machines * gpus * math.ceil(operations / (cards * card * length))


def batch_with_one_too_many(machines, gpus, cards, card, operations, length):
    return machines * gpus * (operations // (cards * card * length) + 1)


BEFORE, AFTER = trained_alone()

RIGHT = {
    "gpus_needed": [gpus_by_hand],
    "mended": [[AFTER] * 2, [AFTER + 2e-7] * 2],
    "on_mesh": [place],
    "pipeline_plan": [plan],
    "smallest_batch": [batch],
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
    ("pipeline_plan", plan_of_any_count, "result 1: value is not right"),
    ("pipeline_plan", plan_of_gpipe, "result 2: value is not right"),
    ("pipeline_plan", plan_counted_from_the_front, "result 2: value is not right"),
    ("pipeline_plan", plan_by_stages, "result 1: value is not right"),
    ("pipeline_plan", plan_rounded_down, "result 1: value is not right"),
    ("pipeline_plan", plan_with_one_too_many, "result 1: value is not right"),
    ("smallest_batch", batch_by_one_card, "value is not right"),
    ("smallest_batch", batch_by_all_machines, "value is not right"),
    ("smallest_batch", batch_per_machine, "value is not right"),
    ("smallest_batch", batch_of_part_of_a_sequence, "value is not right"),
    ("smallest_batch", batch_rounded_down, "value is not right"),
    ("smallest_batch", batch_of_floats, "value is not right"),
    ("smallest_batch", batch_with_one_too_many, "value is not right"),
]
TOLD = [entry for entry in WRONG if entry[0] == "mended"]


@pytest.mark.parametrize(("name", "answer", "words"), TOLD)
def test_a_check_says_what_is_wrong(name, answer, words):
    exercise = find(f"sharding.{name}")
    with pytest.raises(WrongAnswer, match=re.escape(words)):
        for arguments in exercise.cases():
            exercise.through(answer)(*arguments)
