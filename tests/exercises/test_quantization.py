import copy

import pytest
import torch
from torch import nn

from helpers.exercises import check
from helpers.quantization import QuantizedLinear, relative_error


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


def size(r, c, bits, group, scale=16, per=None, up=True):
    groups = r * (c // group) if per is None else per(r, c, group)
    total = r * c * bits + groups * scale
    return -(-total // 8) if up else total // 8


def unquantized(model, fits, first_level=False, kinds=nn.Linear):
    layers = model.named_children() if first_level else model.named_modules()
    return [name for name, layer in layers if isinstance(layer, kinds) and fits(layer.weight)]


def is_plain(weight):
    return type(weight) is nn.Parameter


def errors_of(model, x, bits, layers=None, score=None):
    """The error that each layer causes; `layers` and `score` make it the wrong error."""
    exact = model(x).detach()
    errors = {}
    for name, layer in layers(model) if layers else list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            changed = copy.deepcopy(model)
            changed.set_submodule(name, QuantizedLinear(layer, bits=bits))
            if score:
                errors[name] = score(layer, changed.get_submodule(name))
            else:
                errors[name] = relative_error(exact, changed(x).detach())
    return errors


def worst(*arguments, **options):
    errors = errors_of(*arguments, **options)
    return max(errors, key=errors.get)


def best(*arguments):
    errors = errors_of(*arguments)
    return min(errors, key=errors.get)


def of_weights(layer, quantized):
    """How far the weights are off, and not what that does to the output."""
    return relative_error(layer.weight.detach(), quantized.weight * quantized.scale)


def largest_weight(model, x, bits):
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return max(layers, key=lambda name: layers[name].weight.numel())


def in_place(model, x, bits):
    """Quantizes the given model, one layer after the other."""
    exact, errors = model(x).detach(), {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, QuantizedLinear(layer, bits=bits))
            errors[name] = relative_error(exact, model(x).detach())
    return max(errors, key=errors.get)


def all_the_others(model, x, bits):
    """Keeps one layer in floats and quantizes the rest: the worst is then the largest error."""
    exact, errors = model(x).detach(), {}
    for kept, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            changed = copy.deepcopy(model)
            for name, other in model.named_modules():
                if isinstance(other, nn.Linear) and name != kept:
                    changed.set_submodule(name, QuantizedLinear(other, bits=bits))
            errors[kept] = relative_error(exact, changed(x).detach())
    return max(errors, key=errors.get)


RIGHT = {
    "choose_grid": [grid, grid_by_tensor],
    "weight_bytes": [size],
    "not_quantized": [
        lambda model: unquantized(model, is_plain),
        lambda model: unquantized(model, lambda w: "Int8" not in type(w).__name__),
    ],
    "worst_layer": [worst],
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
    "weight_bytes": [
        lambda r, c, b, g: size(r, c, b, g, scale=32),
        lambda r, c, b, g: size(r, c, b, g, scale=0),
        lambda r, c, b, g: size(r, c, b, g, per=lambda r, c, g: r),
        lambda r, c, b, g: size(r, c, b, g, up=False),
        lambda r, c, b, g: r * c * b + r * (c // g) * 16,
        lambda r, c, b, g: (r * c * b + r * (c // g) * 16) / 8,
    ],
    "not_quantized": [
        lambda model: unquantized(model, lambda w: w.dtype == torch.float32),
        lambda model: unquantized(model, lambda w: w.dtype == torch.int8),
        lambda model: unquantized(model, lambda w: isinstance(w, nn.Parameter)),
        lambda model: unquantized(model, lambda w: not is_plain(w)),
        lambda model: unquantized(model, is_plain, first_level=True),
        lambda model: unquantized(model, is_plain, kinds=(nn.Linear, nn.Conv1d, nn.LayerNorm)),
        lambda model: len(unquantized(model, is_plain)),
        lambda model: unquantized(model, is_plain)[::-1],
        lambda model: set(unquantized(model, is_plain)),
        lambda model: ["0"],
    ],
    "worst_layer": [
        best,
        in_place,
        all_the_others,
        largest_weight,
        lambda m, x, b: worst(m, x, b, score=of_weights),
        lambda m, x, b: worst(m, x, 8),
        lambda m, x, b: worst(m, x, b, layers=lambda model: list(model.named_children())),
        lambda m, x, b: errors_of(m, x, b),
        lambda m, x, b: "2",
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("choose_grid", WRONG["choose_grid"][7], "expected tuple, got float"),
        ("weight_bytes", WRONG["weight_bytes"][5], "value is not right"),
        ("not_quantized", WRONG["not_quantized"][0], "f(first_skipped): expected 1 results, got 3"),
        ("not_quantized", WRONG["not_quantized"][8], "expected list, got set"),
        ("worst_layer", in_place, "the model was changed in place: quantize a copy"),
        ("worst_layer", WRONG["worst_layer"][7], "expected str, got dict"),
    ],
)
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"quantization.{name}", answer)
    assert words in capsys.readouterr().out


def test_weights_changed_in_place_are_noticed(capsys):
    def zeros(model, x, bits):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        return "0"

    check("quantization.worst_layer", zeros)
    assert "the model was changed in place" in capsys.readouterr().out
