import pytest
import torch

from helpers.exercises import check


def grid(lowest, highest, bits, zero=True, count=None, zero_of=None, empty=1.0):
    """Scale and zero point, with or without their parts."""
    if zero:
        lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    steps = 2**bits - 1 if count is None else count(bits)
    scale = (highest - lowest) / steps
    if scale == 0:
        scale = empty
    if zero_of is None:
        return scale, round(-lowest / scale)
    return scale, zero_of(lowest, scale)


def grid_by_tensor(lowest, highest, bits):
    ends = torch.tensor([lowest, highest, 0.0], dtype=torch.float64)
    scale = (ends.max() - ends.min()) / (2**bits - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale.item(), int((-ends.min() / scale).round())


def rows(weight, bits, top=None, dim=1, guard=True, cast=torch.int8, keep=False, cut=False):
    top = 2 ** (bits - 1) - 1 if top is None else top(bits)
    largest = weight.abs().amax(dim, keepdim=True)
    scale = largest / top
    if guard:
        scale = torch.where(scale == 0, 1.0, scale)
    steps = weight / scale
    integers = (steps if cut else steps.round()).to(cast)
    return integers, scale if keep else scale.flatten()


def rows_by_loop(weight, bits):
    top = 2 ** (bits - 1) - 1
    scales = torch.ones(len(weight), dtype=weight.dtype)
    integers = torch.zeros(weight.shape, dtype=torch.int8)
    for i, row in enumerate(weight):
        if row.abs().max() > 0:
            scales[i] = row.abs().max() / top
        integers[i] = (row / scales[i]).round().to(torch.int8)
    return integers, scales


def size(r, c, bits, group, scale=16, per=None, up=True):
    groups = r * (c // group) if per is None else per(r, c, group)
    total = r * c * bits + groups * scale
    return -(-total // 8) if up else total // 8


RIGHT = {
    "choose_grid": [grid, grid_by_tensor],
    "quantize_rows": [rows, rows_by_loop],
    "weight_bytes": [size],
    "corrected_sums": [
        lambda x, z, w: x.int() @ w.int().T - z * w.sum(1, dtype=torch.int32),
        lambda x, z, w: ((x.double() - z) @ w.double().T).int(),
    ],
}

WRONG = {
    "choose_grid": [
        lambda a, b, n: grid(a, b, n, zero=False),
        lambda a, b, n: grid(a, b, n, count=lambda bits: 2**bits),
        lambda a, b, n: grid(a, b, n, count=lambda bits: 2 ** (bits - 1) - 1),
        lambda a, b, n: grid(a, b, n, zero_of=lambda low, s: round(low / s)),
        lambda a, b, n: grid(a, b, n, zero_of=lambda low, s: int(-low / s)),
        lambda a, b, n: grid(a, b, n, zero_of=lambda low, s: -low / s),
        lambda a, b, n: grid(a, b, n)[::-1],
        lambda a, b, n: grid(a, b, n)[0],
        lambda a, b, n: grid(a, b, n, empty=1e-8),
    ],
    "quantize_rows": [
        lambda w, n: rows(w, n, top=lambda b: 2 ** (b - 1)),
        lambda w, n: rows(w, n, top=lambda b: 2**b - 1),
        lambda w, n: rows(w, n, dim=0),
        lambda w, n: rows(w, n, guard=False),
        lambda w, n: rows(w, n, cast=torch.int32),
        lambda w, n: rows(w, n, keep=True),
        lambda w, n: rows(w, n, cut=True),
        lambda w, n: rows(w.clamp(min=0), n),
    ],
    "weight_bytes": [
        lambda r, c, b, g: size(r, c, b, g, scale=32),
        lambda r, c, b, g: size(r, c, b, g, scale=0),
        lambda r, c, b, g: size(r, c, b, g, per=lambda r, c, g: r),
        lambda r, c, b, g: size(r, c, b, g, up=False),
        lambda r, c, b, g: r * c * b + r * (c // g) * 16,
        lambda r, c, b, g: (r * c * b + r * (c // g) * 16) / 8,
    ],
    "corrected_sums": [
        lambda x, z, w: x.int() @ w.int().T,
        lambda x, z, w: (x - z) @ w.T,
        lambda x, z, w: x.int() @ w.int().T + z * w.sum(1, dtype=torch.int32),
        lambda x, z, w: x.int() @ w.int().T - z * w.sum(0, dtype=torch.int32).sum(),
        lambda x, z, w: x.int() @ w.int().T - z,
        lambda x, z, w: (x.float() - z) @ w.float().T,
        lambda x, z, w: (x.int() @ w.int().T - z * w.sum(1)).to(torch.int8),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("choose_grid", WRONG["choose_grid"][7], "expected tuple, got float"),
        ("quantize_rows", WRONG["quantize_rows"][4], "dtype: expected torch.int8, got torch.int32"),
        ("quantize_rows", WRONG["quantize_rows"][5], "result 2: shape: expected [3], got [3, 1]"),
        ("weight_bytes", WRONG["weight_bytes"][5], "value is not right"),
        ("corrected_sums", WRONG["corrected_sums"][5], "dtype: expected torch.int32"),
    ],
)
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"quantization.{name}", answer)
    assert words in capsys.readouterr().out
