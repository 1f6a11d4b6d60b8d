"""Chapter 04, exercises: RMSNorm, two formulas, a residual block, attention in a window."""

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet

from helpers.exercises.harness import Exercise


def _double(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def _norm_with_weight(kind: type[nn.Module]) -> Callable:
    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        module = kind(len(weight), eps=eps)
        return torch.func.functional_call(module, {"weight": weight}, x)

    return run


def _norm_cases() -> list[tuple]:
    return [
        (_double(4, 6) + 3, _double(6), 1e-5),
        (_double(2, 3, 5).mT, _double(3), 0.5),  # not contiguous; eps decides
        (torch.zeros(2, 4), torch.ones(4), 1e-6),
        (1e-4 * _double(3, 1), _double(1), 1e-5),
        (1e100 * _double(2, 5), _double(5), 1e-5),
        (_double(7), _double(7), 1e-5),
        (_double(0, 3), _double(3), 1e-5),
        (torch.randn(3, 8), torch.randn(8), 1e-5),  # float32
    ]


def _transposed_size(
    n: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> int:
    how = {"stride": stride, "padding": padding, "dilation": dilation}
    layer = nn.ConvTranspose1d(1, 1, kernel, output_padding=output_padding, device="meta", **how)
    return layer(torch.empty(1, n, device="meta")).shape[1]


def _transposed_cases() -> list[tuple]:
    cases = [(5, 3, 2, 1, 1, 1), (1, 1, 1, 0, 0, 1), (7, 4, 3, 2, 0, 2), (6, 2, 3, 0, 2, 4)]
    for n, kernel, stride, padding, dilation in product((4, 9), (3, 5), (1, 3), (0, 1), (1, 2)):
        largest = max(stride, dilation) - 1  # PyTorch asks for less than stride or dilation
        cases.append((n, kernel, stride, padding, largest, dilation))
    return cases


def _bottleneck(inputs: int, width: int) -> int:
    outputs = 4 * width
    shortcut = None
    if inputs != outputs:
        projection = nn.Conv2d(inputs, outputs, 1, bias=False, device="meta")
        shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs, device="meta"))
    with torch.device("meta"):
        block = resnet.Bottleneck(inputs, width, 1, shortcut)
    return sum(p.numel() for p in block.parameters())


def _basic_block(inputs: int, outputs: int, stride: int) -> nn.Module:
    shortcut = None
    if stride > 1 or inputs != outputs:
        projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))
    return resnet.BasicBlock(inputs, outputs, stride, shortcut)


def _trained_once(kind: Callable[..., nn.Module]) -> Callable:
    """Give a block known weights, run it once in each mode, and return what can be seen of it.

    Results: the output in training mode; the gradient of the input; the output in evaluation
    mode, which depends on the statistics that training mode has just moved; these statistics.
    """

    def run(x: Tensor, outputs: int, stride: int) -> tuple:
        inputs = x.shape[1]
        original = _basic_block(inputs, outputs, stride)
        numbers = torch.arange(sum(p.numel() for p in original.parameters())).sin()
        nn.utils.vector_to_parameters(numbers, original.parameters())

        block = kind(inputs, outputs, stride)
        if block(x.float()) is ...:
            return ...
        block.load_state_dict(original.state_dict())
        block.double()

        x = x.clone().requires_grad_()
        y = block.train()(x)
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        (gradient,) = torch.autograd.grad((y * weight).sum(), x)
        statistics = [b for name, b in sorted(block.named_buffers()) if "running" in name]
        with torch.no_grad():
            return (y.detach(), gradient, block.eval()(x), *statistics)

    return run


def _block_cases() -> list[tuple]:
    shapes = [(4, 2), (3, 1), (3, 2), (5, 1), (1, 3)]
    cases = [(_double(2, 3, 7, 4), outputs, stride) for outputs, stride in shapes]
    return [*cases, (3 * _double(4, 6, 5, 2).permute(0, 3, 1, 2) + 1, 2, 1)]


def _local(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    places = torch.arange(q.shape[2])
    apart = places[:, None] - places
    return F.scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart < window))


def _local_cases() -> list[tuple]:
    def qkv(*size: int) -> list[Tensor]:
        return [_double(*size) for _ in range(3)]

    large = [60 * _double(1, 1, 7, 4), 60 * _double(1, 1, 7, 4), _double(1, 1, 7, 4)]
    swapped = [_double(2, 6, 3, 4).transpose(1, 2) for _ in range(3)]  # not contiguous
    return [
        (*qkv(2, 2, 6, 4), 3),
        (*qkv(1, 1, 5, 2), 1),
        (*qkv(1, 2, 4, 3), 9),  # a window wider than the sequence
        (*large, 2),  # exp overflows
        (*swapped, 2),
        (*qkv(3, 2, 1, 4), 2),
        (*qkv(0, 2, 3, 4), 2),
        (*(x.float() for x in qkv(1, 2, 8, 16)), 4),
    ]


EXERCISES = {
    "rms_norm": Exercise(
        reference=nn.RMSNorm, cases=_norm_cases, through=_norm_with_weight, gradient=True
    ),
    "transposed_size": Exercise(reference=_transposed_size, cases=_transposed_cases),
    "bottleneck": Exercise(
        reference=_bottleneck,
        cases=lambda: [(256, 64), (64, 64), (8, 2), (3, 5), (4, 1), (1, 1)],
    ),
    "residual": Exercise(reference=_basic_block, cases=_block_cases, through=_trained_once),
    "local": Exercise(reference=_local, cases=_local_cases, gradient=True),
}
