"""Wrong kernels, each refused for its reason, and right ones written in another way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from helpers.exercises import kernels as exercises
from helpers.exercises.harness import WrongAnswer, check
from helpers.exercises.kernels import EXERCISES, Launch, kernel_exercise
from helpers.kernels import INTERPRETED
from helpers.kernels.matmul import matmul

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs a CUDA device to be absent")

WRONG, RIGHT = [], []


def wrong(exercise, message):
    """Keep the kernel below: `check` must refuse it with these words."""

    def keep(kernel):
        WRONG.append(pytest.param(exercise, kernel, message, id=f"{exercise}-{kernel.__name__}"))
        return kernel

    return keep


def right(exercise):
    def keep(kernel):
        RIGHT.append(pytest.param(exercise, kernel, id=f"{exercise}-{kernel.__name__}"))
        return kernel

    return keep


# ---- axpy


@right("axpy")
@triton.jit
def separate_steps(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    y = tl.load(y_ptr + at, inside, 0.0).to(tl.float32)
    tl.store(z_ptr + at, tl.fma(x, a + tl.zeros_like(x), y), inside)


@right("axpy")
@triton.jit
def masked_lanes_may_be_anything(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < N), tl.load(y_ptr + at, mask=at < N)
    tl.store(z_ptr + at, a * x + y, mask=at < N)


@right("axpy")
@triton.jit
def read_within_the_end(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = tl.minimum(at, N - 1)  # the last element again: in bounds, and stored once
    x, y = tl.load(x_ptr + within), tl.load(y_ptr + within)
    tl.store(z_ptr + at, a * x + y, mask=at < N)


@wrong("axpy", "not answered yet")
@triton.jit
def stub(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    """Add."""
    ...


@wrong("axpy", "not answered yet")
@triton.jit
def stub_with_a_remark(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr): ...  # a trailing comment


@wrong("axpy", "not answered yet")
@triton.jit
def stub_in_one_line(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr): ...


@wrong("axpy", "f(float32[33], float32[33], -1.0): the kernel loads 31 elements beyond the end of")
@triton.jit
def no_mask(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(z_ptr + at, a * x + y, mask=at < N)


@wrong("axpy", "loads 31 elements beyond the end of argument 2")
@triton.jit
def one_mask(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < N), tl.load(y_ptr + at)
    tl.store(z_ptr + at, a * x + y, mask=at < N)


@wrong("axpy", "the kernel stores 31 elements beyond the end of the output")
@triton.jit
def store_without_a_mask(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at < N, 0.0), tl.load(y_ptr + at, at < N, 0.0)
    tl.store(z_ptr + at, a * x + y)


@wrong("axpy", "loads 1 elements beyond the end of argument 1")
@triton.jit
def off_by_one(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at <= N, 0.0), tl.load(y_ptr + at, at <= N, 0.0)
    tl.store(z_ptr + at, a * x + y, mask=at <= N)


@wrong("axpy", "32 of 64 elements of the output are never stored")
@triton.jit
def first_block_only(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at < N, 0.0), tl.load(y_ptr + at, at < N, 0.0)
    tl.store(z_ptr + at, a * x + y, mask=at < N)


@wrong("axpy", "64 of 64 elements of the output are never stored")
@triton.jit
def nothing_is_stored(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at < N, 0.0), tl.load(y_ptr + at, at < N, 0.0)
    tl.store(z_ptr + at, a * x + y, mask=at > N)


@wrong("axpy", "argument 2: the kernel stores into an input")
@triton.jit
def into_the_input(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at < N, 0.0), tl.load(y_ptr + at, at < N, 0.0)
    tl.store(y_ptr + at, a * x + y, mask=at < N)
    tl.store(z_ptr + at, a * x + y, mask=at < N)


@wrong("axpy", "elements differ")
@triton.jit
def scale_of_the_other(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, at < N, 0.0), tl.load(y_ptr + at, at < N, 0.0)
    tl.store(z_ptr + at, x + a * y, mask=at < N)


@wrong("axpy", "some of yours are inf or nan")
@triton.jit
def stores_nan(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + at, tl.load(x_ptr + at, at < N, 0.0) * float("nan"), mask=at < N)


@wrong("axpy", "expected a result, got NameError")
@triton.jit
def a_name_that_is_not_there(x_ptr, y_ptr, z_ptr, N, a, BLOCK: tl.constexpr):
    tl.store(z_ptr + here, 0.0)  # noqa: F821


# ---- silu_back


@right("silu_back")
@triton.jit
def silu_by_its_own_sigmoid(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(dy_ptr + at, at < N, 0.0), tl.load(x_ptr + at, at < N, 0.0)
    s = 1.0 / (1.0 + tl.exp(-x))
    tl.store(dx_ptr + at, dy * (s + x * s * (1 - s)), mask=at < N)


@wrong("silu_back", "some of yours are inf or nan")
@triton.jit
def sigmoid_that_overflows(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(dy_ptr + at, at < N, 0.0), tl.load(x_ptr + at, at < N, 0.0)
    s = tl.exp(x) / (1.0 + tl.exp(x))
    tl.store(dx_ptr + at, dy * s * (1 + x * (1 - s)), mask=at < N)


@wrong("silu_back", "elements differ")
@triton.jit
def derivative_of_sigmoid(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(dy_ptr + at, at < N, 0.0), tl.load(x_ptr + at, at < N, 0.0)
    s = tl.sigmoid(x)
    tl.store(dx_ptr + at, dy * s * (1 - s), mask=at < N)


@wrong("silu_back", "elements differ")
@triton.jit
def the_forward_pass(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(dy_ptr + at, at < N, 0.0), tl.load(x_ptr + at, at < N, 0.0)
    tl.store(dx_ptr + at, dy * x * tl.sigmoid(x), mask=at < N)


@wrong("silu_back", "elements differ")
@triton.jit
def without_dy(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N, 0.0)
    s = tl.sigmoid(x)
    tl.store(dx_ptr + at, s * (1 + x * (1 - s)), mask=at < N)


@wrong("silu_back", "loads 31 elements beyond the end of argument 1")
@triton.jit
def dy_without_a_mask(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(dy_ptr + at), tl.load(x_ptr + at, at < N, 0.0)
    s = tl.sigmoid(x)
    tl.store(dx_ptr + at, dy * s * (1 + x * (1 - s)), mask=at < N)


# ---- drop


@right("drop")
@triton.jit
def drop_by_a_mask_of_numbers(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = (tl.rand(seed, at) >= p).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < N, other=0.0)
    tl.store(dx_ptr + at, dy * keep * (1 / (1 - p)), mask=at < N)


@wrong("drop", "elements differ")
@triton.jit
def drop_the_other_half(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < N)
    tl.store(dx_ptr + at, tl.where(tl.rand(seed, at) < p, dy / (1 - p), 0.0), mask=at < N)


@wrong("drop", "elements differ")
@triton.jit
def drop_without_the_scale(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < N)
    tl.store(dx_ptr + at, tl.where(tl.rand(seed, at) >= p, dy, 0.0), mask=at < N)


@wrong("drop", "elements differ")
@triton.jit
def drop_scaled_by_p(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < N)
    tl.store(dx_ptr + at, tl.where(tl.rand(seed, at) >= p, dy / p, 0.0), mask=at < N)


@wrong("drop", "elements differ")
@triton.jit
def the_same_mask_in_every_block(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < N)
    keep = tl.rand(seed, tl.arange(0, BLOCK)) >= p
    tl.store(dx_ptr + at, tl.where(keep, dy / (1 - p), 0.0), mask=at < N)


@wrong("drop", "elements differ")
@triton.jit
def a_seed_of_its_own(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at, mask=at < N)
    tl.store(dx_ptr + at, tl.where(tl.rand(7, at) >= p, dy / (1 - p), 0.0), mask=at < N)


@wrong("drop", "loads 31 elements beyond the end of argument 1")
@triton.jit
def drop_without_a_mask(dy_ptr, dx_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + at)
    tl.store(dx_ptr + at, tl.where(tl.rand(seed, at) >= p, dy / (1 - p), 0.0), mask=at < N)


# ---- row_sum


@right("row_sum")
@triton.jit
def sum_of_each_block(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * D
    total = 0.0
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < D)
        total += tl.sum(tl.where(at < D, x, 0.0).to(tl.float32), 0)
    tl.store(y_ptr + tl.program_id(0), total)


@right("row_sum")
@triton.jit
def sum_in_double(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for block in range(tl.cdiv(D, BLOCK)):
        at = block * BLOCK + col
        total += tl.load(x_ptr + row * D + at, at < D, 0.0)
    tl.store(y_ptr + row, tl.sum(total, 0).to(tl.float32))


@wrong("row_sum", "some of yours are inf or nan")
@triton.jit
def sum_without_other(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        total += tl.load(x_ptr + row * D + start + col, mask=start + col < D).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(total, 0))


@wrong("row_sum", "f(float16[2, 3001])")
@triton.jit
def sum_in_half(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], y_ptr.dtype.element_ty)
    for start in range(0, D, BLOCK):
        total += tl.load(x_ptr + row * D + start + col, mask=start + col < D, other=0.0)
    tl.store(y_ptr + row, tl.sum(total, 0))


@wrong("row_sum", "f(float16[2, 70])")
@triton.jit
def blocks_in_half(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, mask=start + col < D, other=0.0)
        half = tl.associative_scan(x, 0, added)
        total += tl.sum(tl.where(col == BLOCK - 1, half, 0.0).to(tl.float32), 0)
    tl.store(y_ptr + row, total)


@triton.jit
def added(a, b):
    return a + b


@wrong("row_sum", "elements differ")
@triton.jit
def the_first_block(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + col, mask=col < D, other=0.0)
    tl.store(y_ptr + row, tl.sum(x.to(tl.float32), 0))


@wrong("row_sum", "elements differ")
@triton.jit
def whole_blocks_only(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D // BLOCK * BLOCK, BLOCK):
        total += tl.load(x_ptr + row * D + start + col)
    tl.store(y_ptr + row, tl.sum(total, 0))


@wrong("row_sum", "loads 8 elements beyond the end of argument 1")
@triton.jit
def sum_without_a_mask(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col).to(tl.float32)
        total += tl.where(start + col < D, x, 0.0)
    tl.store(y_ptr + row, tl.sum(total, 0))


@wrong("row_sum", "elements differ")
@triton.jit
def the_same_row(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        total += tl.load(x_ptr + start + col, mask=start + col < D, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


# ---- logsumexp


@right("logsumexp")
@triton.jit
def logsumexp_lane_by_lane(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)  # a maximum and a sum for each lane
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        new = tl.maximum(top, x)
        less = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - less) + tl.exp(x - less)
        top = new
    most = tl.max(top, 0)
    less = tl.where(most == -float("inf"), 0.0, most)
    tl.store(y_ptr + row, most + tl.log(tl.sum(total * tl.exp(top - less), 0)))


@right("logsumexp")
@triton.jit
def logsumexp_from_a_finite_start(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -1e30, 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - new) * 1.4426950408889634) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(y_ptr + row, top + tl.log2(total) * 0.6931471805599453)


@wrong("logsumexp", "argument 1 has 120 elements, the kernel loads 240: read each once")
@triton.jit
def logsumexp_in_two_passes(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -float("inf"), 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        top = tl.maximum(top, tl.max(x, 0))
    top = tl.where(top == -float("inf"), 0.0, top)
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        total += tl.sum(tl.exp(x - top), 0)
    tl.store(y_ptr + row, top + tl.log(total))


@wrong("logsumexp", "f(float32[3, 40]): value: 2 of 3 elements differ, and some of yours are inf")
@triton.jit
def logsumexp_without_a_guard(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -float("inf"), 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(y_ptr + row, top + tl.log(total))


@wrong("logsumexp", "some of yours are inf or nan")
@triton.jit
def logsumexp_that_overflows(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col, total = tl.program_id(0), tl.arange(0, BLOCK), 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        total += tl.sum(tl.exp(x), 0)
    tl.store(y_ptr + row, tl.log(total))


@wrong("logsumexp", "elements differ")
@triton.jit
def logsumexp_without_rescaling(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -1e30, 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, -float("inf"))
        top = tl.maximum(top, tl.max(x, 0))
        total += tl.sum(tl.exp(x - top), 0)
    tl.store(y_ptr + row, top + tl.log(total))


@wrong("logsumexp", "elements differ")
@triton.jit
def logsumexp_with_padding_of_zero(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -1e30, 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D, 0.0)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(y_ptr + row, top + tl.log(total))


@wrong("logsumexp", "inf or nan")
@triton.jit
def logsumexp_without_other(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -1e30, 0.0
    for start in range(0, D, BLOCK):
        x = tl.load(x_ptr + row * D + start + col, start + col < D)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(y_ptr + row, top + tl.log(total))


# ---- grad


@right("grad")
@triton.jit
def grad_through_the_logarithm(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    inside = col < V
    x = tl.load(x_ptr + row * V + col, inside, -float("inf"))
    top = tl.max(x, 0)
    p = tl.exp(x - top - tl.log(tl.sum(tl.exp(x - top), 0)))
    target = tl.load(target_ptr + row)
    tl.store(dx_ptr + row * V + col, p - (col == target), inside)


@right("grad")
@triton.jit
def grad_to_base_2(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + col, col < V, -1e30) * 1.4426950408889634
    e = tl.exp2(x - tl.max(x, 0))
    p = e / tl.sum(e, 0)
    target = tl.load(target_ptr + row)
    tl.store(dx_ptr + row * V + col, tl.where(col == target, p - 1, p), col < V)


@wrong("grad", "inf or nan")
@triton.jit
def grad_that_overflows(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    e = tl.exp(tl.load(x_ptr + row * V + col, col < V, -float("inf")))
    target = tl.load(target_ptr + row)
    tl.store(dx_ptr + row * V + col, e / tl.sum(e, 0) - (col == target), col < V)


@wrong("grad", "elements differ")
@triton.jit
def grad_with_padding_of_zero(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + col, col < V, 0.0)
    e = tl.exp(x - tl.max(x, 0))
    target = tl.load(target_ptr + row)
    tl.store(dx_ptr + row * V + col, e / tl.sum(e, 0) - (col == target), col < V)


@wrong("grad", "some of yours are inf or nan")
@triton.jit
def grad_with_the_maximum_of_padding(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + col, col < V, 0.0)
    e = tl.where(col < V, tl.exp(x - tl.max(x, 0)), 0.0)
    target = tl.load(target_ptr + row)
    tl.store(dx_ptr + row * V + col, e / tl.sum(e, 0) - (col == target), col < V)


@wrong("grad", "elements differ")
@triton.jit
def softmax_alone(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + col, col < V, -float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(dx_ptr + row * V + col, e / tl.sum(e, 0), col < V)


@wrong("grad", "elements differ")
@triton.jit
def the_first_target(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + col, col < V, -float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    target = tl.load(target_ptr)
    tl.store(dx_ptr + row * V + col, e / tl.sum(e, 0) - (col == target), col < V)


@wrong("grad", "elements differ")
@triton.jit
def the_other_sign(x_ptr, target_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + col, col < V, -float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    target = tl.load(target_ptr + row)
    tl.store(dx_ptr + row * V + col, (col == target) - e / tl.sum(e, 0), col < V)


# ---- query


@right("query")
@triton.jit
def query_guarded(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, D)
    q = tl.load(q_ptr + d)
    top, total, o = -1e30, 0.0, tl.zeros([D], tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        at = s[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, (s < S)[:, None], 0.0)
        v = tl.load(v_ptr + at, (s < S)[:, None], 0.0)
        scores = tl.where(s < S, tl.sum(k * q[None, :], 1) / 4, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 0))
        p = tl.exp(scores - new)
        total = total * tl.exp(top - new) + tl.sum(p, 0)
        o = o * tl.exp(top - new) + tl.sum(p[:, None] * v, 0)
        top = new
    tl.store(o_ptr + d, o / total)


# One kernel with one mistake at a time; exercises get it through the wrappers below.
@triton.jit
def _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr, BUG):
    d = tl.arange(0, D)
    q = tl.load(q_ptr + d)
    top, total, o = -1e30, 0.0, tl.zeros([D], tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = (s < S)[:, None]
        at = s[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, inside | (BUG == "no mask"), 0.0)
        if BUG == "no other":
            v = tl.load(v_ptr + at, inside)
        else:
            v = tl.load(v_ptr + at, inside, 0.0)
        scores = tl.sum(k * q[None, :], 1)
        if BUG != "no scale":
            scores = scores / 4
        if BUG != "padding counts":
            scores = tl.where(s < S, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 0))
        if BUG == "no maximum":
            new = 0.0
        p = tl.exp(scores - new)
        old = tl.exp(top - new)
        total = total * (1.0 if BUG == "sum not rescaled" else old) + tl.sum(p, 0)
        o = o * (1.0 if BUG == "output not rescaled" else old) + tl.sum(p[:, None] * v, 0)
        top = new
    if BUG == "not divided":
        total = 1.0
    tl.store(o_ptr + d, o / total)


@wrong("query", "elements differ")
@triton.jit
def output_not_rescaled(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "output not rescaled")


@wrong("query", "elements differ")
@triton.jit
def sum_not_rescaled(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "sum not rescaled")


@wrong("query", "elements differ")
@triton.jit
def padding_counts(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "padding counts")


@wrong("query", "elements differ")
@triton.jit
def no_scale(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "no scale")


@wrong("query", "elements differ")
@triton.jit
def not_divided(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "not divided")


@wrong("query", "inf or nan")
@triton.jit
def no_maximum(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "no maximum")


@wrong("query", "elements beyond the end of argument 2")
@triton.jit
def keys_without_a_mask(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "no mask")


@wrong("query", "inf or nan")
@triton.jit
def values_without_other(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    _mistaken(q_ptr, k_ptr, v_ptr, o_ptr, S, D, BLOCK, "no other")


# ---- at_b


@right("at_b")
@triton.jit
def at_b_transposed_in_registers(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a_at, b_at = k[:, None] * M + (m % M)[None, :], k[:, None] * N + (n % N)[None, :]
        a = tl.load(a_ptr + a_at, (k < K)[:, None], 0.0)
        b = tl.load(b_ptr + b_at, (k < K)[:, None], 0.0)
        c += tl.dot(tl.trans(a), b, input_precision="ieee")
    tl.store(c_ptr + m[:, None] * N + n[None, :], c, (m < M)[:, None] & (n < N)[None, :])


@wrong("at_b", "beyond the end of argument 1")
@triton.jit
def k_without_a_mask(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        down, across = start + k[:, None], start + k[None, :]
        a = tl.load(a_ptr + across * M + m, mask=m < M, other=0.0)
        b = tl.load(b_ptr + down * N + n, mask=(down < K) & (n < N), other=0.0)
        c = tl.dot(a, b, c, input_precision="ieee")
    tl.store(c_ptr + m * N + n, c, mask=(m < M) & (n < N))


@wrong("at_b", "beyond the end of argument 1")
@triton.jit
def m_without_a_mask(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        down, across = start + k[:, None], start + k[None, :]
        a = tl.load(a_ptr + across * M + m, mask=across < K, other=0.0)
        b = tl.load(b_ptr + down * N + n, mask=(down < K) & (n < N), other=0.0)
        c = tl.dot(a, b, c, input_precision="ieee")
    tl.store(c_ptr + m * N + n, c, mask=(m < M) & (n < N))


@wrong("at_b", "inf or nan")
@triton.jit
def at_b_without_other(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        down, across = start + k[:, None], start + k[None, :]
        a = tl.load(a_ptr + across * M + m, mask=(across < K) & (m < M))
        b = tl.load(b_ptr + down * N + n, mask=(down < K) & (n < N), other=0.0)
        c = tl.dot(a, b, c, input_precision="ieee")
    tl.store(c_ptr + m * N + n, c, mask=(m < M) & (n < N))


@wrong("at_b", "elements differ")
@triton.jit
def b_at(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        down, across = start + k[:, None], start + k[None, :]
        inside = (across < K) & (m < M) & (m * K + across < M * K)
        a = tl.load(a_ptr + m * K + across, mask=inside, other=0.0)  # as if a were [M, K]
        b = tl.load(b_ptr + down * N + n, mask=(down < K) & (n < N), other=0.0)
        c = tl.dot(a, b, c, input_precision="ieee")
    tl.store(c_ptr + m * N + n, c, mask=(m < M) & (n < N))


@wrong("at_b", "elements differ")
@triton.jit
def the_first_step(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    down, across = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    a = tl.load(a_ptr + across * M + m, mask=(across < K) & (m < M), other=0.0)
    b = tl.load(b_ptr + down * N + n, mask=(down < K) & (n < N), other=0.0)
    c = tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + m * N + n, c, mask=(m < M) & (n < N))


@wrong("at_b", "elements beyond the end of the output")
@triton.jit
def c_without_a_mask(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K):
        a = tl.load(a_ptr + k * M + m, mask=m < M, other=0.0)
        c += a * tl.load(b_ptr + k * N + n, mask=n < N, other=0.0)
    tl.store(c_ptr + m * N + n, c)


# ---- and what `check` says of them


@pytest.mark.parametrize(("exercise", "kernel", "message"), WRONG)
def test_refused(exercise, kernel, message, capsys):
    check(f"kernels.{exercise}", kernel)
    out = capsys.readouterr().out
    assert out.startswith("✗") and message in out


@pytest.mark.parametrize(("exercise", "kernel"), RIGHT)
def test_accepted(exercise, kernel, capsys):
    check(f"kernels.{exercise}", kernel)
    out = capsys.readouterr().out
    assert out.startswith("✓ correct on ") and "cases" in out


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        (lambda M, N, K: ..., False),
        (lambda M, N, K: 4 * (M * K + K * N + M * N), False),
        (lambda M, N, K: 4 * (-(-M // 32) * -(-N // 32) * 64 * (-(-K // 32) * 32) + M * N), False),
        (lambda M, N, K: -(-M // 32) * -(-N // 32) * 64 * K + M * N, False),
        (lambda M, N, K: 4 * (-(-M // 32) * -(-N // 32) * (64 * K + 32 * 32)), False),
        (lambda M, N, K: 4 * (M * N * 2 * K + M * N), False),
        (lambda M, N, K: 256 * K * ((M + 31) // 32) * ((N + 31) // 32) + 4 * M * N, True),
    ],
)
def test_predicted_bytes(asked, passes, capsys):
    check("kernels.asked", asked)
    assert capsys.readouterr().out.startswith("✓") == passes


def test_the_formula_is_what_the_kernel_asks_for():
    """The exercise's reference counts; here the interpreter does."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store
    total = []

    def watched_load(builder, pointers, mask, *rest):
        total.append(int(mask.data.sum()))
        return load(builder, pointers, mask, *rest)

    def watched_store(builder, pointers, value, mask, *rest):
        total.append(int(mask.data.sum()))
        return store(builder, pointers, value, mask, *rest)

    for M, N, K in EXERCISES["asked"].cases():
        total.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
            patch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
            matmul(torch.ones(M, K), torch.ones(K, N))
        assert 4 * sum(total) == EXERCISES["asked"].reference(M, N, K)


@triton.jit
def atomic_beyond(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))
    tl.atomic_add(y_ptr + N, 1.0)


@triton.jit
def far_away(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + (1 << 40) + tl.arange(0, BLOCK)))


@triton.jit
def before_the_start(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr - 3 + tl.arange(0, BLOCK)))


@triton.jit
def in_place(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0 * tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def twice(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, (tl.load(x_ptr + at) + tl.load(x_ptr + at)) / 2)


@triton.jit
def half_of_it(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at), at < N // 2)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (torch.clone, "expected a kernel under @triton.jit, got builtin_function_or_method"),
        (atomic_beyond, "the kernel updates 1 elements beyond the end of the output"),
        (far_away, "the kernel loads 4 elements outside of all tensors"),
        (before_the_start, "the kernel loads 3 elements before the start of argument 1"),
        (in_place, "argument 1: the kernel stores into an input"),
        (twice, "argument 1 has 4 elements, the kernel loads 8: read each once"),
        (half_of_it, "2 of 4 elements of the output are never stored"),
    ],
)
def test_what_a_kernel_must_not_do(kernel, message):
    with pytest.raises(WrongAnswer, match=message):
        four(kernel)(torch.arange(4.0))


def four(kernel):
    """What runs `kernel` for an input and an output of four elements."""
    exercise = kernel_exercise(
        reference=torch.neg,
        cases=lambda: [],
        launch=lambda x: Launch((4,), (1,), (4,), {"BLOCK": 4}),
        reads_once=True,
    )
    return exercise.through(kernel)


class Unwatched(InterpretedFunction):
    """Runs as a compiled kernel does: nobody sees its loads and stores."""

    def run(self, *arguments, grid, warmup, **constants):
        self.fn(*arguments)


def neighbour(x, at):
    """The element that many places after the first of x, wherever that is."""
    return x.as_strided((1,), (1,), x.storage_offset() + at)


def test_what_a_compiled_kernel_does_shows_in_the_memory():
    def copy(x, y, N):
        y.copy_(x)

    def store_beyond(x, y, N):
        y.copy_(x)
        neighbour(y, 4).zero_()

    def store_before(x, y, N):
        y.copy_(x)
        neighbour(y, -1).zero_()

    def load_beyond(x, y, N):
        y.copy_(x + 0 * neighbour(x, 4))

    x = torch.arange(4.0)
    assert torch.equal(four(Unwatched(copy))(x), x)
    for kernel in (store_beyond, store_before):
        with pytest.raises(WrongAnswer, match="the kernel stores outside of the output"):
            four(Unwatched(kernel))(x)
    assert four(Unwatched(load_beyond))(x).isnan().all()
    assert four(Unwatched(lambda x, y, N: None))(x) is ...


def test_integers_beyond_the_end_are_no_indices():
    room = exercises._Room("x", (2,), torch.int64, torch.device("cpu"))
    assert neighbour(room.filled(torch.tensor([0, 1])).tensor, 2).item() > 2**60


def test_a_plain_function_is_no_kernel(capsys):
    check("kernels.axpy", lambda x, y, a: a * x + y)
    assert "expected a kernel under @triton.jit, got function" in capsys.readouterr().out
    check("kernels.axpy", EXERCISES["axpy"].reference)
    assert "this is the reference itself" in capsys.readouterr().out


# ---- "Run all" on a GPU compiles what this notebook interprets

COMPILE = """
import json
import sys
from pathlib import Path

import torch
import triton

from helpers.exercises.kernels import EXERCISES
from helpers.kernels import ahead_of_time

folder, notebook = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
TYPES = {float: "fp32", int: "i32"}

for cell in notebook["cells"]:
    tags = cell["metadata"].get("tags", [])
    source = "".join(cell["source"])
    is_kernel = "@triton.jit" in source
    if not is_kernel or not {"exercise", "solution"} & set(tags):
        continue
    name = source.split("def ")[1].split("(")[0]
    module = folder / f"{name}_{len(tags)}.py"  # Triton reads a kernel's source from its file
    head = "import triton\\nimport triton.language as tl\\n\\n\\n"
    module.write_text(head + source.split("\\n\\n\\ncheck(")[0], encoding="utf-8")
    sys.path.insert(0, str(folder))
    kernel = getattr(__import__(module.stem), name)

    case = EXERCISES[name].cases()[0]
    plan = EXERCISES[name].through(kernel).args[1](*case)
    tensors = [a for a in case if isinstance(a, torch.Tensor)]
    scalars = [a for a in case if not isinstance(a, torch.Tensor)]
    values = [*tensors, tensors[0], *plan.sizes, *scalars, *plan.constants.values()]
    signature, constants = {}, {}
    for parameter, value in zip(kernel.params, values, strict=True):
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = ahead_of_time.TYPES[value.dtype]
        elif parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = TYPES[type(value)]
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    built = triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants), target=target
    )
    print(name, len(built.asm["cubin"]) > 1000)
"""


def test_stubs_and_solutions_compile_for_a_gpu(tmp_path):
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    notebook = root / "notebooks" / "13_kernels.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path), str(notebook)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kernels = sorted(set(EXERCISES) - {"asked"})
    assert sorted(done.stdout.split()[::2]) == sorted(2 * kernels)
    assert set(done.stdout.split()[1::2]) == {"True"}
