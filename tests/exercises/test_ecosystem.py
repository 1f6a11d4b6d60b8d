"""Answers to the exercises of chapter 19, right and wrong."""

import math

import torch


def recall_by_rank(scores, right, k):
    hits = 0
    for row, document in zip(scores, right, strict=True):
        better = sum(1 for score in row if score > row[document])
        hits += better < k
    return hits / len(right)


def recall_by_topk(offset=0, largest=True, first=False, as_count=False, as_tensor=False):
    def recall(scores, right, k):
        k = min(max(k + offset, 1), scores.shape[1])
        best = scores.topk(k, dim=1, largest=largest).indices
        if first:
            best = best[:, :1]
        hits = (best == right[:, None]).any(1)
        if as_tensor:
            return hits.float().mean()
        return float(hits.sum()) if as_count else hits.double().mean().item()

    return recall


def strict_topk(scores, right, k):
    best = scores.topk(k, dim=1).indices
    return (best == right[:, None]).any(1).double().mean().item()


def over_documents(scores, right, k):
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices
    return (best == right[:, None]).double().mean().item()


def by_names(prefix=True, shapes=True, everywhere=False, in_saved_order=False, swapped=False):
    def loadable(saved, model):
        def plain(name):
            if everywhere:
                return name.replace("module.", "")
            return name.removeprefix("module.") if prefix else name

        found = {plain(name): shape for name, shape in saved.items()}
        fits = [n for n in model if n in found and (not shapes or found[n] == model[n])]
        if in_saved_order:
            fits = [n for n in found if n in fits]
        others = [n for n in model if n not in fits]
        return (others, fits) if swapped else (fits, others)

    return loadable


def by_size(saved, model):
    found = {name.removeprefix("module."): math.prod(shape) for name, shape in saved.items()}
    fits = [name for name, shape in model.items() if found.get(name) == math.prod(shape)]
    return fits, [name for name in model if name not in fits]


def stripped(saved, model):
    found = {name.lstrip("module."): shape for name, shape in saved.items()}
    fits = [name for name, shape in model.items() if found.get(name) == shape]
    return fits, [name for name in model if name not in fits]


def index(plus=1, shares=True, log=math.log, half=False, turned=False):
    def psi(expected, actual):
        e = [count + plus for count in expected]
        a = [count + plus for count in actual]
        if shares:
            e, a = [x / sum(e) for x in e], [x / sum(a) for x in a]
        if half:  # the Kullback-Leibler divergence
            return sum(y * log(y / x) for x, y in zip(e, a, strict=True))
        if turned:
            return sum((x - y) * log(y / x) for x, y in zip(e, a, strict=True))
        return sum((y - x) * log(y / x) for x, y in zip(e, a, strict=True))

    return psi


def tensor_psi(expected, actual):
    e = torch.tensor(expected, dtype=torch.float64) + 1
    a = torch.tensor(actual, dtype=torch.float64) + 1
    e, a = e / e.sum(), a / a.sum()
    return ((a - e) * (a / e).log()).sum().item()


RIGHT = {
    "recall": [recall_by_rank, recall_by_topk()],
    "loadable": [by_names()],
    "psi": [index(), tensor_psi],
}

WRONG = {
    "recall": [
        recall_by_topk(offset=1),
        recall_by_topk(offset=-1),
        recall_by_topk(largest=False),
        recall_by_topk(first=True),
        recall_by_topk(as_count=True),
        strict_topk,
        over_documents,
    ],
    "loadable": [
        by_names(prefix=False),
        by_names(shapes=False),
        by_names(everywhere=True),
        by_names(in_saved_order=True),
        by_names(swapped=True),
        by_size,
        stripped,
    ],
    "psi": [
        index(plus=0),
        index(plus=0.5),
        index(shares=False),
        index(log=math.log2),
        index(half=True),
        index(turned=True),
    ],
}
