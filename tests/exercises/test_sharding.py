import math
from fractions import Fraction

import torch
import torch.nn.functional as F

from helpers.exercises.sharding import trained_alone


def gpus_by_hand(parameters, memory, stage):
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][stage]
    room = memory - fixed * parameters
    if sharded == 0:
        return 1 if room >= 0 else None
    return math.ceil(sharded * parameters / room) if room > 0 else None


def gpus_always_all(parameters, memory, stage):
    return math.ceil(16 * parameters / memory)


def gpus_for_ever(parameters, memory, stage):
    """Right, but where none suffice it gives a number."""
    found = gpus_by_hand(parameters, memory, stage)
    return 10**6 if found is None else found


def gpus_rounded_down(parameters, memory, stage):
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][stage]
    room = memory - fixed * parameters
    if room < 0 or (room == 0 and sharded):
        return None
    return max(1, sharded * parameters // room) if sharded else 1


def gpus_searched(parameters, memory, stage):
    """Right up to 1000 GPUs."""
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][stage]
    for ranks in range(1, 1001):
        if fixed * parameters + sharded * parameters / ranks <= memory:
            return ranks
    return None


def gpus_part_rounded_down(parameters, memory, stage):
    fixed, sharded = [(16, 0), (8, 8), (4, 12), (0, 16)][stage]
    for ranks in range(1, 10**5):
        if fixed * parameters + sharded * parameters // ranks <= memory:
            return ranks
    return None


def terms(x, up, down, ranks):
    found = []
    for rank in range(ranks):
        hidden = torch.relu(x @ up.chunk(ranks)[rank].T)
        found.append(hidden @ down.chunk(ranks, dim=1)[rank].T)
    return found


def terms_by_rows(x, up, down, ranks):
    """The first layer by its inputs: ReLU of a part of the sum."""
    parts = zip(x.chunk(ranks, 1), up.chunk(ranks, 1), strict=False)
    return [F.linear(torch.relu(F.linear(a, b)), down) for a, b in parts]


def terms_added(x, up, down, ranks):
    return sum(terms(x, up, down, ranks))


def terms_divided(x, up, down, ranks):
    whole = F.linear(torch.relu(F.linear(x, up)), down)
    return [whole / ranks] * ranks


def by_formula(stages, percent):
    return max(1, -(-(stages - 1) * (100 - percent) // percent))


def with_fractions(stages, percent):
    share = Fraction(percent, 100)
    return max(1, math.ceil((stages - 1) * (1 - share) / share))


def in_floats(stages, percent):
    """For 4 stages and 20 %, 3 * 0.8 / 0.2 is a little more than 12 here: rounded up, 13."""
    share = percent / 100
    return max(1, math.ceil((stages - 1) * (1 - share) / share))


def strictly_below(stages, percent):
    return max(1, (stages - 1) * (100 - percent) // percent + 1)


def to_the_nearest(stages, percent):
    return max(1, round((stages - 1) * (100 - percent) / percent))


def share_of_work(stages, percent):
    return max(1, -(-100 * (stages - 1) // percent))


RIGHT = {
    "gpus_needed": [gpus_by_hand],
    "mended": [[trained_alone()] * 2, [trained_alone() + 2e-7] * 2],
    "mlp_terms": [terms],
    "micro_batches_for": [by_formula, with_fractions],
}
WRONG = [
    ("gpus_needed", gpus_always_all, "expected NoneType"),
    ("gpus_needed", gpus_for_ever, "expected NoneType"),
    ("gpus_needed", gpus_rounded_down, "value"),
    ("gpus_needed", gpus_searched, "expected int, got NoneType"),
    ("gpus_needed", gpus_part_rounded_down, "value"),
    ("mended", [trained_alone() + 2e-6] * 2, "value"),
    ("mended", [trained_alone(), trained_alone() + 1e-3], "value"),  # right on one rank only
    ("mlp_terms", terms_by_rows, "differ"),
    ("mlp_terms", terms_added, "list"),
    ("mlp_terms", terms_divided, "differ"),
    ("micro_batches_for", in_floats, "value"),
    ("micro_batches_for", strictly_below, "value"),
    ("micro_batches_for", to_the_nearest, "value"),
    ("micro_batches_for", share_of_work, "value"),
]
