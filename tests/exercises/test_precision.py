import math
import struct

import pytest
import torch

from helpers.exercises import check


def by_parts(pattern, bias=15, subnormal=True, special=True, sign=True):
    """The formula, with or without its four parts."""
    exponent, mantissa = pattern >> 10 & 31, pattern & 1023
    factor = -1.0 if sign and pattern >> 15 else 1.0
    if special and exponent == 31:
        return factor * math.inf
    if subnormal and exponent == 0:
        return factor * mantissa * 2.0**-24
    return factor * (1 + mantissa / 1024) * 2.0 ** (exponent - bias)


def history(overflowed, scale, growth_interval, restart=True, grow=2.0, shrink=0.5, early=False):
    found, good = [], 0
    for bad in overflowed:
        before = scale
        if bad:
            scale *= shrink
            good = 0 if restart else good
        else:
            good += 1
            if good == growth_interval:
                scale *= grow
                good = 0
        found.append(before if early else scale)
    return found


def always_counting(overflowed, scale, growth_interval):
    found = []
    for number, bad in enumerate(overflowed, 1):
        if bad:
            scale /= 2
        elif number % growth_interval == 0:
            scale *= 2
        found.append(scale)
    return found


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
    "decode_fp16": [
        by_parts,
        lambda pattern: torch.tensor([pattern]).to(torch.int16).view(torch.float16).item(),
        lambda pattern: struct.unpack("<e", pattern.to_bytes(2, "little"))[0],
    ],
    "scales": [history],
    "clipped_step": [step(), step(unscale=False, limit=lambda n, s: n * s)],
    "round_to_bf16": [
        lambda x: integer(x, lambda bits: 0x7FFF + ((bits >> 16) & 1)),
        lambda x: integer(x, lambda bits: 0x7FFF + (bits // 65536) % 2),
    ],
}

WRONG = {
    "decode_fp16": [
        lambda pattern: by_parts(pattern, bias=16),
        lambda pattern: by_parts(pattern, subnormal=False),
        lambda pattern: by_parts(pattern, special=False),
        lambda pattern: by_parts(pattern, sign=False),
        lambda pattern: float(pattern),
        lambda pattern: torch.tensor([pattern]).to(torch.int16).view(torch.bfloat16).item(),
        lambda pattern: torch.tensor([pattern]).to(torch.int16).view(torch.float16),
    ],
    "scales": [
        lambda o, s, n: history(o, s, n, restart=False),
        lambda o, s, n: history(o, s, n, early=True),
        lambda o, s, n: history(o, s, n + 1),
        lambda o, s, n: history(o, s, n, shrink=1.0),
        lambda o, s, n: history(o, s, n, grow=1.0),
        lambda o, s, n: history(o, s, n)[-1:],
        always_counting,
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
        ("decode_fp16", WRONG["decode_fp16"][6], "expected float, got Tensor"),
        ("round_to_bf16", WRONG["round_to_bf16"][4], "to be solved without bfloat16"),
        ("round_to_bf16", WRONG["round_to_bf16"][1], "case 1 of 6"),
        ("scales", WRONG["scales"][5], "expected 4 results, got 1"),
    ],
)
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"precision.{name}", answer)
    assert words in capsys.readouterr().out
