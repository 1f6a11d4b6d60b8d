"""The same model, optimizer and batches every time, and no Lightning in the processes."""

import subprocess
import sys

import torch

from helpers import data
from helpers.ecosystem_job import Shuffled, make_job


def test_the_job_is_the_same_every_time():
    digits = data.digits()
    (model, optimizer, loader), (again, _, other) = make_job(digits), make_job(digits)
    for weight, same in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, same)
    assert {id(p) for p in model.parameters()} == {
        id(p) for group in optimizer.param_groups for p in group["params"]
    }
    for batch, same in zip(loader, other, strict=True):
        assert batch[0].shape == (100, 784)
        assert torch.equal(batch[0], same[0]) and torch.equal(batch[1], same[1])


def test_the_order_depends_on_the_epoch_alone():
    order = Shuffled(10)
    epochs = [list(order) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and len(order) == 10
    again = Shuffled(10)
    torch.rand(5)
    next(iter(again))  # left after the first number
    assert list(again) == epochs[1]


def test_the_order_can_be_that_of_any_epoch():
    """`set_epoch` is what Lightning, Fabric and Accelerate look for and call."""
    order = Shuffled(10)
    epochs = [list(order) for _ in range(3)]
    order.set_epoch(1)
    assert list(order) == epochs[1]
    assert list(order) == epochs[2]


def test_importing_it_does_not_import_lightning():
    code = "import sys, helpers.ecosystem_job; print('lightning' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert said.stdout.strip() == "False"
