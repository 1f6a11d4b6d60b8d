"""Chapter 19: one training job in bare PyTorch and in four libraries, and what they weigh."""

# Every `train_…` gets a model, its optimizer and a loader, which it reads `epochs` times; all of
# them make the same updates. `…_grown` is the same job with three wishes of a real project:
# bfloat16 in the forward pass, `ACCUMULATE` batches for each update, and gradients clipped to the
# norm `CLIP`. The programs stand in the notebook as well, and a test compares the two.

import ast
import importlib.metadata
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from helpers.training import TrainConfig, Trainer

ACCUMULATE, CLIP = 2, 1.0


# ---- bare PyTorch


def train_bare(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int, device: str = "cpu"
) -> None:
    """The loop of every tutorial."""
    model.to(device)
    model.train()
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_bare_grown(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int, device: str = "cpu"
) -> None:
    """The same loop with bfloat16, accumulation and clipping."""
    model.to(device)
    model.train()
    optimizer.zero_grad()
    for _ in range(epochs):
        for number, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            (loss / ACCUMULATE).backward()
            if (number + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()


# ---- the book's Trainer


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch, as `Trainer` asks for it."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def repeated(loader: DataLoader) -> Callable[[int], Iterator]:
    """Return `batches_from` for the Trainer: all batches again and again, from number n on.

    The loader has to be new: n is counted from the batch that it reads next.
    """

    def batches_from(start: int) -> Iterator:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        return itertools.islice(batches, start, None)

    return batches_from


def train_with_trainer(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """The Trainer of chapter 6."""
    config = TrainConfig(steps=epochs * len(loader))
    Trainer(model, optimizer, loss_fn, config).fit(repeated(loader))


def train_with_trainer_grown(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """The same with three more arguments."""
    config = TrainConfig(
        steps=epochs * len(loader) // ACCUMULATE,
        amp_dtype=torch.bfloat16,
        micro_batches=ACCUMULATE,
        clip_norm=CLIP,
    )
    Trainer(model, optimizer, loss_fn, config).fit(repeated(loader))


# ---- Accelerate


def train_with_accelerate(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """The bare loop, in which Accelerate has wrapped model, optimizer and loader."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()


def train_with_accelerate_grown(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """Accelerate divides the loss, and skips `step` and `zero_grad` between the updates."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()


def forget_accelerate() -> None:
    """Let the next `Accelerator` of this process have other settings.

    Device, precision and the number of batches to accumulate belong to the whole process. An
    `Accelerator` with another precision raises ValueError; one with another number changes that of
    the earlier ones. There is no public way to start anew: test suites call these two methods.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- Fabric


def train_with_fabric(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """The bare loop, in which Fabric has wrapped model, optimizer and loader."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    model.train()
    for _ in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()


def train_with_fabric_grown(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """Fabric takes over the precision and the clipping; accumulation stays in the loop."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    model.train()
    optimizer.zero_grad()
    for _ in range(epochs):
        for number, (images, labels) in enumerate(loader):
            last = (number + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = F.cross_entropy(model(images), labels)
                fabric.backward(loss / ACCUMULATE)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()


# ---- Lightning


class Classifier(L.LightningModule):
    """What is computed; how it runs is up to `L.Trainer`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        super().__init__()
        self.model = model
        self.optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Optimizer:
        """The optimizer that `L.Trainer` steps."""
        return self.optimizer


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def train_with_lightning(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """No loop is left."""
    trainer = L.Trainer(max_epochs=epochs, **QUIET)
    trainer.fit(Classifier(model, optimizer), loader)


def train_with_lightning_grown(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader, epochs: int
) -> None:
    """The same with three more arguments."""
    trainer = L.Trainer(
        max_epochs=epochs,
        precision="bf16-mixed",
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        **QUIET,
    )
    trainer.fit(Classifier(model, optimizer), loader)


# name -> (the small job, the grown job, what else is part of the program)
PROGRAMS: dict[str, tuple[Callable, Callable, tuple]] = {
    "bare": (train_bare, train_bare_grown, ()),
    "Trainer": (train_with_trainer, train_with_trainer_grown, (loss_fn, repeated)),
    "Accelerate": (train_with_accelerate, train_with_accelerate_grown, ()),
    "Fabric": (train_with_fabric, train_with_fabric_grown, ()),
    "Lightning": (train_with_lightning, train_with_lightning_grown, (Classifier,)),
}


# ---- what a program and a library cost


def code_lines(*objects: Any) -> int:
    """Count the lines of functions and classes that hold code: no blanks, comments, docstrings.

    A signature counts as one line, however long its types are.
    """
    return sum(_code_lines(textwrap.dedent(inspect.getsource(each))) for each in objects)


def _code_lines(source: str) -> int:
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = node.body[0]
            skipped.update(range(node.lineno + 1, first.lineno))  # the rest of the signature
            if ast.get_docstring(node) is not None:
                skipped.update(range(first.lineno, first.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    kept = [line.strip() for number, line in lines if number not in skipped]
    return sum(1 for line in kept if line and not line.startswith("#"))


def statements(*objects: Any) -> int:
    """Count the statements of functions and classes, without docstrings.

    A call is one, however many lines it takes; so is a `def`, a `for` or an `if`, beside its body.
    """
    return sum(_statements(textwrap.dedent(inspect.getsource(each))) for each in objects)


def _statements(source: str) -> int:
    nodes = list(ast.walk(ast.parse(source)))
    documented = [
        node
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None
    ]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(documented)


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    """Are all parameters and buffers equal, bit for bit?"""
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )


def needed(*names: str) -> set[str]:
    """Return the installed distributions that `names` need, themselves included, without extras."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name)
        except importlib.metadata.PackageNotFoundError:
            if name in map(canonicalize_name, names):
                raise
            continue  # a requirement for another platform, or left out on purpose
        found.add(name)
        waiting += _names(requires)
    return found


def _names(requires: Iterable[str] | None) -> list[str]:
    if requires is None:
        return []
    wanted = map(Requirement, requires)
    kept = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [canonicalize_name(r.name) for r in kept]


def added_bytes(name: str, beside: Iterable[str] = ("torch",)) -> int:
    """Return the bytes of the files that installing `name` adds where `beside` is installed."""
    added = needed(name) - needed(*beside)
    return sum(_bytes(each) for each in added)


def _bytes(name: str) -> int:
    files = importlib.metadata.files(name)
    if files is None:
        raise ValueError(
            f"{name}: expected a list of its files, got none; was it installed by pip?"
        )
    paths = [file.locate() for file in files]
    return sum(path.stat().st_size for path in paths if path.is_file())
