"""Chapter 07: the MNIST project — the recipe, its evaluation, a digit of one's own."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import augmentation, data, models, schedules
from helpers.training import TrainConfig, Trainer


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyperparameters of a run. The learning rate rises to `peak_lr` and falls once."""

    epochs: int = 9
    batch_size: int = 200
    peak_lr: float = 0.02
    weight_decay: float = 0.05
    width: int = 16  # multiples of 16 fill the vector registers: 20 costs almost twice as much
    dropout: float = 0.3
    degrees: float = 10
    shift: float = 2
    label_smoothing: float = 0.0


def make_trainer(
    digits: data.Digits, recipe: Recipe, seed: int, device: torch.device | str = "cpu"
) -> Trainer:
    """Return a Trainer for `recipe`; model initialisation and dropout follow from `seed`."""
    torch.manual_seed(seed)
    model = models.ConvNet(width=recipe.width, dropout=recipe.dropout)
    model = model.to(device, memory_format=torch.channels_last)
    steps = recipe.epochs * (len(digits.train_images) // recipe.batch_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.peak_lr, weight_decay=recipe.weight_decay
    )
    return Trainer(
        model,
        optimizer,
        partial(classification_loss, label_smoothing=recipe.label_smoothing),
        TrainConfig(steps=steps),
        lr_at=lambda step: schedules.one_cycle(step, peak=recipe.peak_lr, total=steps),
    )


def classification_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor], *, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of logits [N, C] against class numbers int64 [N]."""
    images, labels = batch
    if labels.dtype != torch.int64:
        raise ValueError(f"expected int64 labels [N], got {labels.dtype} {list(labels.shape)}")
    return F.cross_entropy(model(images), labels, label_smoothing=label_smoothing)


def batches_from(
    digits: data.Digits, recipe: Recipe, seed: int
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return what `Trainer.fit` takes: start -> augmented training batches, from that number on."""
    images = data.normalize(digits.train_images)  # the whole set as one float tensor: 4 B a pixel

    def transform(x: Tensor, generator: torch.Generator) -> Tensor:
        if recipe.degrees or recipe.shift:
            x = augmentation.augment(x, generator, degrees=recipe.degrees, shift=recipe.shift)
        return x.contiguous(memory_format=torch.channels_last)

    pairs, rest = (images, digits.train_labels), {"seed": seed, "transform": transform}
    return lambda start: data.batches(*pairs, size=recipe.batch_size, start=start, **rest)


def train(
    digits: data.Digits,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    on_step: Iterable[Callable] = (),
) -> nn.Module:
    """Train from scratch and return the model in evaluation mode."""
    trainer = make_trainer(digits, recipe, seed, device)
    trainer.fit(batches_from(digits, recipe, seed), on_step)
    return trainer.model.eval()


@torch.inference_mode()
def predict(model: nn.Module, images: Tensor, batch_size: int = 1000) -> Tensor:
    """Return class probabilities float32 [N, 10] for uint8 images [N, 1, 28, 28]."""
    was_training = model.training
    model.eval()  # batch norm and dropout behave differently in training
    device = next(model.parameters()).device
    parts = [model(data.normalize(x).to(device)).softmax(1).cpu() for x in images.split(batch_size)]
    model.train(was_training)
    return torch.cat(parts)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions, in 0..1."""
    return (predict(model, images).argmax(1) == labels).double().mean().item()


def confusion_matrix(labels: Tensor, predictions: Tensor, classes: int = 10) -> Tensor:
    """Count int64 [classes, classes]: row = true class, column = predicted class."""
    if labels.shape != predictions.shape:
        a, b = list(labels.shape), list(predictions.shape)
        raise ValueError(f"expected as many predictions as labels {a}, got {b}")
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, -1)


def worst_mistakes(probabilities: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the indices of the misread digits, the most confident mistake first."""
    confidence, predictions = probabilities.max(1)
    wrong = (predictions != labels).nonzero().flatten()
    return wrong[confidence[wrong].argsort(descending=True, stable=True)][:count]


def wilson(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval for the true share behind `correct` of `total`; z = 1.96: 95%.

    It stays inside 0..1 and keeps a width when nothing is wrong (Wilson 1927).
    """
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"expected 0 <= correct <= total, total > 0, got {correct} of {total}")
    share, k = correct / total, z * z / total
    half = z * math.sqrt((share * (1 - share) + k / 4) / total)
    return (share + k / 2 - half) / (1 + k), (share + k / 2 + half) / (1 + k)


def paired_test(right_a: Tensor, right_b: Tensor) -> tuple[int, int, float]:
    """Compare two models on the same digits: only a right, only b right, p-value; bool [N] each.

    McNemar's test, exact: were they equally good, each digit that one alone gets right would be a
    fair coin's toss (McNemar 1947).
    """
    if {right_a.dtype, right_b.dtype} != {torch.bool} or right_a.shape != right_b.shape:
        got = f"{right_a.dtype} {list(right_a.shape)}, {right_b.dtype} {list(right_b.shape)}"
        raise ValueError(f"expected two bool tensors [N] of one length, got {got}")
    a, b = int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    n, fair = torch.tensor([a + b, 0.5], dtype=torch.float64)
    tail = torch.distributions.Binomial(n, fair).log_prob(torch.arange(min(a, b) + 1.0).to(n)).exp()
    return a, b, min(1.0, 2 * tail.sum().item())


def center(drawing: Tensor) -> Tensor:
    """Bring a drawing to MNIST's form: uint8 [H, W], white on black -> uint8 [1, 1, 28, 28].

    As the set was made: the ink fits a 20 x 20 box, its center of mass is the image's center
    (LeCun et al. 1998, section III). Raises ValueError for an empty drawing.
    """
    if drawing.ndim != 2 or not drawing.any():
        got = f"{list(drawing.shape)} with sum {int(drawing.sum())}"
        raise ValueError(f"expected a drawing [H, W] with some ink, got {got}")
    ink = drawing.float()
    rows, columns = ink.sum(1).nonzero().flatten(), ink.sum(0).nonzero().flatten()
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = 20 / max(box.shape)
    size = [max(1, round(scale * side)) for side in box.shape]
    small = F.interpolate(box[None, None], size, mode="bilinear", antialias=True)[0, 0]
    mass = small.sum()
    y = (small.sum(1) @ torch.arange(size[0], dtype=torch.float32) / mass).item()
    x = (small.sum(0) @ torch.arange(size[1], dtype=torch.float32) / mass).item()
    top = min(max(round(round(13.5 - y, 3)), 0), 28 - size[0])
    left = min(max(round(round(13.5 - x, 3)), 0), 28 - size[1])
    out = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    out[0, 0, top : top + size[0], left : left + size[1]] = small.round().clamp(0, 255)
    return out
