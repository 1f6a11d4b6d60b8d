"""Chapter 07, exercises: confusion matrix, label smoothing, a shifted batch, folded batch norm."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.transforms.v2 import functional as tf

from helpers.exercises.harness import Exercise


def count_pairs(labels: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Count int64 [classes, classes], pair by pair: a row is a true class, a column a reading."""
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    for true, read_as in zip(labels.tolist(), predictions.tolist(), strict=True):
        matrix[true, read_as] += 1
    return matrix


def count_pairs_cases() -> list[tuple]:
    few = torch.randint(0, 7, (2, 50))
    many = torch.randint(0, 3, (2, 5000))  # more than bytes or half precision count exactly
    pairs = torch.randint(0, 4, (20, 2))  # its columns are not contiguous
    return [
        (torch.tensor([2, 2]), torch.tensor([0, 0]), 3),  # the last class is never read
        (few[0], few[1], 7),
        (few[0], few[1], 9),  # two classes without a sample
        (many[0], many[1], 3),
        (pairs[:, 0], pairs[:, 1], 4),
        (torch.tensor([1]), torch.tensor([4]), 5),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 1),
        (few[0, :0], few[1, :0], 7),
    ]


def smooth_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """PyTorch's mean cross-entropy with label smoothing."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def smooth_loss_cases() -> list[tuple]:
    classes = torch.randint(0, 10, (8,))
    return [
        (torch.randn(8, 10), classes, 0.1),
        (torch.randn(8, 10), classes, 0.0),
        (torch.randn(8, 10), classes, 1.0),
        # powers of two: targets of float32, as `one_hot` times a number gives, are exact here
        (1000 * torch.randn(4, 4).double(), torch.tensor([0, 1, 2, 2]), 0.25),
        (torch.tensor([[200.0, 0, -200], [-1e4, 1e4, 0]]), torch.tensor([2, 0]), 0.1),
        (torch.randn(5, 2).T, torch.tensor([4, 0]), 0.2),  # not contiguous
        (torch.randn(1, 8).double(), torch.tensor([3]), 0.5),
        (torch.randn(3, 1), torch.zeros(3, dtype=torch.int64), 0.4),  # one class: nothing to learn
    ]


def shift(images: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Translate as torchvision does, one image at a time."""
    moved = images.clone()
    for n, (right, down) in enumerate(torch.stack([dx, dy], 1).tolist()):
        moved[n] = tf.affine(images[n], 0.0, [right, down], 1.0, [0.0])
    return moved


def shift_cases() -> list[tuple]:
    gray = torch.randint(1, 256, (5, 1, 28, 28), dtype=torch.uint8)  # no zeros: all of it shows
    color = torch.rand(2, 3, 8, 5)
    return [
        (gray, torch.tensor([0, 3, -2, 27, 28]), torch.tensor([1, 0, -5, 0, 0])),
        (gray[:4], torch.tensor([31, -45, 0, 1000]), torch.tensor([0, 2, -31, 1000])),
        (color, torch.tensor([-1, 2]), torch.tensor([4, -3])),  # higher than wide
        (color.mT, torch.tensor([-1, 7]), torch.tensor([4, -4])),  # not contiguous
        (color.double(), torch.tensor([0, 0]), torch.tensor([0, 0])),
        (gray[:0], torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
    ]


def fold(
    weight: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """PyTorch's fusion of a convolution without bias [O, I, kH, kW] and its batch norm [O]."""
    fused = fuse_conv_bn_weights(weight, None, mean, var, 1e-5, gamma, beta)
    return tuple(parameter.detach() for parameter in fused)


def fold_cases() -> list[tuple]:
    return [
        (torch.randn(4, 1, 5, 5), torch.randn(4), torch.rand(4), *torch.randn(2, 4)),
        (torch.randn(3, 3, 2, 2), torch.randn(3), torch.rand(3), *torch.randn(2, 3)),
        (torch.randn(3, 2, 1, 1), torch.randn(3), torch.zeros(3), *torch.randn(2, 3)),
        (torch.randn(2, 5, 3, 1).double(), *torch.rand(4, 2).double()),
        (torch.randn(2, 2, 2, 2).mT, *torch.rand(2, 4).T),  # not contiguous
    ]


EXERCISES = {
    "count_pairs": Exercise(reference=count_pairs, cases=count_pairs_cases),
    "smooth_loss": Exercise(reference=smooth_loss, cases=smooth_loss_cases, gradient=True),
    "shift": Exercise(reference=shift, cases=shift_cases),
    "fold": Exercise(reference=fold, cases=fold_cases),
}
