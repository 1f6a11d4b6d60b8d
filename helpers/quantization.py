"""Chapter 16: affine quantization by hand: grids, calibration, integer products, QAT, int4."""

import copy
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import chi2
from torch import Tensor, nn

FEW = 10  # changed samples, below which the normal approximation promises too much

# ---- a grid of evenly spaced numbers, and what becomes of a tensor on it


@dataclass(frozen=True)
class Grid:
    """Evenly spaced real numbers, one for each integer: real = scale * (integer - zero_point).

    scale: float tensor that broadcasts over the tensor to be quantized. zero_point: int32 tensor
    of the same shape, the integer that stands for 0.0. low, high: the smallest and the largest
    integer. group: None, or how many neighbors in the last dimension share a scale; `scale` then
    has the shape [..., groups, 1].
    """

    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    group: int | None = None

    def quantize(self, x: Tensor) -> Tensor:
        """Return the integer nearest to each number, int8 (uint8 where `low` is 0), shape of x."""
        steps = _split(x, self.group) / self.scale
        integers = (steps.round() + self.zero_point).clamp(self.low, self.high)
        dtype = torch.uint8 if self.low == 0 else torch.int8
        return integers.to(dtype).reshape(x.shape)

    def dequantize(self, integers: Tensor) -> Tensor:
        """Return the real numbers that the integers stand for, in the dtype of `scale`."""
        steps = _split(integers, self.group).to(torch.int32) - self.zero_point
        return (steps * self.scale).reshape(integers.shape)

    def round_trip(self, x: Tensor) -> Tensor:
        """Return x with each number replaced by the nearest one of the grid."""
        return self.dequantize(self.quantize(x))


def integer_range(bits: int, symmetric: bool = True) -> tuple[int, int]:
    """Return the smallest and the largest integer of a grid.

    Symmetric grids leave one pattern out, -128 of 8 bits, so that -x is there for each x. The
    others count from 0. Raises ValueError unless 2 <= bits <= 8.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"expected 2 to 8 bits, got {bits}")
    if symmetric:
        top = 2 ** (bits - 1) - 1
        return -top, top
    return 0, 2**bits - 1


def make_grid(
    lowest: Tensor,
    highest: Tensor,
    bits: int = 8,
    symmetric: bool = True,
    group: int | None = None,
) -> Grid:
    """Return the grid that covers [lowest, highest] and has 0.0 among its numbers.

    lowest, highest: float tensors of one shape, one pair for each scale. A range of zeros gets the
    scale 1. Raises ValueError where lowest > highest or where one of them is not finite.
    """
    if not bool((lowest <= highest).all() & lowest.isfinite().all() & highest.isfinite().all()):
        got = f"lowest {lowest.min().item()}, highest {highest.max().item()}"
        raise ValueError(f"expected finite ranges with lowest <= highest, got {got}")
    low, high = integer_range(bits, symmetric)
    lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)  # 0.0 has to be on the grid

    if symmetric:
        scale = torch.maximum(-lowest, highest) / high
    else:
        scale = (highest - lowest) / (high - low)
    scale = torch.where(scale == 0, 1.0, scale)

    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if not symmetric:
        zero_point = (low - (lowest / scale).round()).clamp(low, high).to(torch.int32)
    return Grid(scale, zero_point, low, high, group)


def grid_of(
    x: Tensor,
    bits: int = 8,
    symmetric: bool = True,
    *,
    channel: int | None = None,
    group: int | None = None,
) -> Grid:
    """Return a grid that covers all of x: one scale, or one for each channel or group.

    channel: the dimension whose slices have a scale each, such as 0 for the rows of a weight.
    group: so many neighbors in the last dimension share a scale. Raises ValueError for both at
    once, and for a group that does not divide the last dimension.
    """
    if channel is not None and group is not None:
        raise ValueError("expected a channel or a group, got both")
    if group is not None:
        if x.shape[-1] % group:
            raise ValueError(f"groups of {group} do not divide a dimension of {x.shape[-1]}")
        split = _split(x, group)
        lowest, highest = split.amin(-1, keepdim=True), split.amax(-1, keepdim=True)
    elif channel is not None:
        others = [d for d in range(x.ndim) if d != channel % x.ndim]
        lowest, highest = x.amin(others, keepdim=True), x.amax(others, keepdim=True)
    else:
        lowest, highest = x.min(), x.max()
    return make_grid(lowest, highest, bits, symmetric, group)


def _split(x: Tensor, group: int | None) -> Tensor:
    return x if group is None else x.unflatten(-1, (-1, group))


def relative_error(x: Tensor, approximation: Tensor) -> float:
    """Return the length of the error vector divided by the length of x, computed in float64."""
    difference = approximation.double() - x.double()
    return (difference.norm() / x.double().norm()).item()


# ---- calibration: which range the activations need


def clipped_range(x: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the range that leaves out the outermost numbers, `share` of them in all.

    Half of them lie below the range and half above it; a share of 0 gives minimum and maximum.
    Raises ValueError unless 0 <= share < 1.
    """
    if not 0 <= share < 1:
        raise ValueError(f"expected a share in [0, 1), got {share}")
    ordered = x.flatten().sort().values
    cut = int(len(ordered) * share / 2)
    return ordered[cut], ordered[len(ordered) - 1 - cut]


def best_range(x: Tensor, bits: int = 8, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Return the range, a shrunken [min, max], whose grid has the least mean squared error.

    Tries 100 %, 98 %, ... 2 % of the full range. On a tie, the larger range.
    """
    lowest, highest = x.min(), x.max()
    best, least = (lowest, highest), math.inf
    for percent in range(100, 0, -2):
        low, high = lowest * percent / 100, highest * percent / 100
        error = (make_grid(low, high, bits, symmetric).round_trip(x) - x).square().mean().item()
        if error < least:
            best, least = (low, high), error
    return best


@torch.no_grad()
def record_inputs(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Run the model on calibration batches; return all inputs of each linear layer by its name.

    The inputs of a layer are joined in the first dimension. Raises ValueError in training mode,
    where batch normalization and dropout give other activations than in use.
    """
    if model.training:
        raise ValueError("expected a model in evaluation mode, got one in training mode")
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, []).append(inputs[0].detach())

        return hook

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers]
    try:
        for batch in batches:
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


# ---- the product of integers


def integer_linear(
    x: Tensor, x_grid: Grid, weight: Tensor, w_grid: Grid, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias from integers alone: the scales are multiplied in at the end.

    x: uint8 or int8 [N, in] on a grid with one scale, or one for each row [N, 1]. weight: int8
    [out, in] on a symmetric grid with one scale, or one for each row [out, 1]. Products are summed
    in int32, where `in` * 255 * 127 must fit: up to 66,000 inputs. Raises ValueError for a weight
    grid with a zero point or with groups, which need a sum for each group.
    """
    if w_grid.group is not None or bool(w_grid.zero_point.any()):
        raise ValueError("expected a symmetric weight grid without groups, got another one")
    sums = x.to(torch.int32) @ weight.to(torch.int32).T  # [N, out]
    # sum of (x - z) w = sum of x w - z * sum of w, and the second sum is known beforehand
    correction = x_grid.zero_point * weight.sum(1, dtype=torch.int32)
    out = (sums - correction) * (x_grid.scale * w_grid.scale.flatten())
    return out if bias is None else out + bias


class QuantizedLinear(nn.Module):
    """A linear layer with int8 weights, a scale for each output: [..., in] -> [..., out].

    activations: None for weight-only (the weight is dequantized, the product is in float),
    "dynamic" (the input gets a symmetric grid at each call, a scale for each row), or a `Grid`
    (static: the range is known from calibration). Everything that a saved layer needs is a buffer.
    """

    def __init__(
        self, linear: nn.Linear, activations: Grid | str | None = None, *, bits: int = 8
    ) -> None:
        super().__init__()
        if isinstance(activations, str) and activations != "dynamic":
            raise ValueError(f"expected None, 'dynamic' or a Grid, got {activations!r}")
        weight = linear.weight.detach()
        grid = grid_of(weight, bits, channel=0)
        self.range = grid.low, grid.high
        self.register_buffer("weight", grid.quantize(weight))
        self.register_buffer("scale", grid.scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

        self.dynamic = activations == "dynamic"
        static = activations if isinstance(activations, Grid) else None
        self.x_range = (static.low, static.high) if static else None
        self.register_buffer("x_scale", static.scale if static else None)
        self.register_buffer("x_zero_point", static.zero_point if static else None)

    def forward(self, x: Tensor) -> Tensor:
        w_grid = Grid(self.scale, torch.zeros_like(self.scale, dtype=torch.int32), *self.range)
        if not self.dynamic and self.x_scale is None:
            return F.linear(x, w_grid.dequantize(self.weight), self.bias)
        flat = x.flatten(0, -2)
        if self.dynamic:
            grid = grid_of(flat, channel=0)
        else:
            grid = Grid(self.x_scale, self.x_zero_point, *self.x_range)
        out = integer_linear(grid.quantize(flat), grid, self.weight, w_grid, self.bias)
        return out.unflatten(0, x.shape[:-1])


def quantize_linears(
    model: nn.Module, activations: dict[str, Grid] | str | None = None, *, bits: int = 8
) -> nn.Module:
    """Return a copy of the model whose linear layers are `QuantizedLinear`.

    activations: as there, or a `Grid` for each layer's name. Raises ValueError in training mode,
    and for a layer without a grid.
    """
    if model.training:
        raise ValueError("expected a model in evaluation mode, got one in training mode")
    quantized = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        how = activations
        if isinstance(activations, dict):
            if name not in activations:
                raise ValueError(f"no grid for the input of {name!r}; got {sorted(activations)}")
            how = activations[name]
        quantized.set_submodule(name, QuantizedLinear(layer, how, bits=bits))
    return quantized


# ---- training with the grid in place


def fake_quantize(x: Tensor, grid: Grid) -> Tensor:
    """Return `grid.round_trip(x)`, with the gradient 1 (straight-through) inside of the range.

    A number that the range cuts off has the gradient 0: moving it a little changes nothing.
    """
    split = _split(x, grid.group)
    lowest = (grid.low - grid.zero_point) * grid.scale
    highest = (grid.high - grid.zero_point) * grid.scale
    inside = split.clamp(lowest, highest).reshape(x.shape)
    return inside + (grid.round_trip(x.detach()) - inside).detach()


class FakeQuantLinear(nn.Module):
    """A linear layer that computes with rounded weights and trains the weights behind them.

    Its grid follows the weight at each call: `bits`, symmetric, a scale for each output.
    """

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        integer_range(bits)  # raises ValueError now, and not in the first step
        self.linear = linear
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        grid = grid_of(self.linear.weight.detach(), self.bits, channel=0)
        return F.linear(x, fake_quantize(self.linear.weight, grid), self.linear.bias)


def prepare_qat(model: nn.Module, bits: int) -> nn.Module:
    """Return a copy whose linear layers are `FakeQuantLinear`, ready to be trained further."""
    prepared = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            prepared.set_submodule(name, FakeQuantLinear(copy.deepcopy(layer), bits))
    return prepared


# ---- four bits: two numbers in a byte


def pack_int4(integers: Tensor) -> Tensor:
    """Return int8 numbers in -8..7, [..., n], as bytes uint8 [..., n / 2].

    The even place has the lower four bits. Raises ValueError for an odd n or a number outside.
    """
    if integers.shape[-1] % 2:
        raise ValueError(f"expected an even last dimension, got {list(integers.shape)}")
    if bool(((integers < -8) | (integers > 7)).any()):
        raise ValueError(f"expected integers in -8..7, got {integers.min()}..{integers.max()}")
    nibbles = (integers & 0xF).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the int8 numbers that `pack_int4` put into bytes."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


# ---- moving the difficulty from activations to weights


def smooth(linear: nn.Linear, largest: Tensor, alpha: float = 0.5) -> Tensor:
    """Divide each input channel by a factor and multiply the weight by it, in place (SmoothQuant).

    largest: the largest absolute value of each input, [in], from calibration. Returns the factors
    [in]: the layer before has to divide its outputs by them. The product stays the same but for
    rounding. Xiao et al. 2023, https://arxiv.org/abs/2211.10438
    """
    if largest.shape != (linear.in_features,):
        got = list(largest.shape)
        raise ValueError(f"expected one largest value for each of {linear.in_features}, got {got}")
    of_weight = linear.weight.detach().abs().amax(0)
    tiny = torch.finfo(linear.weight.dtype).tiny
    factors = largest.clamp(min=tiny) ** alpha / of_weight.clamp(min=tiny) ** (1 - alpha)
    factors = torch.where((largest == 0) | (of_weight == 0), 1.0, factors)
    with torch.no_grad():
        linear.weight.mul_(factors)
    return factors


# ---- the scales in a file that ONNX Runtime quantized


@dataclass(frozen=True)
class ActivationScale:
    """One rounded tensor of an ONNX graph, and the names of the nodes around it.

    maker: the node that computes the tensor, "" for an input of the graph. readers: the nodes that
    read it after rounding.
    """

    tensor: str
    scale: float
    maker: str
    readers: tuple[str, ...]


def activation_scales(path: str | Path) -> list[ActivationScale]:
    """Return the scale of each tensor that the file rounds at inference, in the order of the graph.

    path: an ONNX file by `onnxruntime.quantization.quantize_static` in its default format, where
    each rounded tensor passes through `QuantizeLinear` and `DequantizeLinear`. Raises ValueError
    for a file without such nodes: nothing in it was quantized statically.
    """
    import onnx  # not needed by the rest of this file

    graph = onnx.load(path).graph
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    makers = {output: node.name for node in graph.node for output in node.output}
    readers = {name: [n for n in graph.node if name in n.input] for name in makers}

    found = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            tensor, scale = node.input[:2]
            names = [r.name for back in readers[node.output[0]] for r in readers[back.output[0]]]
            largest = float(constants[scale].max())
            found.append(ActivationScale(tensor, largest, makers.get(tensor, ""), tuple(names)))
    if not found:
        raise ValueError(f"expected an ONNX file with QuantizeLinear, got {path}")
    return found


# ---- what it costs and what it changes


def file_bytes(state: object) -> int:
    """Return how many bytes `torch.save` writes for a state dict or a model."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.tell()


def paired_change(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the mean of after - before over the same samples, and half its 95 % interval.

    before, after: one number for each sample, [N], such as 1.0 where the answer is right. The
    normal approximation 1.96 * s / sqrt(N). It needs some samples that changed: where fewer than
    `FEW` did, the margin is the largest change times the upper limit of a Poisson count over N,
    so that no change at all in N samples still leaves room for one in N / 3.7. Raises ValueError
    unless both have one shape [N >= 2].
    """
    if before.shape != after.shape or before.ndim != 1 or len(before) < 2:
        got = f"{list(before.shape)} and {list(after.shape)}"
        raise ValueError(f"expected two vectors of one length, at least 2, got {got}")
    difference = after.double() - before.double()
    count = len(difference)
    changed = int((difference != 0).sum())
    margin = 1.96 * difference.std().item() / math.sqrt(count)
    if changed < FEW:
        largest = difference.abs().max().item() if changed else 1.0
        limit = chi2.ppf(0.975, 2 * (changed + 1)) / 2  # of the expected count, 97.5 % sure
        margin = max(margin, largest * min(limit / count, 1.0))
    return difference.mean().item(), margin
