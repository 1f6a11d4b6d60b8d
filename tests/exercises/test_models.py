import torch
import torch.nn.functional as F
from torch import nn

from helpers.exercises import check
from helpers.exercises.models import _bottleneck, _transposed_size


def rms_norm(forward):
    """A class whose `forward(self, x)` is the given one."""

    class RMSNorm(nn.Module):
        def __init__(self, size, eps):
            super().__init__()
            self.eps, self.weight = eps, nn.Parameter(torch.ones(size))

    RMSNorm.forward = forward
    return RMSNorm


def mean_square(x):
    return x.square().mean(-1, keepdim=True)


NORM_RIGHT = [
    rms_norm(lambda self, x: x * (mean_square(x) + self.eps).rsqrt() * self.weight),
    rms_norm(lambda self, x: self.weight * x / ((x**2).mean(dim=-1) + self.eps).sqrt()[..., None]),
    rms_norm(lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.eps)),
]
NORM_WRONG = {
    "eps outside of the root": lambda self, x: x / (mean_square(x).sqrt() + self.eps) * self.weight,
    "no eps": lambda self, x: x * mean_square(x).rsqrt() * self.weight,
    "no weight": lambda self, x: x * (mean_square(x) + self.eps).rsqrt(),
    "no root": lambda self, x: x / (mean_square(x) + self.eps) * self.weight,
    "over everything": lambda self, x: x * (x.square().mean() + self.eps).rsqrt() * self.weight,
    "over the first dimension": lambda self, x: (
        x * (x.square().mean(0, keepdim=True) + self.eps).rsqrt() * self.weight
    ),
    "a sum": lambda self, x: x * (mean_square(x) * x.shape[-1] + self.eps).rsqrt() * self.weight,
    "layer normalization": lambda self, x: F.layer_norm(
        x, self.weight.shape, self.weight, eps=self.eps
    ),
    "the standard deviation": lambda self, x: (
        x / (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt() * self.weight
    ),
    "gradient cut off": lambda self, x: (
        x * (mean_square(x) + self.eps).rsqrt().detach() * self.weight
    ),
    "an eps of its own": lambda self, x: x * (mean_square(x) + 1e-5).rsqrt() * self.weight,
    "float32": lambda self, x: NORM_RIGHT[0].forward(self, x.float()).to(x),
}
NORM_WRONG = {name: rms_norm(forward) for name, forward in NORM_WRONG.items()}


def transposed_size(n, kernel, stride, padding, output_padding, dilation):
    return (n - 1) * stride + dilation * (kernel - 1) + 1 - 2 * padding + output_padding


def transposed_in_floats(n, kernel, stride, padding, output_padding, dilation):
    return float(transposed_size(n, kernel, stride, padding, output_padding, dilation)) // 1


TRANSPOSED_WRONG = {
    "no dilation": lambda n, k, s, p, o, d: (n - 1) * s + k - 2 * p + o,
    "no output padding": lambda n, k, s, p, o, d: (n - 1) * s + d * (k - 1) + 1 - 2 * p,
    "padding once": lambda n, k, s, p, o, d: (n - 1) * s + d * (k - 1) + 1 - p + o,
    "padding added": lambda n, k, s, p, o, d: (n - 1) * s + d * (k - 1) + 1 + 2 * p + o,
    "kernel times dilation": lambda n, k, s, p, o, d: (n - 1) * s + d * k - 2 * p + o,
    "one window too many": lambda n, k, s, p, o, d: n * s + d * (k - 1) + 1 - 2 * p + o,
    "not transposed": lambda n, k, s, p, o, d: (n + 2 * p - d * (k - 1) - 1) // s + 1 + o,
}


def bottleneck(inputs, width):
    out = 4 * width
    main = inputs * width + 9 * width**2 + width * out + 2 * (2 * width + out)
    return main + (inputs * out + 2 * out if inputs != out else 0)


def bottleneck_other(inputs, width):
    shortcut = (4 * inputs * width + 8 * width) * (inputs != 4 * width)
    return width * (inputs + 9 * width + 4 * width + 12) + shortcut


BOTTLENECK_WRONG = {
    "always a shortcut": lambda i, w: bottleneck(i, w) + (4 * i * w + 8 * w) * (i == 4 * w),
    "never a shortcut": lambda i, w: bottleneck(4 * w, w) - 4 * w * w + i * w,
    "no batch normalization": lambda i, w: bottleneck(i, w) - 12 * w,
    "half of each batch normalization": lambda i, w: bottleneck(i, w) - 6 * w,
    "with biases": lambda i, w: bottleneck(i, w) + 6 * w,
    "3 for 3x3": lambda i, w: bottleneck(i, w) - 6 * w**2,
    "shortcut without normalization": lambda i, w: bottleneck(i, w) - 8 * w * (i != 4 * w),
    "running statistics": lambda i, w: bottleneck(i, w) + 12 * w,
}


class Residual(nn.Module):
    """The solution, with what a mistake may change as class attributes."""

    bias, momentum, eps, relu_first, relu_last = False, 0.1, 1e-5, True, True
    stride_at, project_when, projection_norm = 1, "needed", True

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        first, second = (stride, 1) if self.stride_at == 1 else (1, stride)
        norm = {"momentum": self.momentum, "eps": self.eps}
        self.conv1 = nn.Conv2d(inputs, outputs, 3, first, padding=1, bias=self.bias)
        self.bn1 = nn.BatchNorm2d(outputs, **norm)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, second, padding=1, bias=self.bias)
        self.bn2 = nn.BatchNorm2d(outputs, **norm)
        needed = {
            "needed": stride != 1 or inputs != outputs,
            "channels": inputs != outputs,
            "never": False,
            "always": True,
        }[self.project_when]
        self.downsample = None
        if needed:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            last = nn.BatchNorm2d(outputs, **norm) if self.projection_norm else nn.Identity()
            self.downsample = nn.Sequential(projection, last)

    def forward(self, x):
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y.relu() if self.relu_first else y))
        y = y + (x if self.downsample is None else self.downsample(x))
        return y.relu() if self.relu_last else y


class ResidualByFunctions(Residual):
    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return torch.clamp(shortcut + self.bn2(self.conv2(y)), min=0)


class SpoilsItsInput(Residual):
    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y * 0.5 + (x if self.downsample is None else self.downsample(x))).relu()


class NoShortcut(Residual):
    def forward(self, x):
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()


class CutOff(Residual):
    def forward(self, x):
        return super().forward(x.detach()) + 0 * x.sum()


class AlwaysByBatch(Residual):
    """Batch normalization that stays in training mode."""

    def train(self, mode=True):
        return super().train(True)


def block(**changes):
    return type("Residual", (Residual,), changes)


RESIDUAL_WRONG = {
    "momentum 0.5": block(momentum=0.5),
    "another eps": block(eps=1e-3),
    "with biases": block(bias=True),
    "no ReLU inside": block(relu_first=False),
    "no ReLU at the end": block(relu_last=False),
    "stride in the second convolution": block(stride_at=2),
    "no projection for a stride": block(project_when="channels"),
    "no projection": block(project_when="never"),
    "always a projection": block(project_when="always"),
    "projection without normalization": block(projection_norm=False),
    "no shortcut": NoShortcut,
    "half the branch": SpoilsItsInput,
    "gradient cut off": CutOff,
    "training mode for ever": AlwaysByBatch,
}


def local(q, k, v, window):
    steps = torch.arange(q.shape[2])
    apart = steps[:, None] - steps
    scores = q @ k.mT / q.shape[3] ** 0.5
    scores = scores.masked_fill((apart < 0) | (apart >= window), -torch.inf)
    return scores.softmax(3) @ v


def local_by_band(q, k, v, window):
    band = torch.ones(q.shape[2], q.shape[2]).tril().triu(1 - window)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
    return torch.softmax(scores + band.log().to(q), -1).matmul(v)


def local_with(mask=None, scale=None, softmax=torch.softmax):
    """`local` with another mask (True: seen), another scale or another softmax."""

    def answer(q, k, v, window):
        steps = torch.arange(q.shape[2])
        apart = steps[:, None] - steps
        seen = (apart >= 0) & (apart < window) if mask is None else mask(apart, window)
        factor = q.shape[3] ** -0.5 if scale is None else scale(q)
        return softmax((q @ k.mT * factor).masked_fill(~seen, -torch.inf), -1) @ v

    return answer


def plain_softmax(x, dim):
    return x.exp() / x.exp().sum(dim, keepdim=True)


LOCAL_WRONG = {
    "sees the future": local_with(mask=lambda apart, window: apart.abs() < window),
    "one too many": local_with(mask=lambda apart, window: (apart >= 0) & (apart <= window)),
    "no window": local_with(mask=lambda apart, window: apart >= 0),
    "window in the future": local_with(mask=lambda apart, window: (apart <= 0) & (-apart < window)),
    "blocks": local_with(mask=lambda a, w: (a >= 0) & (a <= torch.arange(len(a))[:, None] % w)),
    "no scale": local_with(scale=lambda q: 1.0),
    "scale by D": local_with(scale=lambda q: 1 / q.shape[3]),
    "scale by T": local_with(scale=lambda q: q.shape[2] ** -0.5),
    "exp overflows": local_with(softmax=plain_softmax),
    "softmax over queries": local_with(softmax=lambda x, dim: x.softmax(-2)),
    "masked after softmax": lambda q, k, v, window: (
        (q @ k.mT / q.shape[3] ** 0.5).softmax(-1).tril().triu(1 - window) @ v
    ),
    "masked with 0": lambda q, k, v, window: (
        (q @ k.mT / q.shape[3] ** 0.5).tril().triu(1 - window).softmax(-1) @ v
    ),
    "gradient cut off": lambda q, k, v, window: local(q.detach(), k, v, window),
    "float32": lambda q, k, v, window: local(q.float(), k.float(), v.float(), window).to(q),
}

RIGHT = {
    "rms_norm": NORM_RIGHT,
    "transposed_size": [transposed_size, transposed_in_floats],
    "bottleneck": [bottleneck, bottleneck_other],
    "residual": [Residual, ResidualByFunctions],
    "local": [local, local_by_band],
}
WRONG = {
    "rms_norm": NORM_WRONG,
    "transposed_size": TRANSPOSED_WRONG,
    "bottleneck": BOTTLENECK_WRONG,
    "residual": RESIDUAL_WRONG,
    "local": LOCAL_WRONG,
}


class Unanswered(nn.Module):
    """What a stub that is a class returns."""

    def __init__(self, *sizes, eps=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return ...


STUBS = {"rms_norm": Unanswered, "residual": Unanswered}


def test_a_block_that_moves_its_statistics_otherwise_is_told_which(capsys):
    check("models.residual", block(momentum=0.5))
    assert "result 3: value" in capsys.readouterr().out  # the output in evaluation mode


def test_the_references_are_formulas_too():
    assert _bottleneck(256, 64) == 70_400  # ResNet-50, a block of its first stage
    assert _transposed_size(5, 3, 2, 1, 1, 1) == 10
