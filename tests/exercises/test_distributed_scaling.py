def beside_backward(forward, backward, communication):
    return (forward + backward) / (forward + max(backward, communication))


def nothing_hidden(forward, backward, communication):
    return (forward + backward) / (forward + backward + communication)


def beside_forward_too(forward, backward, communication):
    return (forward + backward) / max(forward + backward, communication)


def a_round(add_until=0, index_off=0, neighbor=1, copies=True):
    def ring_round(chunks, k):
        ranks = len(chunks)
        after = [list(own) for own in chunks] if copies else chunks
        for rank in range(ranks):
            index = (rank - 1 - k + index_off) % ranks
            arrives = chunks[(rank - neighbor) % ranks][index]
            after[rank][index] = arrives + (after[rank][index] if k < ranks - 1 + add_until else 0)
        return after

    return ring_round


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
    "ring_round": [a_round()],
    "rounds_until": [until],
    "lost_share": [both_losses],
}
WRONG = [
    ("best_efficiency", nothing_hidden, "value is not right"),
    ("best_efficiency", beside_forward_too, "value is not right"),
    ("ring_round", a_round(add_until=1), "value"),
    ("ring_round", a_round(add_until=-1), "value"),
    ("ring_round", a_round(add_until=99), "value"),
    ("ring_round", a_round(index_off=1), "value"),
    ("ring_round", a_round(neighbor=-1), "value"),
    ("ring_round", a_round(copies=False), "changed in place"),
    ("rounds_until", one_round_early, "value"),
    ("rounds_until", other_way_round, "value"),
    ("lost_share", a_whole_interval, "value is not right"),
    ("lost_share", without_saving, "value is not right"),
]
