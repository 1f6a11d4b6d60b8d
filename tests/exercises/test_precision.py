import math

import pytest
import torch

from helpers.exercises import check
from helpers.precision import FORMATS


def by_gap(weight, update, dtype, below=True, half=2.0, local=True):
    """The rule of the gap, with or without its parts."""
    mantissa, exponent = math.frexp(weight)
    gap = torch.finfo(dtype).eps * (2.0 ** (exponent - 1) if local else 1.0)
    if below and update < 0 and mantissa == 0.5:
        gap /= 2
    return abs(update) < gap / half


def by_format(weight, update, dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return FORMATS[name].round(weight + update) == weight


def by_bytes(weights, low, high, copy=2, strict=True):
    """The smallest batch for which the copies are paid for."""
    batch = 1
    while True:
        saved = batch * 2 * low - copy * weights
        if saved > 0 or (saved == 0 and not strict):
            return batch
        batch += 1


def step(unscale=True, clip=True, update=True, unscale_last=False, limit=lambda n, s: n):
    def clipped(scaler, optimizer, loss, parameters, max_norm):
        scaler.scale(loss).backward()
        if unscale and not unscale_last:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, limit(max_norm, scaler.get_scale()))
        if unscale_last:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if update:
            scaler.update()

    return clipped


def plain(scaler, optimizer, loss, parameters, max_norm):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()


def by_value(scaler, optimizer, loss, parameters, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()


def integer(x, add):
    bits = x.view(torch.int32)
    rounded = bits + add(bits)
    return (rounded & -65536).view(torch.float32)


RIGHT = {
    "is_lost": [by_gap, by_format],
    "smallest_batch": [by_bytes, lambda w, low, high: w // low + 1],
    "clipped_step": [step(), step(unscale=False, limit=lambda n, s: n * s)],
    "round_to_bf16": [
        lambda x: integer(x, lambda bits: 0x7FFF + ((bits >> 16) & 1)),
        lambda x: integer(x, lambda bits: 0x7FFF + (bits // 65536) % 2),
    ],
}

WRONG = {
    "is_lost": [
        lambda w, u, d: by_gap(w, u, d, below=False),
        lambda w, u, d: by_gap(w, u, d, half=1.0),
        lambda w, u, d: by_gap(w, u, d, half=4.0),
        lambda w, u, d: by_gap(w, u, d, local=False),
        lambda w, u, d: abs(u) < w * torch.finfo(d).eps / 2,
        lambda w, u, d: by_gap(w, u, torch.bfloat16),
        lambda w, u, d: (torch.tensor(w + u).to(d) == w).item(),
        lambda w, u, d: abs(u),
    ],
    "smallest_batch": [
        lambda w, low, high: by_bytes(w, low, high, strict=False),
        lambda w, low, high: by_bytes(w, low, high, copy=4),
        lambda w, low, high: by_bytes(w, low + high, high),
        lambda w, low, high: math.ceil(w / low),
        lambda w, low, high: w // low,
        lambda w, low, high: w / low,
    ],
    "clipped_step": [
        step(unscale=False),
        step(unscale_last=True),
        step(clip=False),
        step(update=False),
        plain,
        by_value,
    ],
    "round_to_bf16": [
        lambda x: integer(x, lambda bits: 0),  # towards zero
        lambda x: integer(x, lambda bits: 0x8000),  # ties away from zero
        lambda x: integer(x, lambda bits: 0x7FFF),  # ties towards zero
        lambda x: x,
        lambda x: x.bfloat16().float(),
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.half().float(),
        lambda x: integer(x, lambda bits: 0x7FFF + ((bits >> 16) & 1)).view(torch.int32),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("clipped_step", step(unscale=False), "result 1: value: 2 of 2 elements differ"),
        ("is_lost", WRONG["is_lost"][7], "expected bool, got float"),
        ("round_to_bf16", WRONG["round_to_bf16"][4], "to be solved without bfloat16"),
        ("round_to_bf16", WRONG["round_to_bf16"][1], "case 1 of 6"),
        ("smallest_batch", WRONG["smallest_batch"][3], "case 2 of 12, f(1000, 10, 0)"),
    ],
)
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"precision.{name}", answer)
    assert words in capsys.readouterr().out
