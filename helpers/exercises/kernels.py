"""Chapter 13: kernels launched on watched memory, and what each of them must compute."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime import InterpreterError, KernelInterface
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
    _get_np_dtype,
)

from helpers.exercises.harness import Exercise, WrongAnswer
from helpers.kernels.dropout import dropout

# ---- how a kernel is launched and watched

MARGIN = 2048  # elements before and after each tensor that belong to nobody

# What memory holds that nobody wrote, as integers of the same size: NaN, or a number that is no
# index. The NaN of the output has other bits: arithmetic hands on the bits of a NaN it was given,
# so none of the inputs' can turn into it, and where it is found nothing was stored.
POISON = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.float32: (torch.int32, 0x7FDA5A5A),
    torch.int64: (torch.int64, 0x7FFA5A5A5A5A5A5A),
}


@dataclass(frozen=True)
class Launch:
    """One launch: `kernel[grid](*inputs, output, *sizes, *scalars, **constants)`.

    Inputs are the tensors and scalars the other arguments of a case, in their order. The output
    has the shape `output` and the dtype of the first input.
    """

    output: tuple[int, ...]
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: dict[str, int]


def kernel_exercise(
    *,
    reference: Callable[..., Tensor],
    cases: Callable[[], Sequence[tuple]],
    launch: Callable[..., Launch],
    reads_once: bool = False,
    scale: float = 1.0,
) -> Exercise:
    """Return an exercise whose answer is a Triton kernel; `launch`: the arguments -> how it runs.

    Besides a wrong result these are refused: a load or store of an element that lies outside of
    the kernel's tensors, and one left out; a number that depends on what `tl.load` gives for a
    masked element without `other`; with `reads_once`, an element of an input loaded again. The
    interpreter tells each address; a compiled kernel is caught by the poison around its tensors.
    """

    def through(answer: Any) -> Callable[..., Any]:
        if answer is reference:
            return reference
        return partial(_run, answer, launch, reads_once)

    return Exercise(reference=reference, cases=cases, through=through, scale=scale)


def _run(kernel: Any, launch: Callable[..., Launch], reads_once: bool, *arguments: Any) -> Any:
    """Launch `kernel` for the arguments of a case; return its output, `...` if it did nothing."""
    if not isinstance(kernel, KernelInterface):
        raise WrongAnswer(f"expected a kernel under @triton.jit, got {type(kernel).__name__}")

    plan = launch(*arguments)
    interpreted = isinstance(kernel, InterpretedFunction)
    device = torch.device("cpu" if interpreted else "cuda")
    inputs, scalars = [], []
    for position, argument in enumerate(arguments, 1):
        if isinstance(argument, Tensor):
            room = _Room(f"argument {position}", argument.shape, argument.dtype, device)
            inputs.append(room.filled(argument))
        else:
            scalars.append(argument)
    output = _Room("the output", plan.output, inputs[0].tensor.dtype, device, other_bits=True)

    watch = _Watch(inputs, output)
    tensors = [room.tensor for room in (*inputs, output)]
    with watch.patched() if interpreted else nullcontext():
        try:
            kernel[plan.grid](*tensors, *plan.sizes, *scalars, **plan.constants)
        except InterpreterError as error:
            raise _cause(error) from None

    if output.untouched() and not any(watch.loaded.values()):
        return ...  # still the stub
    _require_clean(watch, reads_once)
    return output.tensor.to(arguments[0].device, copy=True)


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the kernel: the interpreter wraps it once for each function it is in."""
    while isinstance(error, InterpreterError) and error.__cause__:
        error = error.__cause__
    return error


def _require_clean(watch: "_Watch", reads_once: bool) -> None:
    """Raise WrongAnswer if the memory shows that the kernel did what a kernel must not do."""
    for room in watch.inputs:
        if room.changed().any():
            raise WrongAnswer(f"{room.name}: the kernel stores into an input")
        elements, loaded = room.tensor.numel(), watch.loaded[room.name]
        if reads_once and loaded > elements:
            raise WrongAnswer(
                f"{room.name} has {elements} elements, the kernel loads {loaded}: read each once"
            )
    if watch.output.margins_changed():
        raise WrongAnswer("the kernel stores outside of the output")

    missing, elements = int(watch.output.poisoned().sum()), watch.output.tensor.numel()
    if missing:
        raise WrongAnswer(f"{missing} of {elements} elements of the output are never stored")


class _Room:
    """A tensor in the middle of a larger piece of memory; all around it is poison."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        other_bits: bool = False,
    ):
        self.name = name
        bits, self.poison = POISON[dtype]
        self.poison += int(other_bits)
        end = MARGIN + prod(shape)
        self._inside = slice(MARGIN, end)
        self._bits = torch.full((end + MARGIN,), self.poison, dtype=bits, device=device)
        self.tensor = self._bits.view(dtype)[self._inside].view(*shape)
        self._before = self._bits.clone()

        # the tensor's own data_ptr() is 0 where it has no elements
        self.start = self._bits.data_ptr() + MARGIN * self._bits.element_size()
        self.end = self._bits.data_ptr() + end * self._bits.element_size()

    def filled(self, values: Tensor) -> "_Room":
        """Put `values` into the tensor."""
        self.tensor.copy_(values)
        self._before = self._bits.clone()
        return self

    def changed(self) -> Tensor:
        return self._bits != self._before

    def margins_changed(self) -> bool:
        changed = self.changed()
        changed[self._inside] = False
        return bool(changed.any())

    def untouched(self) -> bool:
        return self.tensor.numel() > 0 and bool(self.poisoned().all())

    def poisoned(self) -> Tensor:
        return self._bits[self._inside] == self.poison


@dataclass
class _Watch:
    """What an interpreted kernel loads and stores, element by element."""

    inputs: list[_Room]
    output: _Room
    loaded: dict[str, int] = field(default_factory=dict)  # room -> elements, each as often as read

    def __post_init__(self):
        self.loaded = {room.name: 0 for room in (*self.inputs, self.output)}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Look at every load and store of the interpreter; overflow is silent, as on a GPU."""
        load = InterpreterBuilder.create_masked_load
        store = InterpreterBuilder.create_masked_store
        update = InterpreterBuilder.create_atomic_rmw

        def watched_load(builder, pointers, mask, other, *rest):
            lanes = mask.data.astype(bool)
            for room, count in self._found("loads", pointers.data[lanes]).items():
                self.loaded[room] += count
            if other is None:  # the interpreter would give 0, a GPU whatever it likes
                other = _poison_like(pointers)
            return load(builder, pointers, mask, other, *rest)

        def watched_store(builder, pointers, value, mask, *rest):
            self._found("stores", pointers.data[mask.data.astype(bool)])
            return store(builder, pointers, value, mask, *rest)

        def watched_update(builder, operation, pointers, value, mask, *rest):
            self._found("updates", pointers.data[mask.data.astype(bool)])
            return update(builder, operation, pointers, value, mask, *rest)

        with (
            mock.patch.object(InterpreterBuilder, "create_masked_load", watched_load),
            mock.patch.object(InterpreterBuilder, "create_masked_store", watched_store),
            mock.patch.object(InterpreterBuilder, "create_atomic_rmw", watched_update),
            np.errstate(all="ignore"),
        ):
            yield

    def _found(self, verb: str, addresses: np.ndarray) -> dict[str, int]:
        """Count the elements in each tensor; refuse an address that lies in none of them."""
        counts, outside = {}, np.ones(addresses.shape, dtype=bool)
        for room in (*self.inputs, self.output):
            here = (addresses >= room.start) & (addresses < room.end)
            counts[room.name] = int(here.sum())
            outside &= ~here
        if outside.any():
            where = self._nearest(int(addresses[outside][0]))
            raise WrongAnswer(f"the kernel {verb} {int(outside.sum())} elements {where}")
        return counts

    def _nearest(self, address: int) -> str:
        for room in (*self.inputs, self.output):
            if room.end <= address < room.end + MARGIN:
                return f"beyond the end of {room.name}"
            if room.start - MARGIN <= address < room.start:
                return f"before the start of {room.name}"
        return "outside of all tensors"


def _poison_like(pointers: TensorHandle) -> TensorHandle:
    """Return what a masked element without `other` is worth here: NaN, or a huge integer."""
    dtype = pointers.get_element_ty()
    kind = _get_np_dtype(dtype)
    value = np.nan if kind.kind == "f" else np.iinfo(kind).max // 2
    return TensorHandle(np.full(pointers.data.shape, value, kind), dtype)


# ---- the exercises


def _elements(x: Tensor, *_: Any) -> Launch:
    """A program takes 32 elements, as many programs as that needs."""
    return Launch(tuple(x.shape), (triton.cdiv(len(x), 32),), (len(x),), {"BLOCK": 32})


def _axpy(x: Tensor, y: Tensor, a: float) -> Tensor:
    return (a * x.float() + y.float()).to(x.dtype)


def _axpy_cases() -> list[tuple]:
    lengths = [(64, 2.5), (33, -1.0), (1, 0.5), (100, 0.0), (0, 2.0)]
    cases = [(torch.randn(n), torch.randn(n), a) for n, a in lengths]
    return [*cases, (torch.randn(40).half(), torch.randn(40).half(), -3.0)]


def _silu_back(dy: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(dy, x)


def _silu_back_cases() -> list[tuple]:
    large = torch.tensor([-1000.0, -90.0, -30.0, -1.0, 0.0, 1.0, 30.0, 90.0, 1000.0])
    cases = [(torch.randn(n), 3 * torch.randn(n)) for n in (64, 33, 1, 0)]
    return [*cases, (torch.ones(9), large), (torch.randn(9), large.flip(0))]


def _drop(dy: Tensor, p: float, seed: int) -> Tensor:
    return dropout(dy, p, seed)


def _drop_cases() -> list[tuple]:
    return [(torch.randn(n), p, s) for n, p, s in ((64, 0.3, 7), (33, 0.9, 1), (50, 0.0, 5))] + [
        (torch.randn(1), 0.5, 2),
        (torch.randn(0), 0.3, 7),
    ]


def _rows(x: Tensor, *_: Any) -> Launch:
    """A program takes a row of any length, 16 elements at a time; a number a row."""
    return Launch(tuple(x.shape[:1]), (len(x),), (x.shape[1],), {"BLOCK": 16})


def _row_sum(x: Tensor) -> Tensor:
    return x.float().sum(1).to(x.dtype)


def _row_sum_cases() -> list[tuple]:
    overflow = torch.zeros(2, 70)  # partial sums beyond the 65504 of float16, in one lane …
    overflow[0, :64:16] = torch.tensor([60000.0, 60000.0, -60000.0, -60000.0])
    overflow[1, :4] = torch.tensor([60000.0, 60000.0, -60000.0, -60000.0])  # … and across lanes
    tables = [torch.randn(3, 40), torch.randn(2, 16), torch.randn(4, 1), torch.randn(0, 5)]
    long = torch.full((2, 3001), 0.5)  # 2048 + 0.5 is 2048 in float16
    long[:, :16] = 2048.0
    halves = [long.half(), overflow.half()]
    return [(table,) for table in tables + halves]


def _logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(1)


def _logsumexp_cases() -> list[tuple]:
    padded = torch.randn(3, 40)  # on the left, as in a batch of sentences
    padded[0, :20] = -torch.inf
    padded[1, :] = -torch.inf
    padded[2, 30:] = -torch.inf
    rising = torch.arange(50.0).expand(2, 50) * 5
    tables = [torch.randn(3, 40), torch.randn(2, 16), torch.randn(4, 1), torch.randn(0, 5)]
    tables += [torch.randn(2, 50) * 300, torch.randn(1, 33) - 1000, rising, rising.flip(1), padded]
    return [(table.contiguous(),) for table in tables]


def _whole_rows(x: Tensor, *_: Any) -> Launch:
    """A program takes a whole row in one block."""
    return Launch(tuple(x.shape), (len(x),), (x.shape[1],), {"BLOCK": 64})


def _grad(x: Tensor, target: Tensor) -> Tensor:
    return x.softmax(1) - F.one_hot(target, x.shape[1])


def _grad_cases() -> list[tuple]:
    shapes = [(4, 5), (1, 33), (3, 1), (5, 64), (0, 2)]
    cases = [(99 * torch.randn(r, v), torch.randint(v, (r,))) for r, v in shapes]
    ends = torch.tensor([0, 32])
    shifted = [(torch.randn(2, 33) + shift, ends) for shift in (0.0, 300.0, -300.0)]
    return cases + shifted


def _one_query(q: Tensor, k: Tensor, v: Tensor) -> Launch:
    """One program in all; 8 keys at a time."""
    return Launch(tuple(q.shape), (1,), (len(k),), {"D": len(q), "BLOCK": 8})


def _query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q / len(q) ** 0.5).softmax(0) @ v


def _with_scores(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [16], k, v [S, 16] whose scores are `scores`: no product or sum is rounded."""
    q = torch.randint(-2, 3, (16,)).float()
    q[0] = 4.0
    k = 4 * torch.randint(-2, 3, (len(scores), 16)).float()
    k[:, 0] = scores - k[:, 1:] @ q[1:] / 4
    return q, k, torch.randn(len(scores), 16)


def _query_cases() -> list[tuple]:
    rising = torch.arange(29) / 4  # every block raises the maximum: sum and output must shrink
    scores = [rising, rising.flip(0), rising - 120, rising + 200]  # padding has the score 0
    random = [(9 * torch.randn(16), *torch.randn(2, s, 16)) for s in (8, 1, 29)]
    return random + [_with_scores(s) for s in scores]


def _tiles(a: Tensor, b: Tensor) -> Launch:
    """A program computes a tile of 16 by 16."""
    K, M, N = *a.shape, b.shape[1]
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    return Launch((M, N), grid, (M, N, K), {"BLOCK": 16})


def _at_b(a: Tensor, b: Tensor) -> Tensor:
    return a.T @ b


def _at_b_cases() -> list[tuple]:
    shapes = [(16, 16, 16), (33, 17, 20), (5, 40, 50), (1, 1, 1), (48, 32, 16), (3, 4, 0)]
    return [(torch.randn(K, M), torch.randn(K, N)) for M, N, K in shapes]


def _asked(M: int, N: int, K: int) -> int:
    """Bytes that matmul's kernel loads and stores in float32, tiles 32 x 32 x 32.

    Rows beyond the edge wrap around and are read, k beyond it is masked.
    """
    programs = triton.cdiv(M, 32) * triton.cdiv(N, 32)
    return 4 * (programs * (32 + 32) * K + M * N)


EXERCISES = {
    "axpy": kernel_exercise(reference=_axpy, cases=_axpy_cases, launch=_elements),
    "silu_back": kernel_exercise(reference=_silu_back, cases=_silu_back_cases, launch=_elements),
    "drop": kernel_exercise(reference=_drop, cases=_drop_cases, launch=_elements),
    "row_sum": kernel_exercise(reference=_row_sum, cases=_row_sum_cases, launch=_rows),
    "logsumexp": kernel_exercise(
        reference=_logsumexp, cases=_logsumexp_cases, launch=_rows, reads_once=True
    ),
    "grad": kernel_exercise(reference=_grad, cases=_grad_cases, launch=_whole_rows, scale=10.0),
    "query": kernel_exercise(reference=_query, cases=_query_cases, launch=_one_query, scale=10.0),
    "at_b": kernel_exercise(reference=_at_b, cases=_at_b_cases, launch=_tiles, scale=10.0),
    "asked": Exercise(
        reference=_asked,
        cases=lambda: [(16, 16, 16), (33, 17, 20), (5, 40, 50), (1, 1, 1), (64, 96, 33), (7, 5, 0)],
    ),
}
