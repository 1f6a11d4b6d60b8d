import torch


def place(rank, per_node):
    return rank // per_node, rank % per_node


def place_swapped(rank, per_node):
    return rank % per_node, rank // per_node


def dealt(rank, ranks, samples):
    each = -(-samples // ranks)
    return [(rank + ranks * i) % samples for i in range(each)]


def not_repeated(rank, ranks, samples):
    return list(range(rank, samples, ranks))


def in_blocks(rank, ranks, samples):
    each = -(-samples // ranks)
    return [(rank * each + i) % samples for i in range(each)]


def weighted(means, counts):
    return sum(m * c for m, c in zip(means, counts, strict=True)) / sum(counts)


def mean_of_means(means, counts):
    return sum(means) / len(means)


def cut_sum(held):
    return list(sum(held).chunk(len(held)))


def in_place(held):
    for other in held[1:]:
        held[0] += other
    return list(held[0].chunk(len(held)))


def not_added(held):
    return [tensor.chunk(len(held))[rank] for rank, tensor in enumerate(held)]


def not_cut(held):
    return [torch.stack(held).sum(0)] * len(held)


RIGHT = {
    "place": [place, divmod],
    "rows_of": [dealt],
    "mean_loss": [weighted],
    "reduce_scatter": [cut_sum],
}
WRONG = [
    ("place", place_swapped, "value"),
    ("rows_of", not_repeated, "expected 5 results"),
    ("rows_of", in_blocks, "value"),
    ("mean_loss", mean_of_means, "value is not right"),
    ("reduce_scatter", in_place, "changed in place"),
    ("reduce_scatter", not_added, "differ"),
    ("reduce_scatter", not_cut, "shape"),
]
