import math

import torch


def peak(layers, width, vocabulary, tokens, parameters):
    block, loss = 20 * width, 3 * vocabulary
    larger = block if block > loss else loss
    return 3 * 4 * parameters + 4 * tokens * (layers * width + larger)


def weights(targets):
    counts = [t.ne(-100).sum().item() for t in targets]
    return [count / sum(counts) for count in counts]


def best_group(layers, ratio):
    best = 1
    for size in range(2, layers + 1):
        if math.ceil(layers / size) + size * ratio < math.ceil(layers / best) + best * ratio:
            best = size
    return best


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, torch.autograd.grad(y, x, gradient)[0]


class WithoutGradient(Recompute):
    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


RIGHT = {
    "peak": [peak],
    "weights": [weights],
    "best_group": [best_group],
    "checkpoint": [Recompute.apply],
}

WRONG = [
    ("peak", lambda n, c, v, t, p: 12 * p + 4 * t * (n + 20) * c, "case 2"),  # no logits
    ("peak", lambda n, c, v, t, p: 16 * p + 4 * t * max((n + 20) * c, n * c + 3 * v), "case 1"),
    ("peak", lambda n, c, v, t, p: 12 * p + 4 * t * ((n + 20) * c + 3 * v), "case 1"),  # a sum
    ("weights", lambda targets: [1 / len(targets)] * len(targets), "case 2"),
    ("weights", lambda ts: [len(t) / sum(map(len, ts)) for t in ts], "case 2"),
    ("weights", lambda ts: [t.gt(0).sum().item() / 8 for t in ts], "case"),
    ("best_group", lambda layers, ratio: round(layers**0.5), "case 2"),
    ("best_group", lambda layers, ratio: round((layers / ratio) ** 0.5), "case"),
    ("checkpoint", lambda function, x: function(x), "case 1"),  # right, but keeps everything
    ("checkpoint", lambda function, x: function(x.detach()), "case 1"),
    ("checkpoint", WithoutGradient.apply, "case 1"),
]
