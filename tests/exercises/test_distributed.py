from helpers.exercises.distributed import COLLECTIVE, CULPRIT

RIGHT = {
    "collective": [dict(COLLECTIVE)],
    "exchange": [[200.0, 100.0]],
    "mean_loss": [
        [(1 * 10 + 2 * 20 + 3 * 30) / (10 + 20 + 30)] * 3,
        [2.3333337] * 3,  # float32, rounded a few times
    ],
    "culprit": [dict(CULPRIT)],
}
WRONG = [
    ("collective", {**COLLECTIVE, "C": "reduce"}, "value"),  # the other ranks need it, too
    ("collective", {**COLLECTIVE, "D": "all_reduce"}, "value"),
    ("exchange", [100.0, 200.0], "value"),  # nothing was exchanged
    ("exchange", [200.0, 100.0, 100.0], "expected 2 results, got 3"),
    ("mean_loss", [2.33333] * 3, "value is not right"),  # typed, not computed
    ("mean_loss", [2.333329, 2.333329, 2.333329], "value is not right"),
    ("mean_loss", [7 / 3] * 4, "expected 3 results, got 4"),
    ("mean_loss", [2.0] * 3, "value is not right"),  # the mean of the means
    ("mean_loss", [7 / 3, 2.0, 3.0], "value is not right"),  # only one rank has it
    ("culprit", {"A": 0, "B": 1, "C": 0}, "value"),  # the one that reported it
    ("culprit", {"A": 3, "B": 0, "C": 0}, "value"),
]
