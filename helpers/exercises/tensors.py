"""Chapter 02, exercises: images, rows, tables by broadcasting, cross-entropy, strides, patches."""

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.exercises.harness import Exercise
from helpers.tensors import element_offset

# ---- the short exercises: a frame, a blend, rows by a mask


def add_frame(image: Tensor, value: float) -> Tensor:
    """Return a copy of the image with its outermost rows and columns set to a value."""
    framed = torch.full_like(image, value)
    framed[1:-1, 1:-1] = image[1:-1, 1:-1]
    return framed


def _images_to_frame() -> list[tuple]:
    return [
        (torch.arange(20).reshape(5, 4), 255),
        (torch.arange(12, dtype=torch.uint8).reshape(3, 4), 9),
        (torch.rand(4, 4), 0.5),
        (torch.arange(30).reshape(5, 6).T, -1),
        (torch.tensor([[7]]), 0),
        (torch.rand(2, 5).double(), 1.0),
    ]


def blend(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of two uint8 images, rounded down."""
    return ((a.long() + b.long()) // 2).to(torch.uint8)


def _pairs_of_images() -> list[tuple]:
    light = torch.tensor([[200, 101], [255, 255]], dtype=torch.uint8)
    dark = torch.tensor([[101, 200], [255, 0]], dtype=torch.uint8)
    many = torch.arange(256).to(torch.uint8)
    return [
        (light, dark),
        (light, light.clone()),
        (dark.T, light),
        (torch.ones(2, 3).to(torch.uint8), torch.ones(2, 3).to(torch.uint8)),
        (many.repeat(256, 1), many.repeat(256, 1).T),
    ]


def days_above(table: Tensor, city: int, limit: float) -> Tensor:
    """Return the rows whose number in one column is above a limit."""
    return table[table.select(1, city) > limit]


def _tables_of_days() -> list[tuple]:
    table = torch.tensor([[21.0, 15.5, 30.0], [22.0, 14.0, 31.5], [20.5, 16.0, 29.0]])
    return [
        (table, 1, 15),
        (table, 0, 21),  # one number is exactly the limit
        (table, 2, 40),  # no row
        (table, 2, 0),  # every row
        (torch.rand(30, 4).double(), 3, 0.5),
        (torch.arange(12).reshape(3, 4).T, 1, 5),
    ]


# ---- 1: scale the columns


def scale_columns(table: Tensor) -> Tensor:
    """Return the table with each column running from 0 to 1."""
    low, high = table.aminmax(dim=0, keepdim=True)
    return (table - low) / (high - low)


def _tables() -> list[tuple]:
    return [
        (torch.tensor([[21.0, 150.0, 3.0], [22.0, 140.0, 1.0], [25.0, 160.0, 2.0]]),),
        (torch.tensor([[3.0], [-5.0]]),),
        (torch.rand(7, 3).double(),),
        (torch.rand(3, 6).T,),
        (torch.rand(4, 4) * torch.tensor([1.0, 10.0, 1e-3, 1e4]),),
        (-5 - torch.rand(6, 2),),  # negative throughout: a maximum started at 0 would be wrong
        (torch.tensor([[16_000_000.0, 1.0], [16_000_003.0, 2.0], [16_000_001.0, 5.0]]),),
        (torch.randn(300, 2),),
    ]


# ---- 2 and 3: tables by broadcasting


def causal(n: int) -> Tensor:
    """Return an n × n table, true on and below the diagonal."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def running_sum(x: Tensor) -> Tensor:
    """Return the sums of x[:1], x[:2], …"""
    return x.cumsum(0)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance from each row of a to each row of b."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def _labels() -> list[tuple]:
    labels = torch.tensor([2, 0, 2])
    return [
        (labels, 3),
        (labels, 5),
        (labels[:0], 2),
        (torch.zeros(4, dtype=torch.int64), 1),
        (torch.arange(8)[::2], 7),
        (torch.arange(300), 300),
    ]


def _vectors() -> list[tuple]:
    return [
        (torch.tensor([1.0, -2, 4]),),
        (torch.rand(5).double(),),
        (torch.rand(0),),
        (torch.randn(300, dtype=torch.float64),),
        (torch.arange(-3, 9),),
        (torch.rand(9).half(),),
        (torch.randn(40)[::3],),
        (torch.tensor([3.0]),),
    ]


def _points() -> list[tuple]:
    same = torch.rand(6, 3)
    return [
        (torch.rand(3, 2), torch.rand(4, 2)),
        (torch.rand(1, 5), torch.rand(0, 5)),
        (torch.rand(0, 2), torch.rand(3, 2)),
        (torch.rand(2, 1).double(), torch.rand(3, 1).double()),
        (torch.rand(2, 5).T, torch.rand(4, 2)),
        (same, same.clone()),
        (1000 + torch.rand(5, 3), 1000 + torch.rand(4, 3)),  # |a|² + |b|² - 2ab cancels here
        (1e12 * torch.rand(2, 2), torch.rand(2, 2)),
    ]


# ---- 4: cross-entropy by gather


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each sample: a mean would hide a table of N × N differences."""
    return F.cross_entropy(logits, target, reduction="none")


def _logits() -> list[tuple]:
    return [
        (torch.randn(4, 3), torch.tensor([2, 0, 1, 1])),
        (torch.randn(1, 5).double(), torch.tensor([4])),
        (torch.tensor([[1000.0, 0.0, -1000.0]]), torch.tensor([1])),
        (torch.tensor([[-2000.0, -2001.0], [-3000.0, 50.0]]).double(), torch.tensor([0, 0])),
        (torch.randn(3, 6).T, torch.arange(6) % 3),
        (torch.randn(5, 1), torch.zeros(5, dtype=torch.int64)),
        (torch.randn(500, 10), torch.arange(500) % 10),
        (torch.randn(0, 3), torch.zeros(0, dtype=torch.int64)),
    ]


# ---- 5: read by strides


def element(
    storage: Tensor, stride: tuple[int, ...], offset: int, index: tuple[int, ...]
) -> Tensor:
    """Return the element of a 1-D storage that strides, offset and index name."""
    return storage[element_offset(index, stride, offset)]


def _elements() -> list[tuple]:
    line = torch.arange(24)
    return [
        (line, (4, 1), 0, (2, 3)),
        (line, (1, 4), 0, (3, 1)),
        (line, (8, 2), 5, (1, 2)),
        (line, (0, 3), 1, (7, 2)),
        (line / 2, (12, 4, 1), 0, (1, 2, 3)),
        (line, (), 7, ()),
        (line.half(), (5,), 3, (4,)),
        (line % 3 == 0, (6, 1), 2, (3, 1)),
        (torch.arange(48)[::2], (4, 1), 3, (2, 3)),  # the storage itself has a stride
        (torch.arange(100_000), (1000, 1, 10), 17, (99, 3, 4)),
    ]


# ---- 6: patches without a copy


def patches(image: Tensor, p: int) -> Tensor:
    """Return the p × p patches of [H, W] as [H / p, W / p, p, p], a view."""
    return image.unfold(0, p, p).unfold(1, p, p)


def _images() -> list[tuple]:
    image = torch.arange(24).view(4, 6)
    return [
        (image, 2),
        (image.T, 2),
        (image.float(), 1),
        (torch.arange(9).view(3, 3), 3),
        (torch.arange(80).view(8, 10)[1:7, 2:8], 3),  # a window of a larger image
        (torch.arange(6).expand(4, 6), 2),
        (torch.rand(6, 12).double()[::2, ::3], 1),
        (torch.rand(2, 8), 2),
    ]


EXERCISES = {
    "add_frame": Exercise(reference=add_frame, cases=_images_to_frame),
    "blend": Exercise(reference=blend, cases=_pairs_of_images),
    "days_above": Exercise(reference=days_above, cases=_tables_of_days),
    "scale_columns": Exercise(reference=scale_columns, cases=_tables),
    "one_hot": Exercise(reference=F.one_hot, cases=_labels, forbid=("one_hot",)),
    "causal": Exercise(
        reference=causal,
        cases=lambda: [(4,), (1,), (0,), (7,)],
        forbid=("tril", "triu", "tril_indices"),
    ),
    "running_sum": Exercise(reference=running_sum, cases=_vectors, forbid=("cumsum",)),
    "distances": Exercise(reference=distances, cases=_points, forbid=("cdist",)),
    "cross_entropy": Exercise(
        reference=cross_entropy,
        cases=_logits,
        gradient=True,
        forbid=("cross_entropy", "log_softmax", "nll_loss"),
    ),
    "element": Exercise(reference=element, cases=_elements, forbid=("as_strided",)),
    "patches": Exercise(reference=patches, cases=_images, view=True, forbid=("unfold",)),
}
