"""Chapter 03: the autograd engine that the chapter builds, here with docstrings and types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike


def topological_order(root: Value) -> list[Value]:
    """Return all nodes behind `root`, each after all the nodes that use it."""
    uses = {}
    waiting = [root]
    while waiting:
        for source in waiting.pop().inputs:
            if source not in uses:
                uses[source] = 0
                waiting.append(source)
            uses[source] += 1

    order = []
    ready = [root]
    while ready:
        node = ready.pop()
        order.append(node)
        for source in node.inputs:
            uses[source] -= 1
            if uses[source] == 0:
                ready.append(source)
    return order


def unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum g over the dimensions along which broadcasting repeated an array of `shape`."""
    while g.ndim > len(shape):
        g = g.sum(axis=0)
    for axis, length in enumerate(shape):
        if length == 1:
            g = g.sum(axis=axis, keepdims=True)
    return g


def as_value(x: Value | ArrayLike) -> Value:
    """Wrap a number or an array; a Value stays as it is."""
    return x if isinstance(x, Value) else Value(x)


class Value:
    """A float64 array that remembers what it was computed from: a node of the graph.

    inputs: the Values it was computed from.
    rule: takes the gradient of this node, shaped as `data`, and returns the contribution to the
        gradient of each input: the vector-Jacobian products (VJPs) of the operation.
    grad: d(root)/d(self), shaped as `data` and summed over calls of `backward`.
    """

    __array_ufunc__ = None  # array * Value: calls the method of Value

    def __init__(
        self,
        data: ArrayLike,
        inputs: tuple[Value, ...] = (),
        rule: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None,
    ):
        self.data = np.asarray(data, dtype=np.float64)
        self.grad = np.zeros_like(self.data)
        self.inputs = inputs
        self.rule = rule

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __add__(self, other: Value | ArrayLike) -> Value:
        other = as_value(other)

        def rule(g):
            return g, g

        return Value(self.data + other.data, (self, other), rule)

    def __mul__(self, other: Value | ArrayLike) -> Value:
        other = as_value(other)

        def rule(g):
            return g * other.data, g * self.data

        return Value(self.data * other.data, (self, other), rule)

    def __matmul__(self, other: Value | ArrayLike) -> Value:
        other = as_value(other)
        if len(self.shape) != 2 or len(other.shape) != 2:
            raise ValueError(f"@ needs matrices, got {self.shape} and {other.shape}")

        def rule(g):
            return g @ other.data.T, self.data.T @ g

        return Value(self.data @ other.data, (self, other), rule)

    def __pow__(self, n: float) -> Value:
        def rule(g):
            return (g * n * self.data ** (n - 1),)

        return Value(self.data**n, (self,), rule)

    def exp(self) -> Value:
        y = np.exp(self.data)

        def rule(g):
            return (g * y,)

        return Value(y, (self,), rule)

    def log(self) -> Value:
        def rule(g):
            return (g / self.data,)

        return Value(np.log(self.data), (self,), rule)

    def tanh(self) -> Value:
        y = np.tanh(self.data)

        def rule(g):
            return (g * (1 - y**2),)

        return Value(y, (self,), rule)

    def relu(self) -> Value:
        def rule(g):
            return (g * (self.data > 0),)

        return Value(np.maximum(self.data, 0), (self,), rule)

    def sum(self) -> Value:
        def rule(g):
            return (g * np.ones_like(self.data),)

        return Value(self.data.sum(), (self,), rule)

    # The rest is written with the operations above and needs no rules.

    def __neg__(self) -> Value:
        return self * -1

    def __sub__(self, other: Value | ArrayLike) -> Value:
        return self + (-as_value(other))

    def __truediv__(self, other: Value | ArrayLike) -> Value:
        return self * as_value(other) ** -1

    # A number or an array on the left: 2 * value, 1 - value, array @ value.

    def __radd__(self, other: ArrayLike) -> Value:
        return as_value(other) + self

    def __rmul__(self, other: ArrayLike) -> Value:
        return as_value(other) * self

    def __rmatmul__(self, other: ArrayLike) -> Value:
        return as_value(other) @ self

    def __rsub__(self, other: ArrayLike) -> Value:
        return as_value(other) - self

    def __rtruediv__(self, other: ArrayLike) -> Value:
        return as_value(other) / self

    def backward(self, gradient: ArrayLike = 1.0) -> None:
        """Add d(sum(gradient * self)) / d(node) to `grad` of each node behind self.

        gradient: the vector of the vector-Jacobian product, shaped as self; a scalar needs none.
        """
        if np.shape(gradient) != self.shape:
            raise ValueError(f"need shape {self.shape}, got {np.shape(gradient)}")

        received = {self: np.asarray(gradient, dtype=np.float64)}
        for node in topological_order(self):
            g = received[node]
            node.grad = node.grad + g
            if node.inputs:
                for source, part in zip(node.inputs, node.rule(g), strict=True):
                    part = unbroadcast(part, source.shape)
                    received[source] = received.get(source, 0.0) + part
