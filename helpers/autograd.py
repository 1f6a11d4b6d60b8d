"""Chapter 03: an autograd engine of one's own, on NumPy arrays; it agrees with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


class Value:
    """A float64 array that remembers what it was computed from: a node of the graph.

    parents: pairs (input, rule), the edges along which gradients flow back. A rule is the
        vector-Jacobian product (VJP) of the operation with respect to that input: it takes the
        gradient of this node, shaped as `data`, and returns the part that belongs to the input.
        PyTorch keeps the same edges in ``grad_fn.next_functions``.
    grad: None, or d(root)/d(self), shaped as `data` and summed over calls of `backward`.

    Constants are no parents: nobody asks for their gradient.
    """

    # For `array * Value`, NumPy must not loop over the array but leave the operator to Value.
    __array_ufunc__ = None

    def __init__(
        self,
        data: ArrayLike,
        op: str = "leaf",
        parents: Sequence[tuple[Value, Callable[[np.ndarray], np.ndarray]]] = (),
    ):
        self.data = np.asarray(data, dtype=np.float64)
        self.grad = None
        self.op = op
        self.parents = [(parent, rule) for parent, rule in parents if parent.op != "constant"]

    def __repr__(self) -> str:
        return f"{self.op} {self.data.tolist()}"

    # Two operands: shapes broadcast as in NumPy; `backward` sums over the copies.

    def __add__(self, other: Value | ArrayLike) -> Value:
        a, b = self, _value(other)
        return Value(a.data + b.data, "+", [(a, lambda g: g), (b, lambda g: g)])

    def __mul__(self, other: Value | ArrayLike) -> Value:
        a, b = self, _value(other)
        return Value(a.data * b.data, "*", [(a, lambda g: g * b.data), (b, lambda g: g * a.data)])

    def __matmul__(self, other: Value | ArrayLike) -> Value:
        a, b = self, _value(other)  # [..., R, K] @ [..., K, C] -> [..., R, C]
        if min(a.data.ndim, b.data.ndim) < 2:
            raise ValueError(f"@ expects matrices, got {a.data.shape} @ {b.data.shape}")
        left, right = a.data.swapaxes(-1, -2), b.data.swapaxes(-1, -2)
        rules = [(a, lambda g: g @ right), (b, lambda g: left @ g)]
        return Value(a.data @ b.data, "@", rules)

    # One operand.

    def __pow__(self, n: float) -> Value:
        return Value(self.data**n, "**", [(self, lambda g: g * n * self.data ** (n - 1))])

    def exp(self) -> Value:
        y = np.exp(self.data)
        return Value(y, "exp", [(self, lambda g: g * y)])

    def log(self) -> Value:
        return Value(np.log(self.data), "log", [(self, lambda g: g / self.data)])

    def sigmoid(self) -> Value:
        y = 0.5 + 0.5 * np.tanh(0.5 * self.data)  # exp(-x) would overflow for x far below 0
        return Value(y, "sigmoid", [(self, lambda g: g * y * (1 - y))])

    def tanh(self) -> Value:
        y = np.tanh(self.data)
        return Value(y, "tanh", [(self, lambda g: g * (1 - y * y))])

    def relu(self) -> Value:
        return Value(np.maximum(self.data, 0), "relu", [(self, lambda g: g * (self.data > 0))])

    def sum(self) -> Value:
        return Value(self.data.sum(), "sum", [(self, lambda g: g * np.ones_like(self.data))])

    # What can be written with the operations above needs no rule of its own.

    def __neg__(self) -> Value:
        return self * -1.0

    def __sub__(self, other: Value | np.ndarray | float) -> Value:
        return self + -other

    def __truediv__(self, other: Value | np.ndarray | float) -> Value:
        return self * other**-1.0

    # Python asks the right operand when the left one is an array or a number.

    def __radd__(self, other: ArrayLike) -> Value:
        return self + other

    def __rmul__(self, other: ArrayLike) -> Value:
        return self * other

    def __rmatmul__(self, other: ArrayLike) -> Value:
        return _value(other) @ self

    def __rsub__(self, other: ArrayLike) -> Value:
        return -self + other

    def __rtruediv__(self, other: ArrayLike) -> Value:
        return self**-1.0 * other

    # The backward pass.

    def order(self) -> list[Value]:
        """Return the topological sort of the graph behind self: every node once, inputs first.

        A depth-first search with a stack of its own: recursion would end at a depth of 1,000.
        """
        done: list[Value] = []
        seen: set[Value] = set()
        stack = [(self, False)]
        while stack:
            node, finished = stack.pop()
            if finished:
                done.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))  # comes up again when all its inputs are done
                stack += [(parent, False) for parent, _ in reversed(node.parents)]
        return done

    def backward(self, seed: ArrayLike = 1.0) -> None:
        """Add d(sum(seed * self)) / d(node) to `grad` of each node behind self.

        seed: the vector of the vector-Jacobian product, shaped as self. Only a scalar can do
        without: then it is 1. Raises ValueError for another shape.
        """
        if np.shape(seed) != self.data.shape:
            raise ValueError(f"seed: expected {self.data.shape}, got {np.shape(seed)}")

        flow = {self: np.asarray(seed, dtype=np.float64)}  # the gradients of this call alone
        for node in reversed(self.order()):  # users before inputs: so each gradient is complete
            g = flow.pop(node)
            node.grad = g + (0.0 if node.grad is None else node.grad)
            for parent, rule in node.parents:
                part = _unbroadcast(rule(g), parent.data.shape)
                flow[parent] = flow.get(parent, 0.0) + part


def _value(x: Value | ArrayLike) -> Value:
    """Wrap a number or an array as a constant; a Value stays as it is."""
    return x if isinstance(x, Value) else Value(x, "constant")


def _unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum g over the copies that broadcasting made of an array of `shape`: the VJP of expand."""
    added = tuple(range(np.ndim(g) - len(shape)))  # dimensions that were missing on the left
    g = np.sum(g, axis=added)
    stretched = tuple(i for i, size in enumerate(shape) if size == 1)
    return g.sum(axis=stretched, keepdims=True)
