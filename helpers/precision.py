"""Chapter 10: float formats bit by bit, what they lose, loss scaling, what autocast chooses."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- float formats, bit by bit


@dataclass(frozen=True)
class FloatFormat:
    """A binary float format: one sign bit, then the exponent, then the mantissa (IEEE 754).

    exponent, mantissa: how many bits each of them has. A pattern is the integer whose binary
    digits are these bits, the sign first. Patterns whose exponent has only ones are infinity and
    NaN; without `infinities`, as in float8_e4m3fn (Micikevicius and others, 2022), only the one
    whose mantissa has only ones, too, is NaN, and the rest are numbers.
    """

    name: str
    exponent: int
    mantissa: int
    infinities: bool = True

    @property
    def bits(self) -> int:
        """Bits of a number, with the sign."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent, so that it can be negative."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        return self.decode(self._largest)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; below half of it, everything is rounded to 0."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def eps(self) -> float:
        """The gap between 1 and the next larger number."""
        return 2.0**-self.mantissa

    @property
    def _largest(self) -> int:
        """The pattern of `max`: the one before infinity, or before NaN where there is none."""
        ones = 2 ** (self.exponent + self.mantissa) - 1
        return ones - 2**self.mantissa if self.infinities else ones - 1

    def encode(self, value: float) -> int:
        """Return the pattern of the nearest number; of two equally near, the even one.

        What is too large becomes infinity, or `max` in a format without infinities; NaN keeps no
        sign and no payload.
        """
        sign = 2 ** (self.bits - 1) if math.copysign(1.0, value) < 0 else 0
        if math.isnan(value):
            return 2 ** (self.bits - 1) - 1  # all ones but the sign
        above = self._largest + 1 if self.infinities else self._largest
        if math.isinf(value):
            return sign + above

        magnitude = abs(value)
        lowest = 1 - self.bias  # the power of the first normal number, and of all subnormal ones
        power = lowest
        if magnitude >= self.smallest_normal:
            power = math.frexp(magnitude)[1] - 1  # 2**power <= magnitude < 2**(power + 1)
        gap = math.ldexp(1.0, power - self.mantissa)  # between neighbors here
        count = round(magnitude / gap)  # Python rounds half to even
        # consecutive patterns are neighbors: where rounding fills the mantissa, the exponent grows
        pattern = count + (power - lowest) * 2**self.mantissa
        return sign + min(pattern, above)

    def fields(self, pattern: int) -> tuple[int, int, int]:
        """Return sign, stored exponent and stored mantissa of a pattern, as integers.

        Raises ValueError for a pattern that does not fit into the bits.
        """
        if not 0 <= pattern < 2**self.bits:
            raise ValueError(f"{self.name}: expected a pattern of {self.bits} bits, got {pattern}")
        rest, mantissa = divmod(pattern, 2**self.mantissa)
        sign, exponent = divmod(rest, 2**self.exponent)
        return sign, exponent, mantissa

    def decode(self, pattern: int) -> float:
        """Return the number that a pattern stands for."""
        sign, exponent, mantissa = self.fields(pattern)
        factor = -1.0 if sign else 1.0
        if exponent == 2**self.exponent - 1:
            if self.infinities:
                return factor * math.inf if mantissa == 0 else math.nan
            if mantissa == 2**self.mantissa - 1:
                return math.nan
        if exponent == 0:  # zero and the subnormal numbers: no leading 1
            return factor * mantissa * self.smallest_subnormal
        return factor * (1 + mantissa * self.eps) * 2.0 ** (exponent - self.bias)

    def round(self, value: float) -> float:
        """Return the number of this format that is nearest to `value`."""
        return self.decode(self.encode(value))

    def text(self, pattern: int) -> str:
        """Return the bits, with spaces between sign, exponent and mantissa."""
        sign, exponent, mantissa = self.fields(pattern)
        return f"{sign} {exponent:0{self.exponent}b} {mantissa:0{self.mantissa}b}"


FORMATS = {
    "fp32": FloatFormat("fp32", exponent=8, mantissa=23),
    "tf32": FloatFormat("tf32", exponent=8, mantissa=10),  # of a GPU's inputs; no tensor has it
    "bf16": FloatFormat("bf16", exponent=8, mantissa=7),
    "fp16": FloatFormat("fp16", exponent=5, mantissa=10),
    "e4m3": FloatFormat("e4m3", exponent=4, mantissa=3, infinities=False),
    "e5m2": FloatFormat("e5m2", exponent=5, mantissa=2),
}

# The formats that tensors can have, and integers of the same size, to read their bits.
DTYPES = {
    "fp32": (torch.float32, torch.int32),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "e4m3": (torch.float8_e4m3fn, torch.uint8),
    "e5m2": (torch.float8_e5m2, torch.uint8),
}


def bits_of(value: float, name: str) -> str:
    """Return the bits that PyTorch stores for `value` in the format `name`, a key of `DTYPES`.

    Raises ValueError for a format that tensors do not have, such as tf32.
    """
    if name not in DTYPES:
        raise ValueError(f"no tensor has the format {name!r}; expected one of {list(DTYPES)}")
    dtype, integer = DTYPES[name]
    number_format = FORMATS[name]
    stored = torch.tensor(value).to(dtype).view(integer).item()
    pattern = stored % 2**number_format.bits  # as unsigned: with the sign bit set, it is negative
    return number_format.text(pattern)


# ---- what falls out of a format


@dataclass(frozen=True)
class Shares:
    """What would become of numbers in a format, as shares of those that are not zero.

    lost: rounded to zero. subnormal: kept with fewer digits. normal: kept. overflow: too large,
    so that they become infinite or, in a format without infinities, the largest number.
    """

    lost: float
    subnormal: float
    normal: float
    overflow: float


def shares(values: Tensor | Iterable[Tensor], scale: float = 1.0, name: str = "fp16") -> Shares:
    """Say what becomes of `values` times `scale` in the format `name`; exact zeros do not count.

    NaN does not count either. name: a key of `FORMATS`. Raises ValueError for another one, and if
    no value counts.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; expected one of {list(FORMATS)}")
    target = FORMATS[name]
    magnitudes = _magnitudes(values) * scale
    if not len(magnitudes):
        raise ValueError("expected at least one value that is not zero, got none")
    half = target.smallest_subnormal / 2  # a tie between 0 and the smallest: to even, which is 0
    gap = math.ldexp(target.eps, math.frexp(target.max)[1] - 1)  # between the largest numbers
    limit = target.max + gap / 2
    lost = magnitudes <= half
    overflow = magnitudes >= limit
    subnormal = (magnitudes < target.smallest_normal) & ~lost
    normal = ~(lost | subnormal | overflow)

    def share(part: Tensor) -> float:
        return part.double().mean().item()

    return Shares(
        lost=share(lost),
        subnormal=share(subnormal),
        normal=share(normal),
        overflow=share(overflow),
    )


def powers_of_two(values: Tensor | Iterable[Tensor]) -> dict[int, float]:
    """Return the share of the values with 2**k <= |value| < 2**(k + 1), for each k that has one.

    Zeros, NaN and infinities do not count. No values: an empty dict.
    """
    magnitudes = _magnitudes(values)
    finite = magnitudes[magnitudes.isfinite()]
    exponents = torch.frexp(finite).exponent - 1  # frexp has 0.5 <= mantissa < 1
    found, counts = exponents.unique(return_counts=True)
    total = len(exponents)
    return {k: n / total for k, n in zip(found.tolist(), counts.tolist(), strict=True)}


def _magnitudes(values: Tensor | Iterable[Tensor]) -> Tensor:
    """Absolute values without zeros and NaN, as one long vector of float64."""
    parts = [values] if isinstance(values, Tensor) else list(values)
    if not parts:
        return torch.empty(0, dtype=torch.float64)
    everything = torch.cat([part.detach().flatten().double() for part in parts]).abs()
    return everything[everything > 0]  # NaN > 0 is false


# ---- loss scaling


class LossScaler:
    """The dynamic loss scale of `torch.amp.GradScaler`, to be read; the two agree step for step.

    scale(loss) before backward; unscale_(optimizer) before looking at gradients or clipping them;
    step(optimizer) updates unless a gradient is infinite or NaN; update() once at the end of each
    step: after such a gradient the scale shrinks, after `growth_interval` good steps it grows.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        self.factor = _as_float32(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0  # since the scale last changed
        self._found_inf: dict[int, bool] = {}  # of each optimizer that was unscaled in this step
        self._stepped: set[int] = set()  # by id(optimizer), as above

    def get_scale(self) -> float:
        """Return the scale of the next loss."""
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale: by the chain rule, all gradients are multiplied, too."""
        return loss * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and note whether one is not finite.

        Raises RuntimeError the second time in a step, or without a gradient; ValueError for
        float16 gradients, which autocast does not make: its parameters stay float32.
        """
        key = id(optimizer)
        if key in self._found_inf:
            raise RuntimeError("this optimizer's gradients are unscaled already; call update first")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            raise RuntimeError("expected gradients to unscale, got none; call backward first")
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("expected gradients of float32 parameters, got float16; use autocast")

        self._found_inf[key] = not all(bool(g.isfinite().all()) for g in gradients)
        for gradient in gradients:
            gradient.mul_(1 / self.factor)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale if that was not done, then update the parameters if all gradients are finite.

        Raises RuntimeError the second time in a step.
        """
        if id(optimizer) in self._stepped:
            raise RuntimeError("this optimizer has made its step already; call update first")
        if id(optimizer) not in self._found_inf:
            self.unscale_(optimizer)
        if not self._found_inf[id(optimizer)]:
            optimizer.step()
        self._stepped.add(id(optimizer))

    def update(self) -> None:
        """Choose the scale of the next step. Raises RuntimeError if nothing was unscaled."""
        if not self._found_inf:
            raise RuntimeError("expected unscale_ or step before update, got neither")
        if any(self._found_inf.values()):
            self.factor = _as_float32(self.factor * self.backoff_factor)
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                grown = _as_float32(self.factor * self.growth_factor)
                if math.isfinite(grown):  # float32 ends at 3.4e38
                    self.factor = grown
                self.good_steps = 0
        self._found_inf.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; `GradScaler` can load it, too."""
        return {
            "scale": self.factor,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, by this class or by `GradScaler`.

        Raises ValueError if something is missing: a `GradScaler(enabled=False)` saves nothing.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(
                f"expected the state of a scaler that is enabled, got one without {sorted(missing)}"
            )
        self.factor = state["scale"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self.good_steps = state["_growth_tracker"]


def _as_float32(number: float) -> float:
    """GradScaler keeps its scale in a float32 tensor; for powers of two nothing is lost."""
    return torch.tensor(number, dtype=torch.float64).float().item()


# ---- which dtype autocast gives to an operation

LOW, WIDE, NEITHER = "low", "float32", "input dtype"


@dataclass(frozen=True)
class AutocastRow:
    """What an operation returned under autocast.

    from_float32, from_low: dtype of the result when all inputs had float32, or the low precision.
    group: "low" or "float32", where the result has this precision whatever comes in; "input dtype"
    where autocast does nothing.
    """

    name: str
    from_float32: torch.dtype
    from_low: torch.dtype
    group: str


# name -> (operation, shapes of its floating-point inputs)
OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(4, 8), (8, 4)]),
    "bmm": (torch.bmm, [(2, 4, 8), (2, 8, 4)]),
    "F.linear": (F.linear, [(4, 8), (3, 8), (3,)]),
    "F.conv2d": (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "F.scaled_dot_product_attention": (F.scaled_dot_product_attention, [(1, 2, 4, 8)] * 3),
    "F.relu": (F.relu, [(4, 8)]),
    "F.gelu": (F.gelu, [(4, 8)]),
    "F.max_pool2d": (lambda x: F.max_pool2d(x, 2), [(2, 3, 8, 8)]),
    "add": (torch.add, [(4, 8), (4, 8)]),
    "mean": (torch.mean, [(4, 8)]),
    "F.batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(4, 8)]),
    "F.layer_norm": (lambda x: F.layer_norm(x, (8,)), [(4, 8)]),
    "softmax": (lambda x: x.softmax(-1), [(4, 8)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(4, 8)]),
    "sum": (torch.sum, [(4, 8)]),
    "cumsum": (lambda x: x.cumsum(-1), [(4, 8)]),
    "exp": (torch.exp, [(4, 8)]),
    "log": (torch.log, [(4, 8)]),
    "pow": (lambda x: x.pow(2), [(4, 8)]),
    "F.mse_loss": (F.mse_loss, [(4, 8), (4, 8)]),
    "F.cross_entropy": (
        lambda x: F.cross_entropy(x, torch.arange(len(x), device=x.device)),
        [(4, 8)],
    ),
    "F.binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        [(4, 8)],
    ),
}


def autocast_table(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[AutocastRow]:
    """Run each of `OPERATIONS` under autocast, and say what dtypes came out."""
    rows = []
    for name, (operation, shapes) in OPERATIONS.items():
        wide = _result(operation, shapes, torch.float32, device, dtype)
        low = _result(operation, shapes, dtype, device, dtype)
        group = NEITHER
        if wide == low:
            group = LOW if wide == dtype else WIDE
        rows.append(AutocastRow(name, wide, low, group))
    return rows


def _result(
    operation: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    inputs_in: torch.dtype,
    device: str,
    low: torch.dtype,
) -> torch.dtype:
    inputs = [torch.ones(shape, dtype=inputs_in, device=device) for shape in shapes]
    with torch.autocast(device, low):
        return operation(*inputs).dtype


def autocast_lists() -> dict[str, str]:
    """Return operation -> group as PyTorch's own source has it for CUDA, without running them.

    The lists are macros in ``ATen/autocast_mode.h``, which is installed with PyTorch. What stands
    in none of them is left as it comes; what stands in AT_FORALL_PROMOTE brings all its inputs to
    the widest of their dtypes and is not returned here. Raises ValueError for a header of another
    version, without these macros.
    """
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    source = header.read_text(encoding="utf-8")
    groups = {
        "AT_FORALL_LOWER_PRECISION_FP": LOW,
        "AT_FORALL_FP32": WIDE,
        "AT_FORALL_FP32_SET_OPT_DTYPE": WIDE,
    }
    found = {}
    for macro, group in groups.items():
        _, start, rest = source.partition(f"#define {macro}(_)")
        if not start:
            raise ValueError(f"expected the macro {macro} in {header.name}, got a header without")
        body = rest.split("\n\n")[0]  # a macro's lines are continued by \\ up to an empty one
        for name in re.findall(r"_\((\w+)", body):
            found[name] = group
    return found


def cuda_group(name: str) -> str:
    """Return the group of one of `OPERATIONS` on CUDA, by PyTorch's source.

    Raises ValueError for a name that is not in `OPERATIONS`.
    """
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {name!r}; expected one of {list(OPERATIONS)}")
    # cross_entropy is log_softmax and then nll_loss, both listed
    listed = {"F.cross_entropy": "nll_loss"}.get(name, name.removeprefix("F."))
    return autocast_lists().get(listed, NEITHER)
