def beside_backward(forward, backward, communication):
    return (forward + backward) / (forward + max(backward, communication))


def nothing_hidden(forward, backward, communication):
    return (forward + backward) / (forward + backward + communication)


def beside_forward_too(forward, backward, communication):
    return (forward + backward) / max(forward + backward, communication)


def until(rank, chunk, ranks):
    return ranks - 1 + (rank + 1 - chunk) % ranks


def one_round_early(rank, chunk, ranks):
    return ranks - 1 + (rank - chunk) % ranks


def other_way_round(rank, chunk, ranks):
    return ranks - 1 + (chunk - rank - 1) % ranks


def both_losses(interval, save, between):
    return save / interval + interval / 2 / between


def a_whole_interval(interval, save, between):
    return save / interval + interval / between


def without_saving(interval, save, between):
    return interval / 2 / between


RIGHT = {
    "best_efficiency": [beside_backward],
    "rounds_until": [until],
    "lost_share": [both_losses],
}
WRONG = [
    ("best_efficiency", nothing_hidden, "value is not right"),
    ("best_efficiency", beside_forward_too, "value is not right"),
    ("rounds_until", one_round_early, "value"),
    ("rounds_until", other_way_round, "value"),
    ("lost_share", a_whole_interval, "value is not right"),
    ("lost_share", without_saving, "value is not right"),
]
