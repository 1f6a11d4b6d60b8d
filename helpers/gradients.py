"""Chapter 08: hooks that remove themselves, a gradient monitor, custom gradients."""

import ast
import importlib.util
import itertools
import math
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from helpers.tensors import storage_id

# ---- hooks that remove themselves


@contextmanager
def attached(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks behind `handles` at the end of the block, also when it raises.

        with attached([tensor.register_hook(print)]):
            loss.backward()

    `handles` may be a generator: what it has registered is removed even when it fails half-way.
    """
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextmanager
def step_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> Iterator[list[Optimizer]]:
    """Step each parameter as soon as its gradient is complete, and free the gradient at once.

        with step_in_backward(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3)):
            for x, y in batches:
                loss_fn(model(x), y).backward()  # no optimizer.step(), no zero_grad()

    make_optimizer: builds the optimizer of one parameter. Nothing that needs all gradients at once
    fits in: no clipping by the global norm, no accumulation, no `GradScaler`, and no
    `DistributedDataParallel`, whose average over the processes comes later. Nor does reentrant
    checkpointing of a shared parameter, whose gradient then comes in several parts.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = {p: make_optimizer([p]) for p in trained}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    with attached(p.register_post_accumulate_grad_hook(step) for p in trained):
        yield list(optimizers.values())


# ---- a monitor


@dataclass(frozen=True)
class Finding:
    """A gradient that is not as it should be.

    step: how many steps the optimizer had taken. kind: "NaN", "Inf", "exploding", "vanishing".
    place: the parameter, or "output of …" for a layer. largest: its largest absolute element.
    used_by: for NaN and Inf, the modules that received the tensor at `place`: the gradient became
    bad in the backward pass of one of them, or of an operation outside of all modules.
    """

    step: int
    kind: str
    place: str
    largest: float
    used_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"step {self.step}: {self.kind} in {self.place}"
        if self.kind in ("exploding", "vanishing"):
            return f"{where} ({self.largest:.3g})"
        return f"{where}, used by {' and '.join(self.used_by)}" if self.used_by else where


class GradientMonitor:
    """Watch the gradients of a model, layer by layer, and name where and when they go wrong.

        with GradientMonitor(model, optimizer) as monitor:
            train()
        for finding in monitor.findings: ...

    In each step it notes the largest absolute element of the gradient of every parameter and of
    every submodule's output, in the order of the backward pass, and judges them just before the
    optimizer steps: the first NaN or Inf, or else all parameters above `large`, or below `small`
    times the largest gradient of a parameter in this step (a gradient of exactly 0 is below; one
    that is missing is not seen). With `stop`, a NaN or Inf raises FloatingPointError before it can
    reach the weights; not so with an optimizer such as LBFGS, which runs backward in its step.

    findings: a fault that lasts stands here once, with its first step. history: for each place the
    numbers of the last `keep` steps, so that a run of many days needs no more memory than a short
    one.

    Outputs that are tensors, or tuples or lists of them, are watched. The numbers stay on the
    device until the step. With a `GradScaler`, gradients are scaled and an Inf now and then is
    normal: watch after `unscale_` instead. With `DistributedDataParallel` each process sees its own
    gradients before they are averaged, so `stop` stops only the process with the NaN: the others
    update with it. Check `.grad` after backward there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        large: float = 1e3,
        small: float = 1e-4,
        stop: bool = False,
        keep: int = 100,
    ):
        if not (0 <= small < 1 and large > 0):
            raise ValueError(f"expected 0 <= small < 1 and large > 0, got {small} and {large}")
        self.model = model
        self.optimizer = optimizer
        self.large = large
        self.small = small
        self.stop = stop
        self.keep = keep
        self.step = 0
        self.findings: list[Finding] = []
        self.history: dict[str, deque[float]] = {}
        self._lasting: set[tuple[str, str]] = set()  # kind and place of what the last step found
        self._seen: dict[str, Tensor] = {}
        self._made: dict[int, _Made] = {}  # by the id of the tensor
        self._used: dict[str, dict[str, None]] = {}  # place -> the modules that received it
        self._hooks = ExitStack()

    def __enter__(self) -> "GradientMonitor":
        self._hooks.enter_context(attached(self._register()))
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()
        self._seen.clear()
        self._made.clear()
        self._used.clear()

    def _register(self) -> Iterator[RemovableHandle]:
        for name, module in self.model.named_modules():
            if name:
                yield module.register_forward_hook(self._watch(name))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield parameter.register_hook(self._note(name))
        yield self.optimizer.register_step_pre_hook(lambda *_: self.judge())

    def _watch(self, name: str) -> Callable:
        place = f"output of {name}"

        def watch(_module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(inputs):
                made = self._maker(tensor)
                if made is not None:
                    self._used.setdefault(made.place, {})[name] = None
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._note(place))  # it goes with the graph
                    made = self._maker(tensor)
                    if made is None or made.version != tensor._version:
                        # not the output of a module inside this one, or since modified in place
                        self._made[id(tensor)] = _Made(weakref.ref(tensor), tensor._version, place)

        return watch

    def _maker(self, tensor: Tensor) -> "_Made | None":
        """Look up which module's output a tensor is."""
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None  # ids come again

    def _note(self, place: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            values = gradient.detach()
            if values.is_sparse:
                values = values.coalesce().values()
            if values.numel():
                largest = torch.linalg.vector_norm(values, ord=math.inf)  # a NaN stays one
                before = self._seen.pop(place, None)  # put at the end: in the order of backward
                self._seen[place] = largest if before is None else torch.maximum(before, largest)

        return note

    def judge(self) -> None:
        """Judge what was seen since the last step; the optimizer calls this before each step."""
        places = list(self._seen)
        largest = _read(list(self._seen.values()))
        self._seen.clear()
        found = self._broken(places, largest)
        if not found:
            found = self._out_of_range(places, largest)
        self._made.clear()
        self._used.clear()
        for place, value in zip(places, largest, strict=True):
            self.history.setdefault(place, deque(maxlen=self.keep)).append(value)
        self.findings += [f for f in found if (f.kind, f.place) not in self._lasting]
        self._lasting = {(f.kind, f.place) for f in found}
        if self.stop and found and found[0].kind in ("NaN", "Inf"):
            raise FloatingPointError(f"gradient is not finite: {found[0]}")
        self.step += 1

    def _broken(self, places: list[str], largest: list[float]) -> list[Finding]:
        """Find the first NaN or Inf on the way back: all behind it may have it from there."""
        for place, value in zip(places, largest, strict=True):
            if not math.isfinite(value):
                kind = "NaN" if math.isnan(value) else "Inf"
                return [Finding(self.step, kind, place, value, tuple(self._used.get(place, ())))]
        return []

    def _out_of_range(self, places: list[str], largest: list[float]) -> list[Finding]:
        of_parameters = [
            (place, value)
            for place, value in zip(places, largest, strict=True)
            if not place.startswith("output of ")
        ]
        top = max((value for _, value in of_parameters), default=0.0)
        found = []
        for place, value in of_parameters:
            if value > self.large:
                found.append(Finding(self.step, "exploding", place, value))
            elif value == 0 or value < self.small * top:
                found.append(Finding(self.step, "vanishing", place, value))
        return found


@dataclass(frozen=True)
class _Made:
    """An output: the tensor, how often it had been modified in place, and "output of …"."""

    tensor: weakref.ref
    version: int
    place: str


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among the inputs or outputs of a module."""
    listed = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in listed if isinstance(value, Tensor)]


def _read(values: list[Tensor]) -> list[float]:
    """Return single numbers as floats, all at once: on a GPU each reading waits for the GPU."""
    if not values:
        return []
    return torch.stack([value.to(values[0].device) for value in values]).tolist()


# ---- custom gradients


class Softplus(Function):
    """log(1 + exp(x)) for all x, in any precision: see `softplus`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x) + torch.log1p(torch.exp(-x.abs()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad_output * torch.sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), without overflow, and with the right gradient everywhere.

    With m = max(x, 0): log(exp(0) + exp(x)) = m + log(exp(-m) + exp(x - m)), and of the two
    exponents one is 0 and the other -|x|, so it is m + log1p(exp(-|x|)): nothing can overflow.
    Its derivative is exp(x) / (1 + exp(x)) = sigmoid(x). Autograd, left to itself, computes the
    derivative of the naive formula as 0 * inf = NaN from x = 89 on (float32), and that of the
    formula above as 0 at x = 0, where it is 1/2: relu and |x| have a kink there.
    """
    return Softplus.apply(x)


class Quantize(Function):
    """Rounding to a grid; the gradient is the one of clamping: see `quantize`."""

    @staticmethod
    def forward(x: Tensor, scale: float, low: int, high: int) -> Tensor:
        return torch.round(x / scale).clamp(low, high) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, scale, low, high = inputs
        ctx.save_for_backward((x > low * scale) & (x < high * scale))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (inside,) = ctx.saved_tensors
        gradient = torch.where(inside, grad_output, 0.0)  # 0 * inf would be NaN
        return gradient, None, None, None


def quantize(x: Tensor, scale: float, bits: int) -> Tensor:
    """Return x rounded to one of 2^bits multiples of `scale`, with a straight-through gradient.

    The multiples go from -2^(bits-1) to 2^(bits-1) - 1. The derivative of rounding is 0 wherever
    it exists, so nothing could be learned through it. The gradient given here is by intention not
    the derivative but that of a surrogate, x.clamp: 1 inside the range, 0 at its ends and outside.
    """
    if bits < 1 or not scale > 0:
        raise ValueError(f"expected at least 1 bit and a positive scale, got {bits} and {scale}")
    low = -(2 ** (bits - 1))
    high = 2 ** (bits - 1) - 1
    return Quantize.apply(x, scale, low, high)


class ReverseGradient(Function):
    """The identity, with a gradient times -strength: see `reverse_gradient`."""

    @staticmethod
    def forward(x: Tensor, strength: float) -> Tensor:
        return x.view_as(x)  # a new tensor: returning x itself would return the input's own node

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad_output, None


def reverse_gradient(x: Tensor, strength: float = 1.0) -> Tensor:
    """Return x; on the way back, multiply its gradient by -strength.

    What comes before learns to make worse what comes after: features from which a classifier of
    the domain cannot tell the domain (Ganin and Lempitsky, 2015).
    """
    return ReverseGradient.apply(x, strength)


def custom_gradients(package: str = "helpers") -> list[str]:
    """List the gradients that `package` defines itself, from its source, as "module.name".

    That is: each direct subclass of `autograd.Function` at the top of a module, each operator with
    `register_autograd`, and each function that registers one only when it is called (as for code
    that is compiled on demand).
    """
    specification = importlib.util.find_spec(package)
    if specification is None or not specification.submodule_search_locations:
        raise ValueError(f"expected the name of a package, got {package!r}")
    root = Path(specification.submodule_search_locations[0])
    found = []
    for path in sorted(root.rglob("*.py")):
        module = ".".join([package, *path.relative_to(root).with_suffix("").parts])
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            found += [f"{module}.{name}" for name in _defines(statement)]
    return found


def _defines(statement: ast.stmt) -> Iterator[str]:
    """Name the gradients that one statement of a module defines."""
    if isinstance(statement, ast.ClassDef):
        if any(ast.unparse(base).split(".")[-1] == "Function" for base in statement.bases):
            yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_autograd":
            on_demand = isinstance(statement, ast.FunctionDef)
            yield statement.name if on_demand else ast.unparse(node.func.value)


# ---- what is saved for backward, kept in another form


def compressed(
    dtype: torch.dtype = torch.bfloat16, exclude: Iterable[Tensor] = ()
) -> saved_tensors_hooks:
    """Return a context in which floating-point tensors saved for backward are kept in `dtype`.

    Each element is rounded once: its relative error is at most half the distance of two
    neighbours, 2^-8 in bfloat16 and 2^-11 in float16 (which overflows above 65,504). The loss
    does not change; gradients do. exclude: tensors to keep as they are, such as parameters,
    which are in memory anyway.
    """
    kept = {storage_id(t) for t in exclude}
    width = torch.finfo(dtype).bits

    def pack(tensor: Tensor) -> tuple[torch.dtype, Tensor]:
        wide = tensor.is_floating_point() and torch.finfo(tensor.dtype).bits > width
        if wide and storage_id(tensor) not in kept:
            return tensor.dtype, tensor.detach().to(dtype)
        return tensor.dtype, tensor.detach()

    def unpack(packed: tuple[torch.dtype, Tensor]) -> Tensor:
        original, tensor = packed
        return tensor.to(original)

    return saved_tensors_hooks(pack, unpack)


class OnDisk(saved_tensors_hooks):
    """Keep what is saved for backward in files, and read it back when backward needs it.

        with OnDisk(exclude=model.parameters()) as disk:
            loss = model(x).sum()
        disk.bytes  # of the tensors in files; 0 as soon as `loss.backward()` has freed them

    Bit for bit what was saved. A file is deleted as soon as autograd drops the tensor.
    """

    def __init__(self, folder: str | Path | None = None, exclude: Iterable[Tensor] = ()):
        self._kept = {storage_id(t) for t in exclude}
        self._temporary = tempfile.TemporaryDirectory(dir=folder)  # one for each OnDisk
        self._folder = Path(self._temporary.name)
        self._numbers = itertools.count()
        self._sizes: dict[Path, int] = {}
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> "OnDisk":
        super().__enter__()
        return self

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that lie in files now."""
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> "Tensor | _InFile":
        if storage_id(tensor) in self._kept:
            return tensor.detach()
        path = self._folder / f"saved-{next(self._numbers)}.pt"
        torch.save(tensor.detach().clone(), path)  # a view would write its whole storage
        self._sizes[path] = tensor.nbytes
        packed = _InFile(path, tensor.device)
        weakref.finalize(packed, _delete, path, self._sizes, self._temporary)
        return packed

    def _unpack(self, packed: "Tensor | _InFile") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return torch.load(packed.path, map_location=packed.device)


@dataclass(frozen=True)
class _InFile:
    path: Path
    device: torch.device


def _delete(path: Path, sizes: dict[Path, int], _folder: Any) -> None:
    """The folder is an argument only so that it stays while there are files in it."""
    del sizes[path]
    path.unlink(missing_ok=True)
