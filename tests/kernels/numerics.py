"""One way to judge a kernel: element by element, by the roundings that its formula cannot avoid.

A floating-point operation returns fl(x op y) = (x op y)(1 + d) with |d| <= u, the unit roundoff:
half a unit in the last place, 2^-24 in float32, 2^-11 in float16, 2^-8 in bfloat16. `Rounded`
carries a value in float64 together with a bound on what all the roundings before it can have done
to it (running error analysis: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition,
2002, section 3.3):

    x + y       e_x + e_y                               + u |x + y|
    x y         |x| e_y + |y| e_x + e_x e_y             + u |x y|
    sum of n    sum of e_i + gamma_(n-1) sum of |x_i|     in whatever order (Higham, 4.2)
    f(x)        the change of f over x +- e_x           + 8 u |f(x)|

with gamma_n = n u / (1 - n u). 8 u is four units in the last place: what CUDA's approximate exp2,
log2 and division promise (CUDA C++ Programming Guide, mathematical functions) and NumPy's vector
code. A test writes down its operator's formula once more, with the roundings to half precision
that the algorithm makes on the way; the allowance of each element follows. It knows nothing of
what eager mode did on this processor, of the order in which it adds, or of the other elements.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.kernels import INTERPRETED

WIDTHS = [1, 7, 123, 1000, 4097]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
U = 2.0**-24  # kernels compute in float32, whatever the dtype of their inputs
FUNCTION = 8 * U
FLUSHED = 2.0**-126  # a GPU's exp2 takes float32 results below this for zero


@dataclass(frozen=True)
class Rounded:
    """Values in float64, and for each a bound on the error with which float32 computes it."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exact(value: Tensor | float) -> "Rounded":
        value = torch.as_tensor(value, dtype=torch.float64)
        return Rounded(value, torch.zeros_like(value))

    def __add__(self, other: "Rounded | float") -> "Rounded":
        other = _rounded(other)
        value = self.value + other.value
        return _of(value, self.error + other.error + U * value.abs())

    def __mul__(self, other: "Rounded | float") -> "Rounded":
        other = _rounded(other)
        value = self.value * other.value
        error = self.value.abs() * other.error + other.value.abs() * self.error
        return _of(value, error + self.error * other.error + U * value.abs())

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> "Rounded":
        return Rounded(-self.value, self.error)  # a sign is exact

    def __sub__(self, other: "Rounded | float") -> "Rounded":
        return self + -_rounded(other)

    def __rsub__(self, other: float) -> "Rounded":
        return _rounded(other) + -self

    def __truediv__(self, other: "Rounded | float") -> "Rounded":
        return self * _rounded(other).apply(torch.reciprocal)

    def __rtruediv__(self, other: float) -> "Rounded":
        return other * self.apply(torch.reciprocal)

    def flatten(self, first: int, last: int) -> "Rounded":
        return Rounded(self.value.flatten(first, last), self.error.flatten(first, last))

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Rounded":
        """A function of the library that is monotonic, or has its extremes in the middle."""
        value = function(self.value)
        ends = [function(self.value + sign * self.error) for sign in (-1, 1)]
        moved = torch.maximum(*((end - value).abs() for end in ends))
        return _of(value, moved + FUNCTION * (value.abs() + moved) + FLUSHED)

    def exp(self) -> "Rounded":
        """As base e or 2, whose argument is multiplied by a constant first: two roundings more."""
        return _of(self.value, self.error + 3 * U * self.value.abs()).apply(torch.exp)

    def times(self, roundings: float | Tensor) -> "Rounded":
        """The same values after so many more roundings, as of an online sum that is rescaled."""
        return _of(self.value, self.error + roundings * U * (self.value.abs() + self.error))

    def sum(self, dim: int, keepdim: bool = True) -> "Rounded":
        n = self.value.shape[dim]
        gamma = n * U / (1 - n * U)
        error = self.error.sum(dim, keepdim) * (1 + gamma)
        error = error + gamma * self.value.abs().sum(dim, keepdim)
        return _of(self.value.sum(dim, keepdim), error)

    def __matmul__(self, other: "Rounded") -> "Rounded":
        """Sum over the last of self and the last but one of other: n products, n - 1 sums."""
        n = self.value.shape[-1]
        gamma = n * U / (1 - n * U)
        (a, b), (da, db) = (self.value, other.value), (self.error, other.error)
        terms = a.abs() @ b.abs()
        moved = a.abs() @ db + da @ b.abs() + da @ db
        return _of(a @ b, moved * (1 + gamma) + gamma * terms)

    @property
    def mT(self) -> "Rounded":
        return Rounded(self.value.mT, self.error.mT)

    def to(self, dtype: torch.dtype) -> "Rounded":
        """Round to nearest in `dtype`: half a unit in the last place, of subnormal numbers, too."""
        if dtype is torch.float64:
            return self
        info = torch.finfo(dtype)
        most = self.value.abs() + self.error
        half_unit = torch.maximum(most, torch.tensor(info.smallest_normal)) * info.eps / 2
        return _of(self.value, self.error + half_unit)


def _rounded(x: "Rounded | float") -> Rounded:
    return x if isinstance(x, Rounded) else Rounded.exact(x)


def _of(value: Tensor, error: Tensor) -> Rounded:
    """exp(-inf) is 0 exactly: an infinite value has no error, where that would be inf * 0."""
    return Rounded(value, torch.where(value.isinf(), 0.0, error).expand_as(value))


def randn(*shape, device, dtype=torch.float32, grad=True):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device).requires_grad_(grad)


def upstream(y: Tensor) -> Tensor:
    """One fixed gradient of the output, exact in any dtype, with zeros and both signs."""
    return ((torch.arange(y.numel()) * 7 % 33 - 16).view(y.shape) / 16).to(y)


def run(function, inputs):
    """The output and the gradient of each floating input, for one fixed upstream gradient."""
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    y = function(*inputs)
    floats = [t for t in inputs if t.requires_grad]
    grads = torch.autograd.grad(y, floats, upstream(y))
    return [y.detach(), *grads]


def allowances(eager, arithmetic, inputs) -> list[Rounded]:
    """Results in float64 and what `arithmetic` allows each of their elements.

    arithmetic(dtype, dy, *inputs) writes the formula of the kernel with `Rounded`: it returns the
    output and the gradients. Its values must be those of PyTorch and autograd in float64, up to
    the roundings of float64 (PyTorch's GELU by tanh loses all its digits far out, ours does not);
    where PyTorch's are NaN or infinite, so must the kernel's be.
    """
    wide = [t.detach().cpu().double() if t.is_floating_point() else t.cpu() for t in inputs]
    dtype = next(t.dtype for t in inputs if t.is_floating_point())
    exact = run(eager, wide)
    dy = Rounded.exact(upstream(exact[0]))
    many = [Rounded.exact(t) if t.is_floating_point() else t for t in wide]
    found = []
    for want, rounded in zip(exact, arithmetic(dtype, dy, *many), strict=True):
        value, error = (t.reshape(want.shape) for t in (rounded.value, rounded.error))
        finite = want.isfinite()
        noise = 1e-12 * (1 + want[finite].abs().max()) if finite.any() else 0  # of float64
        assert ((value - want).abs() <= error + noise)[finite].all(), "another formula"
        found.append(Rounded(value.where(finite, want), error))
    return found


def outside(got: Tensor, allowed: Rounded) -> Tensor:
    """Which elements are farther from the exact value than roundings explain; NaN is such a one.

    Where the exact value is NaN or infinite, exactly that is wanted.
    """
    got = got.detach().cpu().double()
    finite = allowed.value.isfinite()
    near = (got - allowed.value).abs() <= allowed.error
    same = (got == allowed.value) | (got.isnan() & allowed.value.isnan())
    return ~torch.where(finite, near, same)


def assert_rounds_well(ours, eager, arithmetic, inputs):
    """Outputs and gradients: each element within its own allowance, inputs unchanged."""
    before = [t.clone() for t in inputs]
    allowed = allowances(eager, arithmetic, inputs)
    got = run(ours, inputs)
    dtypes = [got[0].dtype, *(t.dtype for t in inputs if t.is_floating_point())]
    for i, (mine, bound) in enumerate(zip(got, allowed, strict=True)):
        name = "output" if i == 0 else f"gradient {i}"
        assert mine.shape == bound.value.shape and mine.dtype == dtypes[i], name
        wrong = outside(mine, bound)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {wrong.sum()} of {wrong.numel()} elements; at {at} expected "
                f"{bound.value[at]:.9g} ± {bound.error[at]:.3g}, got {mine[at].item():.9g}"
            )
    for was, now in zip(before, inputs, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)  # unchanged


def gradcheck(function, *inputs, double=False):
    """Against finite differences in float64."""
    inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    assert torch.autograd.gradcheck(function, inputs)
    if double:
        assert torch.autograd.gradgradcheck(function, inputs)


def composes(operator, function, args, compiled_args):
    """Registered correctly, and `torch.compile` takes it into one graph with what surrounds it.

    Interpreted, the operator is a black box, and doubling is exact: so the results are the same
    bits. On a GPU the compiler may fuse and reorder the sums around the kernels.
    """
    torch.library.opcheck(operator, args)
    torch.compiler.reset()
    graph = torch.compile(lambda *a: function(*(t * 2 for t in a)) + 1, fullgraph=True)
    for got, want in zip(
        run(graph, compiled_args),
        run(lambda *a: function(*(t * 2 for t in a)) + 1, compiled_args),
        strict=True,
    ):
        close = {"rtol": 0, "atol": 0} if INTERPRETED else {}
        torch.testing.assert_close(got, want, **close)
