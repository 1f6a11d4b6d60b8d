import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from helpers import loading
from helpers.exercises.data import EXERCISES, _merge, _statistics


def stall_right(load, step, workers):
    if workers == 0:
        return load / (load + step)
    return (1 - step * workers / load.clamp(min=1e-300)).clamp(min=0)


def stall_other(load, step, workers):
    wait = load if workers == 0 else (load / workers - step).relu()
    return wait / (wait + step)


STALL_WRONG = {
    "as if without workers": lambda load, step, workers: load / (load + step),
    "negative when steps are slow": lambda load, step, w: 1 - step * max(w, 1) / load,
    "workers do not help": lambda load, step, w: 1 - step / torch.maximum(step, load),
    "division by no workers": lambda load, step, w: 1 - step / torch.maximum(step, load / w),
    "0 / 0 for nothing to load": lambda load, step, w: (
        (load / w - step).relu() / (load / w) if w else load / (load + step)
    ),
    "seconds, not a share": lambda load, step, w: (load / w - step).relu() if w else load,
    "float32": lambda load, step, w: stall_right(load, step, w).float(),
    "one number": lambda load, step, w: stall_right(load, step, w).mean(),
}


def weights_by_unique(labels):
    _, position, count = labels.unique(return_inverse=True, return_counts=True)
    return (1 / count.double())[position]


WEIGHTS_WRONG = {
    "float32": lambda y: 1 / y.bincount()[y].float(),
    "sums to 1 over all": lambda y: weights_by_unique(y) / weights_by_unique(y).sum(),
    "counts": lambda y: y.bincount()[y].double(),
    "a weight for each class": lambda y: 1 / y.bincount().double(),
    "number of samples over count": lambda y: len(y) / y.bincount()[y].double(),
    "as if no number were missing": lambda y: (1 / y.unique(return_counts=True)[1].double())[y],
    "shares": lambda y: y.bincount()[y].double() / len(y),
    "square roots": lambda y: y.bincount()[y].double() ** -0.5,
}


def merge_around_the_new_mean(a, b):
    n = a[0] + b[0]
    mean = (a[0] * a[1] + b[0] * b[1]) / n.clamp(min=1)
    m2 = a[2] + b[2] + a[0] * (a[1] - mean) ** 2 + b[0] * (b[1] - mean) ** 2
    return torch.stack([n, mean, m2])


def merge_by_squares(a, b):
    n = a[0] + b[0]
    mean = (a[0] * a[1] + b[0] * b[1]) / n.clamp(min=1)
    squares = a[2] + a[0] * a[1] ** 2 + b[2] + b[0] * b[1] ** 2
    return torch.stack([n, mean, squares - n * mean**2])


def merge_without_the_gap(a, b):
    return torch.stack([a[0] + b[0], _merge(a, b)[1], a[2] + b[2]])


def merge_gap_not_weighted(a, b):
    return torch.stack([*_merge(a, b)[:2], a[2] + b[2] + (b[1] - a[1]) ** 2])


def merge_variance(a, b):
    n, mean, m2 = _merge(a, b)
    return torch.stack([n, mean, m2 / n.clamp(min=1)])


def merge_without_guard(a, b):
    n = a[0] + b[0]
    gap = b[1] - a[1]
    return torch.stack([n, a[1] + gap * b[0] / n, a[2] + b[2] + gap**2 * a[0] * b[0] / n])


MERGE_WRONG = {
    "by squares": merge_by_squares,
    "without the gap": merge_without_the_gap,
    "nan for nothing": merge_without_guard,
    "mean of means": lambda a, b: torch.stack([a[0] + b[0], (a[1] + b[1]) / 2, _merge(a, b)[2]]),
    "gap not weighted": merge_gap_not_weighted,
    "sums": lambda a, b: a + b,
    "a variance": merge_variance,
    "in place": lambda a, b: a.copy_(_merge(a, b)),
    "float32": lambda a, b: _merge(a.float(), b.float()),
}


def collate_by_hand(batch):
    longest = max(len(s) for s in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, s in enumerate(batch):
        tokens[row, longest - len(s) :] = s
        mask[row, longest - len(s) :] = True
    return [tokens, mask]  # a list is as good as a tuple


def collate_by_flip(batch):
    tokens = pad_sequence([s.flip(0) for s in batch], batch_first=True).flip(1)
    lengths = torch.tensor([len(s) for s in batch])[:, None]
    return tokens, torch.arange(tokens.shape[1]).flip(0) < lengths


def collate_negative_slices(batch):
    """s[-0:] is everything: an empty sequence would fill its whole row."""
    tokens, mask = collate_by_hand(batch)
    for row, s in enumerate(batch):
        mask[row, -len(s) :] = True
    return tokens, mask


def collate_right(batch):
    tokens = pad_sequence(batch, batch_first=True)
    mask = pad_sequence([torch.ones_like(s, dtype=torch.bool) for s in batch], batch_first=True)
    return tokens, mask


def collate_changed(change):
    return lambda batch: change(*collate_by_hand(batch))


COLLATE_WRONG = {
    "on the right": collate_right,
    "mask from tokens": collate_changed(lambda tokens, mask: (tokens, tokens != 0)),
    "an empty row is all real": collate_negative_slices,
    "mask of numbers": collate_changed(lambda tokens, mask: (tokens, mask.long())),
    "mask inverted": collate_changed(lambda tokens, mask: (tokens, ~mask)),
    "padded with -1": collate_changed(lambda t, mask: (t.masked_fill(~mask, -1), mask)),
    "tokens alone": collate_changed(lambda tokens, mask: tokens),
    "time first": collate_changed(lambda tokens, mask: (tokens.T, mask.T)),
    "int32": collate_changed(lambda tokens, mask: (tokens.int(), mask)),
}


def share_by_range(n, rank, world, worker, workers):
    return list(range(rank + world * worker, n - n % world, world * max(1, workers)))


def share_by_filter(n, rank, world, worker, workers):
    mine = [i for i in range(n // world * world) if i % world == rank]
    return tuple(np.array(mine, dtype=int)[worker :: max(1, workers)])


def share_dropping_for_workers(n, rank, world, worker, workers):
    return share_by_range(n - n % (world * max(1, workers)), rank, world, worker, workers)


SHARE_WRONG = {
    "keeps the tail": lambda n, r, w, k, m: list(range(r + w * k, n, w * max(1, m))),
    "blocks": lambda n, r, w, k, m: list(range(n // w * r, n // w * (r + 1)))[k :: max(1, m)],
    "ranks alone": lambda n, r, w, k, m: list(range(r, n - n % w, w)),
    "workers before ranks": lambda n, r, w, k, m: list(range(n // w * w))[k :: max(1, m)][r::w],
    "nobody without workers": lambda n, r, w, k, m: share_by_range(n, r, w, k, m) if m else [],
    "drops for workers, too": share_dropping_for_workers,
    "step of no workers": lambda n, r, w, k, m: list(range(r + w * k, n - n % w, w * m)),
    "a range": lambda n, r, w, k, m: range(r + w * k, n - n % w, w * max(1, m)),
}

RIGHT = {
    "stall": [stall_right, stall_other],
    "sample_weights": [weights_by_unique, lambda y: 1 / y.bincount()[y].double()],
    "merge": [merge_around_the_new_mean, lambda a, b: _merge(b, a)],
    "collate": [collate_by_hand, collate_by_flip],
    "share": [share_by_range, share_by_filter],
}
WRONG = {
    "stall": STALL_WRONG,
    "sample_weights": WEIGHTS_WRONG,
    "merge": MERGE_WRONG,
    "collate": COLLATE_WRONG,
    "share": SHARE_WRONG,
}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_reference_of_stall_is_the_chapters_model(workers):
    load, step = torch.rand(2, 20, dtype=torch.float64) + 0.1
    costs = [loading.Cost(a, a, 0, 0, b) for a, b in zip(load.tolist(), step.tolist(), strict=True)]
    want = [1 - c.step / loading.period(c, workers, 99) for c in costs]
    got = EXERCISES["stall"].reference(load, step, workers)
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), atol=1e-14)


def test_the_reference_of_merge_is_the_statistics_of_all_the_data():
    x, y = torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.float64) + 3
    for a, b in [(x, y), (x, y[:0]), (x[:0], y[:0])]:
        want = _statistics(torch.cat([a, b]))
        assert torch.allclose(_merge(_statistics(a), _statistics(b)), want, atol=1e-13)
