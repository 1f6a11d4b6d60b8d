"""Chapter 07: the MNIST project — the recipe, its evaluation, a digit of one's own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import augmentation, data, models, schedules
from helpers.training import TrainConfig, Trainer


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyperparameters of a run. The learning rate rises to `peak_lr` and falls once."""

    epochs: int = 7
    batch_size: int = 250
    peak_lr: float = 0.01
    weight_decay: float = 1e-4
    width: int = 24
    dropout: float = 0.3
    degrees: float = 10
    shift: float = 2


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
        classification_loss,
        TrainConfig(steps=steps),
        lr_at=lambda step: schedules.one_cycle(step, peak=recipe.peak_lr, total=steps),
    )


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of logits [N, C] against class numbers int64 [N]."""
    images, labels = batch
    if labels.dtype != torch.int64:
        raise ValueError(f"expected int64 labels [N], got {labels.dtype} {list(labels.shape)}")
    return F.cross_entropy(model(images), labels)


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
    images = data.normalize(digits.train_images)  # the whole set as one float tensor: 4 B a pixel

    def batches_from(start: int):
        return data.batches(
            images,
            digits.train_labels,
            size=recipe.batch_size,
            seed=seed,
            start=start,
            transform=lambda x, generator: augmentation.augment(
                x, generator, degrees=recipe.degrees, shift=recipe.shift
            ).contiguous(memory_format=torch.channels_last),
        )

    trainer.fit(batches_from, on_step)
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
        raise ValueError(
            f"expected as many predictions as labels {list(labels.shape)}, "
            f"got {list(predictions.shape)}"
        )
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, -1)


def worst_mistakes(probabilities: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the indices of the misread digits, the most confident mistake first."""
    confidence, predictions = probabilities.max(1)
    wrong = (predictions != labels).nonzero().flatten()
    return wrong[confidence[wrong].argsort(descending=True)][:count]


def center(drawing: Tensor) -> Tensor:
    """Bring a drawing to MNIST's form: uint8 [H, W], white on black -> uint8 [1, 1, 28, 28].

    As the set was made: the ink fits a 20 x 20 box, its center of mass is the image's center
    (LeCun et al. 1998, section III). Raises ValueError for an empty drawing.
    """
    ink = drawing.float()
    rows, columns = ink.sum(1).nonzero().flatten(), ink.sum(0).nonzero().flatten()
    if len(rows) == 0:
        raise ValueError(f"expected a drawing with some ink, got {list(drawing.shape)} all zero")
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = 20 / max(box.shape)
    size = [max(1, round(scale * side)) for side in box.shape]
    small = F.interpolate(box[None, None], size, mode="bilinear", antialias=True)[0, 0]
    mass = small.sum()
    y = (small.sum(1) @ torch.arange(size[0], dtype=torch.float32) / mass).item()
    x = (small.sum(0) @ torch.arange(size[1], dtype=torch.float32) / mass).item()
    top = min(max(round(13.5 - y), 0), 28 - size[0])
    left = min(max(round(13.5 - x), 0), 28 - size[1])
    out = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    out[0, 0, top : top + size[0], left : left + size[1]] = small.round().clamp(0, 255)
    return out
