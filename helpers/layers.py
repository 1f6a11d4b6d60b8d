"""Chapter 04: layers of one's own that load PyTorch's state_dict, and the size of a convolution."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Images: N batch, C channels, H W image, K kernel, G groups.
# Attention: B batch, T queries, S keys, E width, H heads, D = E/H numbers in a head.


def conv_size(size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Return the output length of a convolution or pooling along one dimension."""
    reach = dilation * (kernel - 1) + 1  # what the kernel spans, its gaps included
    if reach > size + 2 * padding:
        raise ValueError(f"expected a kernel reach of at most {size + 2 * padding}, got {reach}")
    return (size + 2 * padding - reach) // stride + 1


class Linear(nn.Module):
    """y = x Wᵀ + b over the last dimension: [..., inputs] -> [..., outputs]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = _uniform(outputs, inputs, fan_in=inputs)
        self.bias = _uniform(outputs, fan_in=inputs)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != self.weight.shape[1:]:
            raise ValueError(f"expected the last size {self.weight.shape[1]}, got {list(x.shape)}")
        return x @ self.weight.T + self.bias


class Conv2d(nn.Module):
    """Cut out every window, then one matrix product: [N, C, H, W] -> [N, outputs, H', W']."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
    ):
        super().__init__()
        if inputs % groups or outputs % groups:
            raise ValueError(f"{inputs} and {outputs} channels: not divisible by {groups} groups")
        self.kernel, self.groups = kernel, groups
        self.geometry = {"stride": stride, "padding": padding, "dilation": dilation}
        fan_in = inputs // groups * kernel**2
        self.weight = _uniform(outputs, inputs // groups, kernel, kernel, fan_in=fan_in)
        self.bias = _uniform(outputs, fan_in=fan_in)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups
        channels = self.weight.shape[1] * groups
        if x.ndim != 4 or x.shape[1] != channels:
            raise ValueError(f"expected images [N, {channels}, H, W], got {list(x.shape)}")
        size = [conv_size(n, self.kernel, **self.geometry) for n in x.shape[2:]]

        windows = F.unfold(x, self.kernel, **self.geometry)  # [N, C K K, H' W']
        windows = windows.unflatten(1, (groups, -1))  # [N, G, C/G K K, H' W']
        weight = self.weight.flatten(1).unflatten(0, (groups, -1))  # [G, outputs/G, C/G K K]
        y = (weight @ windows).flatten(1, 2)  # [N, outputs, H' W']
        return (y + self.bias[:, None]).unflatten(2, size)


class BatchNorm(nn.Module):
    """Mean 0 and variance 1 for each channel of [N, C, ...], then scale and shift.

    In training by the batch, in evaluation by running means; https://arxiv.org/abs/1502.03167
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.weight):
            raise ValueError(f"expected [N, {len(self.weight)}, ...], got {list(x.shape)}")
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = self._moments(x)
        shape = [-1] + [1] * (x.ndim - 2)  # [C, 1, …]: broadcasts along dimension 1
        x = (x - mean.view(shape)) / (var.view(shape) + self.eps).sqrt()
        return x * self.weight.view(shape) + self.bias.view(shape)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance of each channel, and move the running ones."""
        values = x.transpose(0, 1).flatten(1)  # [C, n]
        n = values.shape[1]
        if n == 1:
            raise ValueError(f"training needs more than one value a channel, got {list(x.shape)}")
        mean = values.mean(1)
        var = (values - mean[:, None]).square().mean(1)
        self.num_batches_tracked += 1
        if n:  # an empty batch has no moments
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(var.detach() * n / (n - 1), self.momentum)  # the unbiased one
        return mean, var


class LayerNorm(nn.Module):
    """BatchNorm's twin over the last dimensions of each sample; https://arxiv.org/abs/1607.06450"""

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5):
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.shape))
        self.bias = nn.Parameter(torch.zeros(self.shape))

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-len(self.shape) :]) != self.shape:
            raise ValueError(f"expected the last dimensions {self.shape}, got {list(x.shape)}")
        over = [-1 - d for d in range(len(self.shape))]  # the last dimensions
        x = x - x.mean(over, keepdim=True)
        var = x.square().mean(over, keepdim=True)
        return x / (var + self.eps).sqrt() * self.weight + self.bias


class MultiheadAttention(nn.Module):
    """softmax(Q Kᵀ / √D) V in each head; https://arxiv.org/abs/1706.03762

    width: embed_dim in PyTorch, n_embd in nanoGPT. heads: num_heads, n_head.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} cannot be split into {heads} heads")
        self.heads = heads
        self.out_proj = Linear(width, width)
        nn.init.zeros_(self.out_proj.bias)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))  # Q, K, V stacked
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        """[B, T, E] -> [B, T, E]; keys and values from `memory` [B, S, E], else from `query`."""
        if memory is None:
            memory = query
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q = self._split(query @ weights[0].T + biases[0])  # [B, H, T, D]
        k = self._split(memory @ weights[1].T + biases[1])  # [B, H, S, D]
        v = self._split(memory @ weights[2].T + biases[2])

        scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, H, T, S]
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)

        y = scores.softmax(-1) @ v  # [B, H, T, D]
        return self.out_proj(y.transpose(1, 2).flatten(2))  # heads side by side: [B, T, E]

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, H, T, D]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """PyTorch's default: uniform within ± 1/√fan_in, a variance of 1/(3 fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
