"""Chapter 19: the training job of its programs; importing it does not import Lightning."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler, TensorDataset

from helpers import data, models


class Shuffled(Sampler):
    """The numbers below `length` in an order that follows from the epoch's number alone.

    With `shuffle=True` and a generator, the next order also depends on whether the loop asked for
    one batch more than there are: `RandomSampler` draws once more at its very end.
    """

    def __init__(self, length: int):
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next order be that of `epoch`; Lightning, Fabric and Accelerate call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(self.length, generator=order).tolist())


def make_job(digits: data.Digits) -> tuple[nn.Module, Optimizer, DataLoader]:
    """Return a new model, its optimizer and a loader of batches of 100: the same every time."""
    torch.manual_seed(0)
    model = models.MLP(784, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    images = data.normalize(digits.train_images).flatten(1)
    dataset = TensorDataset(images, digits.train_labels)
    loader = DataLoader(dataset, batch_size=100, sampler=Shuffled(len(dataset)))
    return model, optimizer, loader
