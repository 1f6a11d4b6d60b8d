import base64
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from helpers import data, models
from helpers.page import drawing


def lived_in(model):
    """Give batch norm statistics that are not those of a fresh layer."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.2, 3)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


@pytest.fixture
def bundle(monkeypatch):
    """What `pad` hands to the notebook."""
    shown = []
    monkeypatch.setattr(drawing, "display", lambda data, raw: shown.append(data))

    def make(*args):
        drawing.pad(*args, mean=data.MEAN, std=data.STD)
        return shown.pop()

    return make


@pytest.mark.parametrize("bias", [False, True])
def test_fold_batch_norm_agrees_with_pytorch(bias):
    block = lived_in(nn.Sequential(nn.Conv2d(3, 5, 3, bias=bias), nn.BatchNorm2d(5)))
    conv, norm = block
    weight, constant = drawing.fold_batch_norm(conv, norm)
    fused = fuse_conv_bn_eval(copy.deepcopy(conv), norm)
    torch.testing.assert_close(weight, fused.weight)
    torch.testing.assert_close(constant, fused.bias)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(nn.functional.conv2d(x, weight, constant), block(x))


def test_fold_batch_norm_needs_running_statistics():
    norm = nn.BatchNorm2d(5, track_running_stats=False)
    with pytest.raises(ValueError, match="expected batch norm with running statistics"):
        drawing.fold_batch_norm(nn.Conv2d(3, 5, 3), norm)


def test_layers_are_those_of_the_model_in_evaluation():
    model = lived_in(models.ConvNet(width=4))
    layers = drawing.export_layers(model)
    kinds = {nn.Conv2d: "conv", nn.ReLU: "relu", nn.Flatten: "flatten", nn.Linear: "linear"}
    expected = [kinds[type(m)] for m in model.modules() if type(m) in kinds]
    assert [layer["kind"] for layer in layers] == expected  # batch norm and dropout are gone

    x = torch.randn(3, 1, 28, 28)
    y = x
    for layer in layers:
        y = run(layer, y)
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


def run(layer, x):
    match layer["kind"]:
        case "conv":
            return nn.functional.conv2d(
                x, layer["weight"], layer["bias"], layer["stride"], layer["padding"]
            )
        case "linear":
            return nn.functional.linear(x, layer["weight"], layer["bias"])
        case "relu":
            return x.relu()
        case "flatten":
            return x.flatten(1)


def test_a_layer_that_occurs_twice_is_listed_twice():
    relu = nn.ReLU()
    layers = drawing.export_layers(nn.Sequential(nn.Flatten(), relu, nn.Linear(784, 10), relu))
    assert [layer["kind"] for layer in layers] == ["flatten", "relu", "linear", "relu"]


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.MaxPool2d(2), r"model\[0\]\[1\] = MaxPool2d"),
        (nn.BatchNorm2d(4), r"model\[0\]\[1\] = BatchNorm2d"),  # not after a convolution
        (nn.Conv2d(4, 4, 3, groups=2), r"model\[0\]\[1\] = Conv2d"),
        (nn.Conv2d(4, 4, 3, dilation=2), r"model\[0\]\[1\] = Conv2d"),
        (nn.Conv2d(4, 4, 3, padding="same"), r"model\[0\]\[1\] = Conv2d"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), r"model\[0\]\[1\] = Conv2d"),
        (nn.Flatten(2), r"model\[0\]\[1\] = Flatten"),
    ],
)
def test_a_layer_it_cannot_export_is_named(layer, name):
    with pytest.raises(ValueError, match=f"cannot draw with {name}.*expected Conv2d"):
        drawing.export_layers(nn.Sequential(nn.Sequential(nn.ReLU(), layer)))


def test_a_model_that_is_no_sequence_is_named():
    with pytest.raises(ValueError, match="cannot draw with model = Bilinear"):
        drawing.export_layers(nn.Bilinear(2, 2, 2))


def test_weights_beyond_float16_are_refused(bundle):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    nn.init.constant_(model[1].weight, 1e6)
    with pytest.raises(ValueError, match="weight within float16, got 1e"):
        bundle(model)


def test_weights_travel_as_float16():
    weight = torch.randn(2, 3)
    packed = drawing._pack({"kind": "linear", "weight": weight, "bias": weight[:, 0]})
    assert packed["shape"] == [2, 3]
    back = np.frombuffer(base64.b64decode(packed["weight"]), np.float16)
    assert (back == weight.half().flatten().numpy()).all()


def test_pad_speaks_the_one_language_of_an_exported_notebook(bundle, monkeypatch):
    monkeypatch.setenv("PYTORCH_BOOK_LANG", "en")
    html = bundle(models.ConvNet(width=2))["text/html"]
    assert "Draw a digit" in html
    assert "写一个数字" not in html


def test_pad_is_one_small_output_in_two_languages(bundle):
    model = lived_in(models.ConvNet())
    shown = bundle(model, torch.full((1, 28, 28), 9, dtype=torch.uint8))
    html = shown["text/html"]
    assert set(shown) == {"text/plain", "text/html"}
    assert len(html) < 300_000
    assert html.count("<!--zh-->") == html.count("<!--/zh-->") == 5
    assert html.count("<!--en-->") == html.count("<!--/en-->") == 5
    assert "[[" not in html
    assert not any(word in html for word in ("http:", "https:", "src=", "@import", "url("))
    assert html.count('class="digit-pad__bar"') == 10


def test_pad_says_its_prediction_without_a_script(bundle):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(10.0 * (torch.arange(10) == 7))
    shown = bundle(model, torch.zeros(1, 28, 28, dtype=torch.uint8))
    assert shown["text/plain"] == "<drawing pad; the example is read as 7 (100%)>"
    assert '<b>7</b><span class="digit-pad__track"><span style="width:100%">' in shown["text/html"]
    empty = bundle(model)
    assert empty["text/plain"] == "<drawing pad>"
    assert "width:100%" not in empty["text/html"].split("<script>")[0].split("</style>")[1]


def test_pad_repeats_and_leaves_the_model_as_it_was(bundle):
    model = lived_in(models.ConvNet(width=2)).train()
    before = copy.deepcopy(model.state_dict())
    first, second = bundle(model), bundle(model)
    assert first == second
    assert model.training
    assert all((before[key] == value).all() for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "example", [torch.zeros(1, 28, 28), torch.zeros(28, 28, dtype=torch.uint8)]
)
def test_an_example_of_another_form_is_refused(bundle, example):
    with pytest.raises(ValueError, match=r"expected an example uint8 \[1, 28, 28\], got torch"):
        bundle(models.ConvNet(width=2), example)


def test_the_models_mode_stays_also_when_it_cannot_read_an_image():
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 10))
    assert model.training
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        drawing.pad(model, mean=0.0, std=1.0)
    assert model.training
