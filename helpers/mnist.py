"""Chapter 07: the MNIST project — the recipe, its evaluation, a digit of one's own."""

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

    def from_number(start: int) -> Iterator[tuple[Tensor, Tensor]]:
        return data.batches(
            images,
            digits.train_labels,
            size=recipe.batch_size,
            seed=seed,
            start=start,
            transform=transform,
        )

    return from_number


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
    """Return class probabilities float32 [N, 10] for uint8 images [N, 1, 28, 28].

    The model answers in evaluation mode and comes back in the mode it was in, also after an error.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()  # batch norm and dropout behave differently in training

    try:
        parts = []
        for batch in images.split(batch_size):
            logits = model(data.normalize(batch).to(device))
            parts.append(logits.softmax(1).cpu())
    finally:
        model.train(was_training)

    return torch.cat(parts)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions, in 0..1, on uint8 [N, 1, 28, 28], labels int64 [N].

    ValueError when there are no images (0 of 0 is no share), or not one label for each.
    """
    if len(images) == 0 or labels.shape != images.shape[:1]:
        got = f"{len(images)} images and labels {list(labels.shape)}"
        raise ValueError(f"expected at least one image and one label for each, got {got}")
    correct = predict(model, images).argmax(1) == labels
    return correct.double().mean().item()


def worst_mistakes(probabilities: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the indices of the misread digits, the most confident mistake first."""
    confidence, predictions = probabilities.max(1)
    wrong = (predictions != labels).nonzero().flatten()
    return wrong[confidence[wrong].argsort(descending=True, stable=True)][:count]


def center(drawing: Tensor) -> Tensor:
    """Bring a drawing to MNIST's form: uint8 [H, W], white on black -> uint8 [1, 1, 28, 28].

    As the set was made: the ink fits a 20 x 20 box, its center of mass is the image's center
    (LeCun et al. 1998, section III). ValueError for another dtype (floats in 0..1 would round to
    black) and for an empty drawing.
    """
    if drawing.dtype != torch.uint8 or drawing.ndim != 2:
        got = f"{drawing.dtype} {list(drawing.shape)}"
        raise ValueError(f"expected a drawing uint8 [H, W], 0 black to 255 white, got {got}")
    if not drawing.any():
        raise ValueError(f"expected a drawing with some ink, got {list(drawing.shape)} all black")

    # the smallest box around the ink, its longer side scaled to 20 pixels
    ink = drawing.float()
    rows = ink.sum(1).nonzero().flatten()
    columns = ink.sum(0).nonzero().flatten()
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = 20 / max(box.shape)
    height, width = [max(1, round(scale * side)) for side in box.shape]  # a thin bar keeps a pixel
    small = F.interpolate(box[None, None], (height, width), mode="bilinear", antialias=True)[0, 0]

    # the center of mass goes to 13.5, between pixels 13 and 14, as far as the box stays inside
    mass = small.sum()
    y = (small.sum(1) @ torch.arange(height, dtype=torch.float32) / mass).item()
    x = (small.sum(0) @ torch.arange(width, dtype=torch.float32) / mass).item()
    # to 3 decimals first: the browser's pad adds in another order, and must choose the same pixel
    top = min(max(round(round(13.5 - y, 3)), 0), 28 - height)
    left = min(max(round(round(13.5 - x, 3)), 0), 28 - width)

    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[0, 0, top : top + height, left : left + width] = small.round().clamp(0, 255)
    return image
