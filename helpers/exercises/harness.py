"""Every chapter: check an exercise at once, saying what is wrong and never the answer."""

import copy
import importlib
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.tensors import shares_storage

UNANSWERED = "not answered yet: replace the dots"

# How far a right answer may be from the reference, relative to the element: some hundred units in
# the last place, for sums taken in another order. (Half precision: some ten, it is rounded once.)
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class WrongAnswer(Exception):
    """Raised where the machinery of an exercise can itself tell the reader what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """What an answer must do.

    reference: the specification, usually PyTorch's own operation. What it raises is part of it.
    cases: makes the tuples of arguments; called with all generators seeded.
    through: turns an answer (and the reference) into the function to be called, for answers that
        are not one themselves: a class to be built, a kernel to be launched.
    view: the result must share the storage of the first argument.
    gradient: gradients with respect to all floating-point arguments must agree, too.
    forbid: names of PyTorch's functions that an answer must do without, such as ``cumsum``.
    scale: size of the terms that are added up; an absolute difference of RTOL × scale does not
        count. Where an exercise is about small numbers, `scale` must be as small as they are.
    """

    reference: Callable[..., Any]
    cases: Callable[[], Sequence[tuple]]
    through: Callable[[Any], Callable[..., Any]] | None = None
    view: bool = False
    gradient: bool = False
    forbid: tuple[str, ...] = ()
    scale: float = 1.0


def of_each_rank(
    ranks: int, near: Callable[[], float] | None = None
) -> Callable[[Any], Callable[[int], Any]]:
    """Return the `through` of answers with one result for each of `ranks`, and no more.

    near: what a result has to be; a float that differs from it by less than 1e-6 counts as equal.
    """

    def through(answer: Any) -> Callable[[int], Any]:
        def at(rank: int) -> Any:
            if callable(answer):
                return answer(rank)
            if len(answer) != ranks:
                raise WrongAnswer(
                    f"expected one result from each of {ranks} ranks, got {len(answer)}"
                )
            found = answer[rank]
            if near is None or not isinstance(found, float):
                return found
            # else a few digits, or what is printed of it would differ from machine to machine
            return near() if abs(found - near()) < 1e-6 else round(found, 4)

        return at

    return through


def check(name: str, answer: Any) -> None:
    """Print how `answer` does in exercise `name`, ``"chapter.exercise"``.

    Raises ValueError for a name that is no exercise. Neither the arguments of the answer nor the
    random numbers of the notebook depend on how often a cell is run.
    """
    print(_verdict(answer, find(name), name))


def find(name: str) -> Exercise:
    """Return the exercise called ``"chapter.exercise"``, from ``helpers/exercises/chapter.py``."""
    chapter, _, exercise = name.partition(".")
    try:
        known = importlib.import_module(f"helpers.exercises.{chapter}").EXERCISES
    except ModuleNotFoundError as error:
        raise ValueError(f"no chapter {chapter!r} has exercises; got the name {name!r}") from error
    if exercise not in known:
        raise ValueError(f"unknown exercise {name!r}; {chapter} has {sorted(known)}")
    return known[exercise]


def _verdict(answer: Any, spec: Exercise, name: str) -> str:
    if answer is ...:
        return f"✗ {UNANSWERED}"
    if answer is spec.reference:
        return "✗ this is the reference itself"

    seed = zlib.crc32(name.encode())
    with _seeded(seed):
        cases = spec.cases()

    mine, theirs = answer, spec.reference
    if spec.through is not None:
        mine, theirs = spec.through(answer), spec.through(spec.reference)
    if spec.forbid:
        mine = _without(mine, spec.forbid)

    for number, arguments in enumerate(cases, 1):
        problem = _problem(mine, theirs, arguments, spec, seed + number)
        if problem == UNANSWERED:
            return f"✗ {problem}"
        if problem:
            return f"✗ case {number} of {len(cases)}, {_shown(arguments)}: {problem}"
    return f"✓ correct on {len(cases)} case{'s' if len(cases) > 1 else ''}"


class _Without(TorchFunctionMode):
    """Raise as soon as one of the functions called `names` is used."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        self.names = names

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.names:
            raise RuntimeError(f"this exercise is to be solved without {name}")
        return function(*args, **({} if kwargs is None else kwargs))


def _without(answer: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def watched(*arguments: Any) -> Any:
        with _Without(names):
            return answer(*arguments)

    return watched


def _problem(
    answer: Callable, reference: Callable, arguments: tuple, spec: Exercise, seed: int
) -> str | None:
    """Return the first difference in words, or None."""
    mine, theirs = _copies(arguments, spec.gradient), _copies(arguments, spec.gradient)
    with _seeded(seed):
        got, got_error = _call(answer, mine)
    with _seeded(seed):
        want, want_error = _call(reference, theirs)

    if got is ... and got_error is None:
        return UNANSWERED
    if got_error or want_error:
        return _error_difference(got_error, want_error)

    difference = _difference(got, want, spec.scale)
    if difference:
        return difference
    spoiled = _spoiled(mine, arguments)
    if spoiled:
        return spoiled
    if spec.view and not shares_storage(got, mine[0]):
        return "right values, but a copy: expected a view of the argument's storage"
    if spec.gradient:
        return _gradient_difference(got, want, mine, theirs, spec.scale)
    return None


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every global generator, and give the notebook its own random numbers back after."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _copies(arguments: tuple, gradient: bool) -> list[Any]:
    """Fresh arguments for each side: an in-place answer must not spoil the reference's input.

    Strides stay, so that a case with a transposed or expanded tensor remains one.
    """

    def fresh(argument: Any) -> Any:
        if isinstance(argument, (list, dict)):
            return copy.deepcopy(argument)
        if not isinstance(argument, Tensor):
            return argument
        size, offset = argument.untyped_storage().size(), argument.storage_offset()
        storage = argument.detach().as_strided([size // argument.element_size()], [1], 0).clone()
        tensor = storage.as_strided(argument.shape, argument.stride(), offset)
        return tensor.requires_grad_(gradient and argument.is_floating_point())

    return [fresh(argument) for argument in arguments]


def _spoiled(now: list[Any], before: tuple) -> str | None:
    """Name the first argument that the answer changed in place."""
    for position, (a, b) in enumerate(zip(now, before, strict=True), 1):
        if isinstance(b, Tensor):
            a, b = a.detach(), b.detach()
            same = a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
            if not same:
                return f"argument {position} was changed in place"
        elif isinstance(b, (list, dict)) and repr(a) != repr(b):  # they may hold tensors
            return f"argument {position} was changed in place"
    return None


def _call(function: Callable, arguments: list[Any]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except Exception as error:  # a learner's function may raise anything: it is shown to them
        return None, error


def _error_difference(got: Exception | None, want: Exception | None) -> str | None:
    if isinstance(got, WrongAnswer):
        return str(got)
    if type(got) is type(want):
        return None
    wanted = type(want).__name__ if want else "a result"
    return f"expected {wanted}, got {_first_line(got)}" if got else f"expected {wanted}"


def _difference(got: Any, want: Any, scale: float) -> str | None:
    if isinstance(want, Tensor):
        return _tensor_difference(got, want, scale)
    if isinstance(want, (tuple, list)):
        return _sequence_difference(got, want, scale)
    if isinstance(want, Number) and not isinstance(want, bool):
        return _number_difference(got, want, scale)
    if isinstance(want, bool) and isinstance(got, np.bool_):  # NumPy's answers are answers, too
        got = bool(got)
    if type(got) is not type(want):
        return f"expected {type(want).__name__}, got {type(got).__name__}"
    return None if got == want else f"value is not right: {got!r}"


def _sequence_difference(got: Any, want: tuple | list, scale: float) -> str | None:
    if not isinstance(got, (tuple, list)):  # a list for a tuple is as good
        return f"expected {type(want).__name__}, got {type(got).__name__}"
    if len(got) != len(want):
        return f"expected {len(want)} results, got {len(got)}"
    for position, (one, other) in enumerate(zip(got, want, strict=True), 1):
        problem = _difference(one, other, scale)
        if problem:
            return f"result {position}: {problem}"
    return None


def _number_difference(got: Any, want: Number, scale: float) -> str | None:
    """Integers must be equal; floats may differ as float64 does; NumPy's numbers are numbers."""
    if not isinstance(got, Number) or isinstance(got, bool):
        return f"expected {type(want).__name__}, got {type(got).__name__}"
    if isinstance(want, int):
        return None if got == want else f"value is not right: {got!r}"
    rtol = RTOL[torch.float64]
    same = math.isclose(got, want, rel_tol=rtol, abs_tol=rtol * scale)
    if same or (math.isnan(got) and math.isnan(want)):
        return None
    return f"value is not right: {got!r}"


def _tensor_difference(got: Any, want: Tensor, scale: float) -> str | None:
    if not isinstance(got, Tensor):
        return f"expected Tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        return f"shape: expected {list(want.shape)}, got {list(got.shape)}"
    if got.dtype != want.dtype:
        return f"dtype: expected {want.dtype}, got {got.dtype}"
    rtol = RTOL.get(want.dtype, 0.0)
    close = torch.isclose(got, want, rtol=rtol, atol=rtol * scale, equal_nan=True)
    if close.all():
        return None
    words = f"value: {int((~close).sum())} of {close.numel()} elements differ"
    if got[~close].isfinite().all():
        gap = (got.double() - want.double())[~close].abs().max().item()
        return f"{words}, by up to {gap:.3g}"
    return f"{words}, and some of yours are inf or nan"


def _gradient_difference(
    got: Tensor, want: Tensor, mine: list, theirs: list, scale: float
) -> str | None:
    if not got.requires_grad:
        return "gradient: the result is cut off from its arguments"
    weight = torch.linspace(-1, 1, want.numel()).view_as(want).to(want)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True), 1):
        if isinstance(b, Tensor) and b.requires_grad:
            zero = torch.zeros_like(b)
            got_grad = zero if a.grad is None else a.grad
            want_grad = zero if b.grad is None else b.grad
            problem = _difference(got_grad, want_grad, scale)
            if problem:
                return f"gradient of argument {position}: {problem}"
    return None


def _first_line(error: Exception) -> str:
    """The error in one line: a compiler's reports have pages."""
    text = repr(error)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _shown(arguments: tuple) -> str:
    """The arguments of a case, short enough for one line: small tensors with their numbers."""

    def one(argument: Any) -> str:
        if not isinstance(argument, Tensor):
            text = getattr(argument, "__name__", repr(argument))  # a function by its name
        elif argument.numel() <= 6:
            text = f"tensor({argument.tolist()})"
        else:
            text = f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
        return text if len(text) <= 60 else f"{text[:57]}…"

    return f"f({', '.join(one(argument) for argument in arguments)})"
