"""Chapter 03: an autograd engine of one's own, on NumPy arrays; it agrees with PyTorch's."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


class Value:
    """A float64 array that remembers what it was computed from.

    parents: (Value, rule) pairs; a rule turns this node's gradient into the part for that parent.
    grad: None, or d(root)/d(self), summed over calls of `backward`. Constants are no parents.
    """

    def __init__(self, data: ArrayLike, op: str = "leaf", parents: tuple | list = ()):
        self.data, self.grad, self.op = np.asarray(data, dtype=np.float64), None, op
        self.parents = [(parent, rule) for parent, rule in parents if parent.op != "constant"]

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

    __array_ufunc__ = None  # for `array * Value`, NumPy leaves the operator to Value
    __radd__, __rmul__, __neg__ = __add__, __mul__, lambda a: a * -1.0
    __sub__, __rsub__ = lambda a, b: a + -b, lambda a, b: -a + b
    __truediv__, __rtruediv__ = lambda a, b: a * b**-1.0, lambda a, b: a**-1.0 * b
    __rmatmul__, __repr__ = lambda a, b: _value(b) @ a, lambda a: f"{a.op} {a.data.tolist()}"

    def order(self) -> list[Value]:
        """List all nodes behind self, parents first; with a stack depth has no limit."""
        done, seen, stack = [], set(), [(self, False)]
        while stack:
            node, finished = stack.pop()
            if finished:
                done.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(parent, False) for parent, _ in node.parents[::-1]]
        return done

    def backward(self, seed: ArrayLike = 1.0) -> None:
        """Add d(sum(seed * self)) / d(node) to `grad` of each node behind self."""
        if np.shape(seed) != self.data.shape:
            raise ValueError(f"seed: expected {self.data.shape}, got {np.shape(seed)}")
        flow = {self: np.asarray(seed, dtype=np.float64)}
        for node in reversed(self.order()):  # children first, so its gradient is complete
            g = flow.pop(node)
            node.grad = g + (0.0 if node.grad is None else node.grad)
            for parent, rule in node.parents:
                part = _unbroadcast(rule(g), parent.data.shape)
                flow[parent] = flow.get(parent, 0.0) + part


def _value(x: Value | ArrayLike) -> Value:
    return x if isinstance(x, Value) else Value(x, "constant")


def _unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Where broadcasting made copies, add up what they send back."""
    stretched = tuple(i for i, n in enumerate(shape) if n == 1)
    g = np.sum(g, axis=tuple(range(np.ndim(g) - len(shape))))
    return g.sum(axis=stretched, keepdims=True)
