"""Every chapter: check an exercise at once, saying what is wrong and never the answer."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

UNANSWERED = "not answered yet: replace the dots"


def check(
    answer: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[tuple],
    *,
    view: bool = False,
    gradient: bool = False,
) -> None:
    """Print how `answer` compares with `reference` on every tuple of arguments.

    reference: the specification, usually PyTorch's own operation.
    view: the result must share the storage of the first argument.
    gradient: gradients with respect to floating-point arguments must agree, too.
    Exceptions that the reference raises are part of the specification.
    """
    problem = None
    if answer is reference:
        problem = "this is the reference itself"
    for number, arguments in enumerate(inputs, 1):
        problem = problem or _compare(answer, reference, arguments, view, gradient)
        if problem:
            where = "" if problem == UNANSWERED else f"case {number} of {len(inputs)}: "
            print(f"✗ {where}{problem}")
            return
    print(f"✓ correct on {len(inputs)} cases")


def check_kernel(
    kernel: Any,
    layout: Callable[..., tuple],
    reference: Callable[..., Tensor],
    inputs: Sequence[tuple],
) -> None:
    """`check` for a Triton kernel: reads and writes beyond the tensors are found as well.

    layout: the arguments -> shape of the output, grid, sizes and constants for the kernel, which
    is called with the tensors, the output, the sizes, the other arguments and the constants. The
    output has the dtype of the first argument.
    """

    def room(tensor: Tensor) -> tuple[Tensor, Tensor]:  # 777 before and after it, in one piece
        big = torch.full((tensor.numel() + 4096,), 777, dtype=tensor.dtype)
        return big, big[2048:-2048].copy_(tensor.flatten()).view(tensor.shape)

    def answer(*arguments: Any) -> Any:
        shape, grid, sizes, constants = layout(*arguments)
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        scalars = [a for a in arguments if not isinstance(a, Tensor)]
        big, out = room(torch.full(shape, torch.nan, dtype=tensors[0].dtype))
        kernel[grid](*(room(t)[1] for t in tensors), out, *sizes, *scalars, **constants)
        if big[:2048].ne(777).any() or big[-2048:].ne(777).any():
            raise IndexError("the kernel stored outside of its output")
        return ... if re.search(r":\s*\.\.\.\s*$", inspect.getsource(kernel.fn)) else out

    check(answer, reference, inputs)


def _compare(
    answer: Callable, reference: Callable, arguments: tuple, view: bool, gradient: bool
) -> str | None:
    """Return the first difference in words, or None."""
    mine, theirs = _copy(arguments, gradient), _copy(arguments, gradient)
    got, got_error = _call(answer, mine)
    want, want_error = _call(reference, theirs)
    if got is ... and got_error is None:
        return UNANSWERED
    if type(got_error) is not type(want_error):
        wanted = type(want_error).__name__ if want_error else "a result"
        return f"expected {wanted}, got {got_error!r}" if got_error else f"expected {wanted}"
    if want_error:
        return None
    problem = _difference(got, want)
    if problem:
        return problem
    changed = [i for i, (a, b) in enumerate(zip(mine, arguments, strict=True)) if _changed(a, b)]
    if changed:
        return f"argument {changed[0] + 1} was changed in place"
    if view and got.untyped_storage().data_ptr() != mine[0].untyped_storage().data_ptr():
        return "right values, but a copy: expected a view of the argument's storage"
    return _gradient_difference(got, want, mine, theirs) if gradient else None


def _copy(arguments: tuple, gradient: bool) -> list[Any]:
    """Fresh arguments for each side: an in-place answer must not spoil the reference's input."""

    def fresh(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        return a.detach().clone().requires_grad_(gradient and a.is_floating_point())

    return [fresh(a) for a in arguments]


def _changed(now: Any, before: Any) -> bool:
    if not isinstance(before, Tensor):
        return False
    now, before = now.detach().double(), before.detach().double()
    return now.shape != before.shape or not torch.allclose(
        now, before, rtol=0, atol=0, equal_nan=True
    )


def _call(function: Callable, arguments: list[Any]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except Exception as error:  # a learner's function may raise anything: it is shown to them
        return None, error


def _difference(got: Any, want: Any) -> str | None:
    if type(got) is not type(want):
        return f"expected {type(want).__name__}, got {type(got).__name__}"
    if isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        if len(got) != len(want):
            return f"expected {len(want)} results, got {len(got)}"
        parts = (_difference(g, w) for g, w in zip(got, want, strict=True))
        return next((f"result {i}: {p}" for i, p in enumerate(parts, 1) if p), None)
    if not isinstance(want, Tensor):
        return None if got == want else f"value is not right: {got!r}"
    if got.shape != want.shape:
        return f"shape: expected {list(want.shape)}, got {list(got.shape)}"
    if got.dtype != want.dtype:
        return f"dtype: expected {want.dtype}, got {got.dtype}"
    close = torch.isclose(got, want, rtol=1e-4, atol=1e-6, equal_nan=True)
    if not close.all():
        gap = (got.double() - want.double()).abs().max().item()
        wrong = int((~close).sum())
        return f"value: {wrong} of {close.numel()} elements differ, by up to {gap:.3g}"
    return None


def _gradient_difference(got: Tensor, want: Tensor, mine: list, theirs: list) -> str | None:
    if not got.requires_grad:
        return "gradient: the result is cut off from its arguments"
    weight = torch.linspace(-1, 1, want.numel()).view_as(want).to(want)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True), 1):
        if isinstance(b, Tensor) and b.requires_grad:
            zero = torch.zeros_like(b)
            problem = _difference(a.grad if a.grad is not None else zero, b.grad)
            if problem:
                return f"gradient of argument {i}: {problem}"
    return None
