"""Chapter 16, exercises: bytes, a grid with a zero point, layers left out, the worst layer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.exercises.harness import Exercise, WrongAnswer
from helpers.quantization import QuantizedLinear, relative_error

# ---- 1: how many bytes a quantized weight takes


def weight_bytes(rows: int, columns: int, bits: int, group: int) -> int:
    """Bits for the integers, 16 for the scale of each group, in whole bytes."""
    total = rows * columns * bits + rows * (columns // group) * 16
    return (total + 7) // 8


def _sizes() -> list[tuple[int, int, int, int]]:
    cases = [(4096, 4096, 4, 128), (4096, 4096, 4, 32), (10, 64, 8, 64), (1, 32, 4, 32)]
    return [*cases, (3, 15, 3, 5), (7, 6, 2, 2), (5, 8, 3, 8)]


# ---- 2: scale and zero point of a range


def choose_grid(lowest: float, highest: float, bits: int) -> tuple[float, int]:
    """Cover [lowest, highest] and 0 with the integers 0..2**bits - 1; [0, 0] has the scale 1."""
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    scale = (highest - lowest) / (2**bits - 1)
    if scale == 0:  # nothing but zeros
        scale = 1.0
    return scale, round(-lowest / scale)


def _ranges() -> list[tuple[float, float, int]]:
    drawn = (torch.rand(6, 2, dtype=torch.float64) * 5 + 0.1).tolist()
    cases = [
        (-1.0, 3.0, 2),
        (-1.0, 1.0, 8),
        (0.0, 6.0, 8),
        (2.0, 6.0, 8),
        (-6.0, -2.0, 4),
        (0.0, 0.0, 8),
    ]
    widths = [2, 3, 4, 5, 8, 8]
    return cases + [(-a, b, bits) for (a, b), bits in zip(drawn, widths, strict=True)]


# ---- 3: which linear layers torchao left as they were


def not_quantized(model: nn.Module) -> list[str]:
    """Return the names of the linear layers whose weight is still an ordinary parameter."""
    names = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and type(layer.weight) is nn.Parameter:
            names.append(name)
    return names


def _quantized(model: nn.Module, *names: str) -> nn.Module:
    """Quantize the layers of these names, and no others, by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig(set_inductor_config=False)
    quantize_(model, config, filter_fn=lambda module, name: name in names)
    return model


def _three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def all_quantized() -> nn.Module:
    return _quantized(_three_layers(), "0", "2", "4")


def first_skipped() -> nn.Module:
    return _quantized(_three_layers(), "2", "4")


def two_skipped() -> nn.Module:
    return _quantized(_three_layers(), "2")


def nothing_quantized() -> nn.Module:
    return _three_layers()


def one_inside_skipped() -> nn.Module:
    """Below the first level, and with a convolution and a normalization, which have weights too."""
    inner = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    return _quantized(nn.Sequential(nn.Conv1d(2, 2, 1), inner), "1.0")


def _built(answer: Callable[[nn.Module], Any]) -> Callable[[Callable[[], nn.Module]], Any]:
    """A case is a function that builds a model: it has a name, and no answer can spoil it."""
    return lambda build: answer(build())


# ---- 4: the layer whose quantization changes the output most


def worst_layer(model: nn.Module, x: Tensor, bits: int) -> str:
    """Quantize one linear layer at a time; return the name of the one with the largest error."""
    with torch.no_grad():
        exact = model(x)
        errors = {}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                changed = copy.deepcopy(model)
                changed.set_submodule(name, QuantizedLinear(layer, bits=bits))
                errors[name] = relative_error(exact, changed(x))
    return max(errors, key=errors.__getitem__)


def _spoil(before: nn.Linear, layer: nn.Linear) -> None:
    """Give each row of `layer` a huge weight, for an input that a ReLU always makes 0."""
    with torch.no_grad():
        before.bias[0] = -100.0
        layer.weight[:, 0] = 20.0


def plain() -> nn.Module:
    return _three_layers()


def outliers_in_the_middle() -> nn.Module:
    model = _three_layers()
    _spoil(model[0], model[2])
    return model


def outliers_at_the_end() -> nn.Module:
    model = _three_layers()
    _spoil(model[2], model[4])
    return model


def outliers_inside() -> nn.Module:
    inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    _spoil(inner[0], inner[2])
    return nn.Sequential(nn.Linear(8, 6), inner, nn.Linear(5, 3))


def _built_and_kept(answer: Callable[..., str]) -> Callable[..., str]:
    """Build the model of a case, and have the answer leave it as it was."""

    def run(build: Callable[[], nn.Module], x: Tensor, bits: int) -> str:
        torch.manual_seed(x.numel() + bits)
        model = build().eval()
        before = [(name, type(module)) for name, module in model.named_modules()]
        weights = copy.deepcopy(model.state_dict())
        found = answer(model, x, bits)
        same = before == [(name, type(module)) for name, module in model.named_modules()]
        if not same or any(not torch.equal(weights[k], v) for k, v in model.state_dict().items()):
            raise WrongAnswer("the model was changed in place: quantize a copy")
        return found

    return run


def _models() -> list[tuple[Callable[[], nn.Module], Tensor, int]]:
    cases = []
    builds = (plain, outliers_in_the_middle, outliers_at_the_end, outliers_inside)
    for build in builds:
        for bits in (8, 4):
            cases.append((build, torch.randn(20, 8), bits))
    return cases


EXERCISES = {
    "weight_bytes": Exercise(reference=weight_bytes, cases=_sizes),
    "choose_grid": Exercise(reference=choose_grid, cases=_ranges),
    "not_quantized": Exercise(
        reference=not_quantized,
        cases=lambda: [
            (first_skipped,),
            (all_quantized,),
            (two_skipped,),
            (nothing_quantized,),
            (one_inside_skipped,),
        ],
        through=_built,
    ),
    "worst_layer": Exercise(reference=worst_layer, cases=_models, through=_built_and_kept),
}
