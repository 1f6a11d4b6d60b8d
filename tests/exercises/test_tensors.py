import pytest
import torch
import torch.nn.functional as F

from helpers.exercises import check


def dot(index, stride):
    return sum(i * s for i, s in zip(index, stride, strict=True))


def scaled(table, low, high):
    return (table - low) / (high - low)


def framed(image, value, *places):
    out = image.clone()
    for place in places:
        out[place] = value
    return out


EVERYWHERE = slice(None)
SIDES = (0, -1, (EVERYWHERE, 0), (EVERYWHERE, -1))


def frame_in_place(image, value):
    image[0] = image[-1] = image[:, 0] = image[:, -1] = value
    return image


def causal(n):
    return torch.arange(n)[:, None] >= torch.arange(n)


def square_distances(a, b):
    return (a[:, None] - b).square().sum(dim=2)


def expanded_distances(a, b):
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return squares.clamp(min=0).sqrt()


def cut(image, p):
    return image.view(image.shape[0] // p, p, image.shape[1] // p, p)


def loss(logits, target, log_sum):
    chosen = logits.gather(1, target[:, None]).squeeze(1)
    return log_sum - chosen


def loop_of_sums(x):
    sums = [x[: i + 1].sum() for i in range(len(x))]
    return torch.stack(sums)  # nothing to stack where x is empty


WRONG = {
    "add_frame": [
        frame_in_place,
        lambda image, value: framed(image, value, *SIDES[:3]),
        lambda image, value: framed(image, value, 0, -1),
        lambda image, value: F.pad(image, (1, 1, 1, 1), value=value),  # larger
        lambda image, value: framed(image, value, EVERYWHERE),
        lambda image, value: framed(image, value, *SIDES).float(),
        lambda image, value: framed(image, 255, *SIDES),
        lambda image, value: image.clone(),
        lambda image, value: F.pad(image[1:-1, 1:-1], (1, 1, 1, 1), value=value),  # 1 × 1
    ],
    "blend": [
        lambda a, b: (a + b) // 2,  # wraps around
        lambda a, b: a // 2 + b // 2,  # two halves are lost
        lambda a, b: ((a.float() + b.float()) / 2).round().to(torch.uint8),
        lambda a, b: (a.float() + b.float()) / 2,
        lambda a, b: (a.long() + b.long()) // 2,
        lambda a, b: (a.float() + b.float()).clamp(0, 255).to(torch.uint8),
        lambda a, b: ((a + b) / 2).to(torch.uint8),
        lambda a, b: a,
    ],
    "days_above": [
        lambda t, city, limit: t[t > limit],
        lambda t, city, limit: t[t[city] > limit],
        lambda t, city, limit: t[t[:, city] >= limit],
        lambda t, city, limit: t[t[:, city] < limit],
        lambda t, city, limit: t[:, city][t[:, city] > limit],
        lambda t, city, limit: t[:, city] > limit,
        lambda t, city, limit: torch.where(t[:, city, None] > limit, t, 0),
        lambda t, city, limit: t[(t > limit).any(dim=1)],
        lambda t, city, limit: t[t[:, 0] > limit],
    ],
    "scale_columns": [
        lambda t: scaled(t, t.min(), t.max()),  # of the whole table
        lambda t: scaled(t, t.amin(1, keepdim=True), t.amax(1, keepdim=True)),  # of each row
        lambda t: scaled(t, t.amin(1), t.amax(1)),
        lambda t: scaled(t, t.amin(0), t.amax(0)).float(),
        lambda t: scaled(t, 0, t.amax(0)),
        lambda t: t - t.amin(0),
        lambda t: scaled(t, t.amax(0), t.amin(0)),  # upside down
        lambda t: (t - t.mean(0)) / t.std(0),
        lambda t: scaled(t, t.amin(0), t.amax(0)).clamp(0.1, 0.9),
        lambda t: (t - t.amin(0)) / (t.amax(0) - t.amin(0) + 1e-3),
        lambda t: t.sub_(t.amin(0)).div_(t.amax(0)),  # changes the reader's table
        lambda t: scaled(t[:, :1], t.amin(0), t.amax(0)),
        lambda t: scaled(t, t.min(dim=0).indices, t.max(dim=0).indices),
    ],
    "element": [
        lambda s, stride, offset, index: s[dot(index, stride)],
        lambda s, stride, offset, index: s[offset + dot(index, stride)].item(),
        lambda s, stride, offset, index: s[offset + dot(index, reversed(stride))],
        lambda s, stride, offset, index: s[offset + dot(index, stride) :][:1],
        lambda s, stride, offset, index: s[offset + sum(index)],
        lambda s, stride, offset, index: s[(offset + dot(index, stride)) % 24],
        lambda s, stride, offset, index: s[offset + dot(index, stride)].float(),
        lambda s, stride, offset, index: torch.tensor(11),
        lambda s, stride, offset, index: s.untyped_storage()[
            offset + dot(index, stride)
        ],  # bytes, not elements
        lambda s, stride, offset, index: s.as_strided([i + 1 for i in index], stride, offset)[
            index
        ],
        lambda s, stride, offset, index: torch.as_strided(s, (1,), (1,), offset)[0],
    ],
    "one_hot": [
        lambda labels, n: labels[:, None] == torch.arange(n),
        lambda labels, n: (labels[:, None] == torch.arange(n)).float(),
        lambda labels, n: (labels[:, None] == torch.arange(n)).int(),
        lambda labels, n: (labels == torch.arange(n)[:, None]).long(),
        lambda labels, n: (labels[:, None] == torch.arange(1, n + 1)).long(),
        lambda labels, n: (labels[:, None] >= torch.arange(n)).long(),
        lambda labels, n: (labels[:, None] == torch.arange(labels.max() + 1)).long(),
        lambda labels, n: (labels[:, None] == torch.arange(3)).long(),
        lambda labels, n: torch.eye(n)[labels],
        lambda labels, n: F.one_hot(labels, n) * 1,
    ],
    "causal": [
        lambda n: torch.arange(n)[:, None] > torch.arange(n),
        lambda n: torch.arange(n)[:, None] <= torch.arange(n),
        lambda n: causal(n).long(),
        lambda n: causal(n).float(),
        lambda n: torch.arange(n) >= torch.arange(n),
        lambda n: torch.arange(4)[:, None] >= torch.arange(4),
        lambda n: torch.eye(n).bool(),
        lambda n: torch.ones(n, n).tril().bool(),
    ],
    "running_sum": [
        lambda x: (causal(len(x)).float() @ x.float()).to(x.dtype),  # float64 through float32
        lambda x: causal(len(x)).float() @ x,
        lambda x: causal(len(x)).to(x.dtype).T @ x,
        lambda x: (causal(len(x)).to(x.dtype) - torch.eye(len(x), dtype=x.dtype)) @ x,
        lambda x: (causal(len(x)) * x).sum(1).float(),
        lambda x: (causal(len(x)) * x).sum(0),
        lambda x: x.sum(),
        lambda x: torch.tensor([1.0, -1.0, 3.0]),
        loop_of_sums,
        lambda x: x.cumsum(0),
    ],
    "distances": [
        square_distances,
        expanded_distances,
        lambda a, b: square_distances(a, b).sqrt().T,
        lambda a, b: (a[:, None] - b).abs().sum(2),
        lambda a, b: (a[:, None] - b).square().mean(2).sqrt(),
        lambda a, b: (square_distances(a, b) + 1e-6).sqrt(),
        lambda a, b: square_distances(a, b).sqrt().float(),
        lambda a, b: (a - b).square().sum(1).sqrt(),
        lambda a, b: (a[:, None] - b).square().sum(1).sqrt(),
        lambda a, b: torch.cdist(a, b),
    ],
    "patches": [
        lambda image, p: image.reshape(image.shape[0] // p, image.shape[1] // p, p, p),
        lambda image, p: cut(image, p),
        lambda image, p: cut(image, p).permute(0, 2, 3, 1),
        lambda image, p: cut(image, p).permute(2, 0, 1, 3),
        lambda image, p: cut(image, p).permute(0, 2, 1, 3).contiguous(),
        lambda image, p: cut(image, p).permute(0, 2, 1, 3).clone(),
        lambda image, p: cut(image.contiguous(), p).permute(0, 2, 1, 3),
        lambda image, p: cut(image, 2).permute(0, 2, 1, 3),
        lambda image, p: image.unfold(0, p, p).unfold(1, p, p),
        lambda image, p: torch.stack([row.view(p, -1, p) for row in image.view(-1, p * p)]),
        lambda image, p: cut(image, p).permute(0, 2, 1, 3).flatten(0, 1),
    ],
    "cross_entropy": [
        lambda z, y: loss(z, y, z.exp().sum(1).log()),  # overflows
        lambda z, y: -z.softmax(1).gather(1, y[:, None]).log().squeeze(1),  # log of 0
        lambda z, y: -(z.softmax(1).gather(1, y[:, None]) + 1e-9).log().squeeze(1),
        lambda z, y: loss(z, y, z.logsumexp(0)) if z.shape[0] == z.shape[1] else z.logsumexp(0)[0],
        lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None]).squeeze(1)).sum(),
        lambda z, y: loss(z, y, z.logsumexp(1)).mean(),
        lambda z, y: z.gather(1, y[:, None]).squeeze(1) - z.logsumexp(1),
        lambda z, y: z.logsumexp(1) - z.gather(1, y[:, None]),  # N × N
        lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])).mean(),  # N × N, the right mean
        lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])).mean(1),
        lambda z, y: loss(z, y, z.logsumexp(1).detach()),
        lambda z, y: loss(z, y, z.logsumexp(1)).detach(),
        lambda z, y: loss(z, y, z.float().logsumexp(1)).float(),
        lambda z, y: loss(z, y, z.amax(1)),
        lambda z, y: -z.log_softmax(1).gather(1, y[:, None]).squeeze(1),
        lambda z, y: F.nll_loss(z - z.logsumexp(1, keepdim=True), y, reduction="none"),
    ],
}

RIGHT = {
    "add_frame": [
        lambda image, value: framed(image, value, *SIDES),
        lambda image, value: framed(image, value, [0, -1], (EVERYWHERE, [0, -1])),
    ],
    "blend": [
        lambda a, b: ((a.float() + b.float()) / 2).to(torch.uint8),
        lambda a, b: ((a.long() + b.long()) // 2).to(torch.uint8),
        lambda a, b: torch.stack([a, b]).float().mean(dim=0).to(torch.uint8),
    ],
    "days_above": [
        lambda t, city, limit: t[t[:, city] > limit],
        lambda t, city, limit: t[(t[:, city] > limit).nonzero().squeeze(1)],
        lambda t, city, limit: t.index_select(0, torch.where(t[:, city] > limit)[0]),
    ],
    "scale_columns": [
        lambda t: scaled(t, t.min(dim=0).values, t.max(dim=0).values),
        lambda t: scaled(t, t.amin(0, keepdim=True), t.amax(0, keepdim=True)),
        lambda t: torch.stack([scaled(c, c.min(), c.max()) for c in t.T], dim=1),
        lambda t: ((t.T - t.amin(0)[:, None]) / (t.amax(0) - t.amin(0))[:, None]).T,
    ],
    "element": [
        lambda s, stride, offset, index: s[offset + dot(index, stride)],
        lambda s, stride, offset, index: s[offset:][dot(index, stride)],
        lambda s, stride, offset, index: s.select(0, offset + dot(index, stride)),
        lambda s, stride, offset, index: s[torch.tensor(offset + dot(index, stride))],
    ],
    "one_hot": [
        lambda labels, n: (labels[:, None] == torch.arange(n)).long(),
        lambda labels, n: torch.eye(n, dtype=torch.int64)[labels],
        lambda labels, n: (labels.unsqueeze(1) == torch.arange(n)) * 1,
        lambda labels, n: torch.zeros(len(labels), n, dtype=torch.int64).scatter(
            1, labels[:, None], 1
        ),
    ],
    "causal": [
        causal,
        lambda n: torch.arange(n) <= torch.arange(n)[:, None],
        lambda n: torch.arange(n)[:, None] - torch.arange(n) > -1,
    ],
    "running_sum": [
        lambda x: causal(len(x)).to(x.dtype) @ x,
        lambda x: (causal(len(x)) * x).sum(1),
        lambda x: torch.where(causal(len(x)), x, 0).sum(1),
    ],
    "distances": [
        lambda a, b: square_distances(a, b).sqrt(),
        lambda a, b: (a.unsqueeze(1) - b.unsqueeze(0)).norm(dim=-1),
        lambda a, b: ((b - a[:, None]) ** 2).sum(-1) ** 0.5,
    ],
    "patches": [
        lambda image, p: cut(image, p).permute(0, 2, 1, 3),
        lambda image, p: cut(image, p).transpose(1, 2),
        lambda image, p: image.unflatten(0, (-1, p)).unflatten(2, (-1, p)).swapaxes(1, 2),
        lambda image, p: cut(image, p).movedim(2, 1),
    ],
    "cross_entropy": [
        lambda z, y: loss(z, y, z.logsumexp(1)),
        lambda z, y: z.logsumexp(1) - z[torch.arange(len(z)), y],
        lambda z, y: loss(z, y, (z - z.amax(1, keepdim=True)).exp().sum(1).log() + z.amax(1)),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("scale_columns", WRONG["scale_columns"][10], "argument 1 was changed in place"),
        ("one_hot", WRONG["one_hot"][0], "dtype: expected torch.int64, got torch.bool"),
        ("patches", WRONG["patches"][5], "right values, but a copy"),
        ("cross_entropy", WRONG["cross_entropy"][10], "gradient of argument 1"),
        ("running_sum", WRONG["running_sum"][0], "2 of 5 elements differ"),
        ("element", WRONG["element"][9], "to be solved without as_strided"),
        ("distances", WRONG["distances"][1], "elements differ, by up to"),
    ],
)
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"tensors.{name}", answer)
    assert words in capsys.readouterr().out
