"""Chapter 07: a pad that reads your handwriting, in the notebook and on a page without a kernel."""

import base64
import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
from IPython.display import display
from torch import Tensor, nn

from helpers.page.ledger import languages

SKIPPED = (nn.Dropout, nn.Dropout2d, nn.Identity)  # the identity in evaluation


def pad(model: nn.Sequential, example: Tensor | None = None, *, mean: float, std: float) -> None:
    """Show a pad to draw a digit on, and what `model` makes of it while you draw.

    One self-contained output: `drawing.html` with the model's weights inside, so the
    browser runs the forward pass. `model` is taken in evaluation mode, whatever mode it is in.
    example: uint8 [1, 28, 28], shown with its prediction until the first stroke.
    mean, std: how the training images were normalized, (x / 255 - mean) / std.
    """
    if example is not None and (example.dtype, example.shape) != (torch.uint8, (1, 28, 28)):
        raise ValueError(
            f"expected an example uint8 [1, 28, 28], got {example.dtype} {list(example.shape)}"
        )
    layers = [_pack(layer) for layer in export_layers(model)]
    image = torch.zeros(1, 28, 28, dtype=torch.uint8) if example is None else example.cpu()
    probabilities = _predict(model, (image[None] / 255 - mean) / std)
    shown = torch.zeros_like(probabilities) if example is None else probabilities
    spec = {
        "layers": layers,
        "mean": mean,
        "std": std,
        "example": None if example is None else _base64(image),
    }
    files = resources.files("helpers.page")
    template = files.joinpath("drawing.html").read_text(encoding="utf-8")
    template = template.replace(
        "[[center]]\n", files.joinpath("center.js").read_text("utf-8") + "\n"
    )
    for other in {"zh", "en"} - set(languages()):
        template = re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", template, flags=re.DOTALL)
    page = template.replace("[[bars]]", _bars(shown)).replace("[[spec]]", json.dumps(spec))
    best = f"{probabilities.argmax()} ({probabilities.max():.0%})"
    text = "drawing pad" if example is None else f"drawing pad; the example is read as {best}"
    display({"text/plain": f"<{text}>", "text/html": page}, raw=True)


@torch.inference_mode()
def _predict(model: nn.Sequential, image: Tensor) -> Tensor:
    """Return class probabilities [C] for float32 [1, 1, 28, 28]; the model's mode stays."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        return model(image.to(device)).softmax(1)[0].cpu()
    finally:
        model.train(was_training)


def export_layers(model: nn.Sequential) -> list[dict[str, Any]]:
    """List what `model` computes in evaluation, batch norm folded into the convolution before it.

    Each layer is a dict: `kind` is "conv", "relu", "flatten" or "linear"; with weights also
    `weight` and `bias`, a convolution also `stride` and `padding`.
    Raises ValueError naming the first layer that is none of these.
    """
    layers: list[dict[str, Any]] = []
    before: nn.Module | None = None
    for name, module in _leaves(model):
        if isinstance(module, nn.BatchNorm2d) and isinstance(before, nn.Conv2d):
            layers[-1]["weight"], layers[-1]["bias"] = fold_batch_norm(before, module)
        else:
            layers.append(_layer(name, module))
        before = module
    return layers


@torch.no_grad()
def fold_batch_norm(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the one convolution that does what `conv` then `norm` do.

    In evaluation batch norm is (x - mean) / std * gamma + beta with fixed numbers, one set for
    each channel: a factor that the weight takes over, and a constant for the bias.
    """
    if norm.running_mean is None or norm.weight is None:
        raise ValueError(f"expected batch norm with running statistics and weights, got {norm}")
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    bias = torch.zeros_like(norm.running_mean) if conv.bias is None else conv.bias
    return (
        conv.weight * factor.view(-1, 1, 1, 1),
        (bias - norm.running_mean) * factor + norm.bias,
    )


def _leaves(module: nn.Module, name: str = "model") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers in order, each with the expression that reaches it: `model[0][3]`."""
    if isinstance(module, nn.Sequential):
        for i, child in enumerate(module):
            yield from _leaves(child, f"{name}[{i}]")
    elif not isinstance(module, SKIPPED):
        yield name, module


def _layer(name: str, module: nn.Module) -> dict[str, Any]:
    match module:
        case nn.Conv2d(
            groups=1, dilation=(1, 1), padding_mode="zeros", padding=(int(), int()) as padding
        ):
            bias = torch.zeros(module.out_channels) if module.bias is None else module.bias
            layer = {"kind": "conv", "weight": module.weight, "bias": bias}
            return layer | {"stride": list(module.stride), "padding": list(padding)}
        case nn.Linear():
            bias = torch.zeros(module.out_features) if module.bias is None else module.bias
            return {"kind": "linear", "weight": module.weight, "bias": bias}
        case nn.ReLU():
            return {"kind": "relu"}
        case nn.Flatten(start_dim=1, end_dim=-1):
            return {"kind": "flatten"}
    raise ValueError(
        f"cannot draw with {name} = {module}; expected Conv2d (one group, no dilation, zero "
        "padding in numbers), BatchNorm2d right after it, ReLU, Flatten, Linear or Dropout"
    )


def _pack(layer: dict[str, Any]) -> dict[str, Any]:
    """Make a layer fit for JSON: tensors become base64 of float16, which halves the page."""
    packed = dict(layer)
    if "weight" in layer:
        packed["shape"] = list(layer["weight"].shape)
        for key in ("weight", "bias"):
            half = layer[key].detach().to("cpu", torch.float16)
            if not half.isfinite().all():
                raise ValueError(f"expected a {key} within float16, got {layer[key].abs().max():g}")
            packed[key] = _base64(half)
    return packed


def _base64(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _bars(probabilities: Tensor) -> str:
    """One bar for each class, filled already, so that the page says something without a script."""
    return "".join(
        f'<div class="digit-pad__bar"><b>{digit}</b>'
        f'<span class="digit-pad__track"><span style="width:{p:.0%}"></span></span>'
        f"<span>{p:.0%}</span></div>"
        for digit, p in enumerate(probabilities.tolist())
    )
