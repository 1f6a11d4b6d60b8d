"""The exercises of chapter 07 refuse plausible wrong answers and take right ones of any style."""

import torch
import torch.nn.functional as F

# ---- count_pairs


def one_hot_product(labels, predictions, classes):
    return F.one_hot(labels, classes).T @ F.one_hot(predictions, classes)


def counted(labels, predictions, classes):
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, -1)


def put(labels, predictions, classes):
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    return matrix.index_put((labels, predictions), torch.tensor(1), accumulate=True)


def without_minlength(labels, predictions, classes):
    return torch.bincount(labels * classes + predictions).view(classes, -1)


def not_accumulated(labels, predictions, classes):
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    matrix[labels, predictions] += 1
    return matrix


def in_bytes(labels, predictions, classes):
    return counted(labels, predictions, classes).to(torch.uint8).long()


def in_half(labels, predictions, classes):
    return counted(labels, predictions, classes).bfloat16().long()


def as_many_classes_as_seen(labels, predictions, classes):
    return counted(labels, predictions, int(torch.cat([labels, predictions]).max()) + 1)


# ---- smooth_loss


def by_gather(logits, labels, smoothing):
    log_p = logits.log_softmax(1)
    true = log_p.gather(1, labels[:, None]).mean()
    return -(1 - smoothing) * true - smoothing * log_p.mean()


def by_targets(logits, labels, smoothing):
    classes = logits.shape[1]
    target = F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes
    return -(target * logits.log_softmax(1)).sum(1).mean()


def by_logsumexp(logits, labels, smoothing):
    own = logits[torch.arange(len(labels)), labels]
    expected = (1 - smoothing) * own + smoothing * logits.mean(1)
    return (logits.logsumexp(1) - expected).mean()


def log_of_softmax(logits, labels, smoothing):
    log_p = logits.softmax(1).log()
    true = log_p.gather(1, labels[:, None]).mean()
    return -(1 - smoothing) * true - smoothing * log_p.mean()


def spread_over_the_others(logits, labels, smoothing):
    log_p = logits.log_softmax(1)
    true = log_p.gather(1, labels[:, None]).sum(1)
    others = (log_p.sum(1) - true) / max(logits.shape[1] - 1, 1)
    return -((1 - smoothing) * true + smoothing * others).mean()


# ---- shift


def indexed(images, dx, dy):
    n, _, height, width = images.shape
    rows = torch.arange(height) - dy[:, None]
    columns = torch.arange(width) - dx[:, None]
    row_inside, column_inside = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    inside = row_inside[:, :, None] & column_inside[:, None]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    which = torch.arange(n)[:, None, None]
    moved = images[which, :, rows[:, :, None], columns[:, None]]
    return moved.permute(0, 3, 1, 2) * inside[:, None]


def padded(images, dx, dy, most=None):
    """Pad by as much as is needed, or by `most`; then cut each image out of it."""
    n, channels, height, width = images.shape
    if most is None:
        most = max(height, width)
        dx, dy = dx.clamp(-width, width), dy.clamp(-height, height)
    big = F.pad(images, [most] * 4)
    rows = most + torch.arange(height) - dy[:, None]
    columns = most + torch.arange(width) - dx[:, None]
    where = rows[:, None, :, None], columns[:, None, None, :]
    return big[torch.arange(n)[:, None, None, None], torch.arange(channels)[:, None, None], *where]


def padded_by_30(images, dx, dy):
    return padded(images, dx, dy, most=30)


def rolled(images, dx, dy):
    moves = zip(images, dx.tolist(), dy.tolist(), strict=True)
    return torch.stack([image.roll((down, right), (1, 2)) for image, right, down in moves])


def border_repeated(images, dx, dy):
    n, _, height, width = images.shape
    rows = (torch.arange(height) - dy[:, None]).clamp(0, height - 1)
    columns = (torch.arange(width) - dx[:, None]).clamp(0, width - 1)
    which = torch.arange(n)[:, None, None]
    return images[which, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def square_only(images, dx, dy):
    side = images.shape[-1]
    cut = indexed(images[:, :, :side], dx, dy)
    return torch.cat([cut, images[:, :, side:]], 2)


# ---- fold


def with_rsqrt(weight, mean, var, gamma, beta):
    factor = gamma * torch.rsqrt(var + 1e-5)
    return [torch.einsum("oikl,o->oikl", weight, factor), beta - mean * factor]


def formula(eps_in=1e-5, eps_out=0.0, shape=(-1, 1, 1, 1), sign=-1, gamma_in_bias=True):
    def fold(weight, mean, var, gamma, beta):
        factor = gamma / ((var + eps_in).sqrt() + eps_out)
        bias = mean * (factor if gamma_in_bias else factor / gamma)
        return weight * factor.view(*shape), beta + sign * bias

    return fold


RIGHT = [
    ("count_pairs", one_hot_product),
    ("count_pairs", counted),
    ("count_pairs", put),
    ("smooth_loss", by_gather),
    ("smooth_loss", by_targets),
    ("smooth_loss", by_logsumexp),
    ("shift", indexed),
    ("shift", padded),
    ("fold", formula()),
    ("fold", with_rsqrt),
]

WRONG = [
    ("count_pairs", lambda a, b, n: counted(b, a, n), "value: "),
    ("count_pairs", lambda a, b, n: counted(a, b, n).float(), "dtype: expected torch.int64"),
    ("count_pairs", lambda a, b, n: counted(a, b, n) / max(len(a), 1), "dtype: "),
    ("count_pairs", without_minlength, "expected a result, got RuntimeError"),
    ("count_pairs", not_accumulated, "value: "),
    ("count_pairs", in_bytes, "value: "),
    ("count_pairs", in_half, "value: "),
    ("count_pairs", as_many_classes_as_seen, "shape: expected [9, 9], got [7, 7]"),
    ("count_pairs", lambda a, b, n: counted(a, b, n).tolist(), "expected Tensor, got list"),
    ("smooth_loss", lambda z, t, s: F.cross_entropy(z, t), "value: "),
    ("smooth_loss", log_of_softmax, "some of yours are inf or nan"),
    ("smooth_loss", spread_over_the_others, "value: "),
    ("smooth_loss", lambda z, t, s: by_gather(z, t, s) * len(t), "value: "),
    ("smooth_loss", lambda z, t, s: by_gather(z, t, s).detach(), "is cut off from its arguments"),
    ("smooth_loss", lambda z, t, s: by_gather(z, t, 1 - s), "value: "),
    ("smooth_loss", lambda z, t, s: by_gather(z, t, s).item(), "expected Tensor, got float"),
    ("shift", rolled, "value: "),
    ("shift", padded_by_30, "expected a result, got IndexError"),
    ("shift", border_repeated, "value: "),
    ("shift", square_only, "value: "),
    ("shift", lambda x, dx, dy: indexed(x, dy, dx), "value: "),
    ("shift", lambda x, dx, dy: indexed(x, -dx, -dy), "value: "),
    ("shift", lambda x, dx, dy: indexed(x.float(), dx, dy), "dtype: expected torch.uint8"),
    ("shift", lambda x, dx, dy: indexed(x, dx[:1].expand_as(dx), dy), "value: "),
    ("shift", lambda x, dx, dy: indexed(x[:, :1], dx, dy), "shape: "),
    ("fold", formula(eps_in=0.0), "result 1: value: "),
    ("fold", formula(eps_in=0.0, eps_out=1e-5), "value: "),
    ("fold", formula(eps_in=1e-3), "result 1: value: "),
    ("fold", formula(shape=(1, -1, 1, 1)), "shape: "),
    ("fold", formula(shape=(1, 1, 1, -1)), "expected a result, got RuntimeError"),
    ("fold", formula(sign=+1), "result 2: value: "),
    ("fold", formula(gamma_in_bias=False), "result 2: value: "),
    ("fold", lambda w, m, v, g, b: formula()(w, m, v, g, b)[0], "expected tuple, got Tensor"),
]
