import gzip
import hashlib
import http.server
import itertools
import os
import shutil
import struct
import threading
from functools import partial

import pytest
import torch
from torchvision.datasets import MNIST

from helpers import data

FULL = os.environ.get("PYTORCH_BOOK_DATA")


def idx(tensor):
    """A tensor in the IDX format of the MNIST files."""
    head = struct.pack(">BBBB", 0, 0, 8, tensor.ndim) + struct.pack(
        f">{tensor.ndim}I", *tensor.shape
    )
    return head + tensor.to(torch.uint8).numpy().tobytes()


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A folder with four small files in MNIST's layout whose checksums the module expects."""
    generator = torch.Generator().manual_seed(0)
    raw = tmp_path / "there" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    sums = {}
    for prefix, n in (("train", 12), ("t10k", 5)):
        images = torch.randint(256, (n, 28, 28), generator=generator)
        files = {"images-idx3": images, "labels-idx1": torch.arange(n) % 10}
        for kind, tensor in files.items():
            name = f"{prefix}-{kind}-ubyte"
            (raw / name).write_bytes(idx(tensor))
            sums[name] = hashlib.sha256((raw / name).read_bytes()).hexdigest()
    monkeypatch.setattr(data, "SHA256", sums)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTORCH_BOOK_DATA", raising=False)
    return tmp_path / "there"


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])  # discard port: refuses at once


@pytest.fixture
def mirror(small_mnist, tmp_path, monkeypatch):
    """A real HTTP server on loopback that serves the small files, gzipped."""
    served = tmp_path / "served"
    served.mkdir()
    resources = []
    for name in data.SHA256:
        packed = gzip.compress((small_mnist / "MNIST" / "raw" / name).read_bytes())
        (served / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    monkeypatch.setattr(MNIST, "resources", resources)
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def embedded():
    return data.digits()


def test_embedded_digits_are_balanced_and_disjoint(embedded):
    assert embedded.train_images.shape == (4000, 1, 28, 28)
    assert embedded.test_images.shape == (1000, 1, 28, 28)
    assert embedded.train_images.dtype == torch.uint8 and embedded.train_labels.dtype == torch.int64
    assert embedded.train_labels.bincount().tolist() == [400] * 10
    assert embedded.test_labels.bincount().tolist() == [100] * 10
    assert embedded.train_labels[:20].bincount().tolist() == [2] * 10  # interleaved
    train = {t.numpy().tobytes() for t in embedded.train_images}
    assert not train & {t.numpy().tobytes() for t in embedded.test_images}


@pytest.mark.skipif(not FULL, reason="PYTORCH_BOOK_DATA does not point to full MNIST")
def test_embedded_digits_are_mnist_digits(embedded):
    full = data.mnist(download=False)
    known = dict(
        zip((t.numpy().tobytes() for t in full.train_images), full.train_labels, strict=True)
    )
    known |= zip((t.numpy().tobytes() for t in full.test_images), full.test_labels, strict=True)
    pairs = zip(embedded.train_images, embedded.train_labels, strict=True)
    assert all(known[image.numpy().tobytes()] == label for image, label in pairs)


@pytest.mark.skipif(not FULL, reason="PYTORCH_BOOK_DATA does not point to full MNIST")
def test_full_mnist_and_its_statistics():
    full = data.mnist(download=False)
    assert full.source == "full MNIST"
    assert full.train_images.shape == (60000, 1, 28, 28) and full.test_images.shape[0] == 10000
    pixels = full.train_images.double() / 255
    assert pixels.mean().item() == pytest.approx(data.MEAN, abs=5e-5)
    assert pixels.std(correction=0).item() == pytest.approx(data.STD, abs=5e-5)


def test_mnist_from_the_environment_variable(small_mnist, no_network, monkeypatch):
    monkeypatch.setenv("PYTORCH_BOOK_DATA", str(small_mnist))
    got = data.mnist()
    assert got.source == "full MNIST" and got.train_images.shape == (12, 1, 28, 28)
    assert got.test_labels.tolist() == [0, 1, 2, 3, 4]


def test_mnist_from_the_cache(small_mnist, no_network, tmp_path):
    shutil.copytree(small_mnist, tmp_path / "cache" / "pytorch-book")
    assert data.mnist().source == "full MNIST"


def test_mnist_downloads_into_the_cache(mirror, tmp_path, capsys):
    assert data.mnist().train_labels.tolist() == [*range(10), 0, 1]
    assert (tmp_path / "cache" / "pytorch-book" / "MNIST" / "raw").is_dir()
    assert "100%" in capsys.readouterr().err  # the progress bar
    (mirror / "train-images-idx3-ubyte.gz").unlink()
    assert data.mnist().source == "full MNIST"  # the second time nothing is fetched


def test_damaged_cache_is_replaced(mirror, small_mnist, tmp_path):
    cache = tmp_path / "cache" / "pytorch-book"
    shutil.copytree(small_mnist, cache)
    (cache / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"half")
    assert data.mnist().source == "full MNIST"
    assert data._problem_with(cache) is None


def test_damaged_download_is_not_kept(mirror, small_mnist, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(data.SHA256, "t10k-labels-idx1-ubyte", "0" * 64)
    assert data.mnist().source.startswith("5,000")
    assert "t10k-labels-idx1-ubyte is damaged" in capsys.readouterr().out
    assert not (tmp_path / "cache" / "pytorch-book" / "MNIST").exists()


def test_offline_fallback_says_what_was_tried(small_mnist, no_network, monkeypatch, capsys):
    monkeypatch.setenv("PYTORCH_BOOK_DATA", "/nowhere")
    assert data.mnist().source.startswith("5,000 embedded")
    out = capsys.readouterr().out
    assert out.startswith("Full MNIST is not here; using the 5,000 embedded digits. Tried:")
    assert "/nowhere: no MNIST/raw/train-images-idx3-ubyte" in out
    assert "download: " in out


def test_without_download_nothing_is_fetched(small_mnist, monkeypatch, capsys):
    monkeypatch.setattr(data, "_download", lambda cache: pytest.fail("tried to download"))
    assert data.mnist(download=False).source.startswith("5,000 embedded")
    assert "download:" not in capsys.readouterr().out


def test_normalize(embedded):
    x = data.normalize(embedded.train_images)
    assert x.dtype == torch.float32 and x.min() < 0 < x.max()
    assert torch.equal(((x * data.STD + data.MEAN) * 255).round().byte(), embedded.train_images)
    with pytest.raises(ValueError, match="expected uint8 images in 0..255, got torch.float32"):
        data.normalize(x)


def take(n, *args, **kwargs):
    return list(itertools.islice(data.batches(*args, **kwargs), n))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 17])
def test_batches_are_a_pure_function_of_their_number(start):
    x, y = torch.arange(10.0), torch.arange(10)

    def noisy(t, g):
        return t + torch.rand(len(t), generator=g)

    whole = take(start + 5, x, y, size=3, seed=1, transform=noisy)
    resumed = take(5, x, y, size=3, seed=1, start=start, transform=noisy)
    for a, b in zip(whole[start:], resumed, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_an_epoch_visits_each_sample_at_most_once_and_drops_the_tail():
    x = torch.arange(10)
    seen = torch.cat([b[0] for b in take(3, x, size=3, seed=0)])
    assert len(seen) == 9 == seen.unique().numel()


def test_epochs_and_seeds_differ():
    x = torch.arange(100)
    first, second = (b[0] for b in take(2, x, size=100, seed=0))
    assert not torch.equal(first, second)
    assert not torch.equal(first, take(1, x, size=100, seed=1)[0][0])
    # 32-bit seeds collide if they are only added: (0, epoch 1) must not equal (1, epoch 0)
    assert not torch.equal(second, take(1, x, size=100, seed=1)[0][0])


def test_bad_batches():
    with pytest.raises(ValueError, match=r"expected tensors of one length, got \[3, 4\]"):
        next(data.batches(torch.ones(3), torch.ones(4), size=1, seed=0))
    with pytest.raises(ValueError, match="batch size 5 exceeds the 3 samples"):
        next(data.batches(torch.ones(3), size=5, seed=0))
