"""Chapter 04: plain modules; every later chapter transforms them from outside."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between: [N, sizes[0]] -> [N, sizes[-1]]."""

    def __init__(self, *sizes: int):
        if len(sizes) < 2:
            raise ValueError(f"expected at least an input and an output size, got {sizes}")
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        super().__init__(*layers[:-1])  # logits are not rectified
        self.apply(init_kaiming)


class ConvNet(nn.Sequential):
    """Two conv blocks, one more convolution, a linear layer: [N, 1, 28, 28] -> [N, classes].

    Strides shrink the image, not pooling: what is thrown away is never computed.
    """

    def __init__(self, classes: int = 10, width: int = 24, dropout: float = 0.3):
        super().__init__(
            _conv(1, width, kernel=5, stride=2),  # block 1: [N, width, 14, 14]
            _conv(width, width),
            _conv(width, 2 * width, stride=2),  # block 2: [N, 2 width, 7, 7]
            _conv(2 * width, 2 * width),
            _conv(2 * width, 4 * width, stride=2),  # [N, 4 width, 4, 4]
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(4 * width * 4 * 4, classes),
        )
        self.apply(init_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != (1, 28, 28):
            raise ValueError(f"expected images [N, 1, 28, 28], got {list(x.shape)}")
        return super().forward(x)


def _conv(fan_in: int, fan_out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        # no bias: batch norm subtracts the mean and would cancel it
        nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(fan_out),
        nn.ReLU(),
    )


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a `GPT`; in brackets, what nanoGPT calls them.

    vocabulary [vocab_size]: how many different tokens. context [block_size]: the longest sequence.
    layers [n_layer]: blocks. heads [n_head]: of attention. width [n_embd]: numbers for each token.
    Raises ValueError for a size below 1, and for a width that heads cannot share equally.
    """

    vocabulary: int
    context: int
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.0

    def __post_init__(self):
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be split into {self.heads} heads")


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); [B, T, C] -> [B, T, C].

    B sequences, T tokens, C = width, H heads, D = C/H numbers in a head.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)  # queries, keys and values in one product
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.config.heads, -1))  # [B, T, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        p = self.config.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.dropout(self.projection(y.transpose(1, 2).flatten(2)))  # heads side by side
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Predict each next token from those before it: int64 [B, T] -> logits [B, T, vocabulary].

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2)
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.tokens = nn.Embedding(config.vocabulary, width)
        self.positions = nn.Embedding(config.context, width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied: one matrix reads and writes tokens
        self._initialize()

    def _initialize(self) -> None:
        """GPT-2's: normal with 0.02, smaller where a block adds to the residual stream."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "norm" not in name:
                std = 0.02
                # two sums a layer enter the residual stream: shrink each, their total stays
                if name.endswith(("projection.weight", "mlp.2.weight")):
                    std /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(p, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2 or tokens.shape[1] > self.config.context:
            expected = f"[B, T] with T at most {self.config.context}"
            raise ValueError(f"expected tokens {expected}, got {list(tokens.shape)}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_kaiming(module: nn.Module) -> None:
    """Initialise for ReLU (He et al. 2015, https://arxiv.org/abs/1502.01852); use with `apply`."""
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
