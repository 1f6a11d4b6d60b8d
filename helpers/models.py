"""Chapter 04: plain modules; every later chapter transforms them from outside."""

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


def init_kaiming(module: nn.Module) -> None:
    """Initialise for ReLU (He et al. 2015, https://arxiv.org/abs/1502.01852); use with `apply`."""
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
