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


def buckets(lengths, size, pool, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return data.Buckets(torch.tensor(lengths), size, pool=pool, generator=generator)


@pytest.mark.parametrize("pool", [1, 2, 100])
@pytest.mark.parametrize("n, size", [(0, 3), (1, 3), (9, 3), (10, 3), (10, 100)])
def test_buckets_visit_each_sample_once(n, size, pool):
    sampler = buckets([7 * i % 10 for i in range(n)], size, pool)
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-n // size)
    assert sorted(i for b in batches for i in b) == [*range(n)]
    assert all(len(b) <= size for b in batches)


def waste(lengths, batches):
    return sum(max(lengths[i] for i in b) * len(b) for b in batches) - sum(lengths)


def test_a_pool_of_everything_is_sorted_and_wastes_least():
    lengths = torch.randint(1, 100, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    by_pool = [waste(lengths, buckets(lengths, 8, pool)) for pool in (1, 4, 8)]
    assert by_pool[0] > by_pool[1] > by_pool[2]
    order = sorted(lengths)
    assert by_pool[2] == waste(order, [range(k, k + 8) for k in range(0, 64, 8)])


def test_buckets_differ_from_epoch_to_epoch_and_repeat_with_the_seed():
    sampler = buckets([*range(20)], 4, 2)
    first, second = list(sampler), list(sampler)
    assert first != second and first == list(buckets([*range(20)], 4, 2))


@pytest.fixture
def benchmark(monkeypatch, load_benchmark):
    module = load_benchmark("data")
    monkeypatch.setattr(module, "REPEATS", 3)
    yield module
    torch.set_num_threads(os.cpu_count() or 1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_benchmark_runs(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "WORKERS", (0,))
    monkeypatch.setattr(benchmark, "BATCH", 2)
    monkeypatch.setattr(benchmark, "STEP", 0.001)
    monkeypatch.setattr(benchmark, "batches", lambda workers: 4)
    record = benchmark.measure(torch.device("cpu"))
    assert record.name == "data" and set(record.units) == set(benchmark.UNITS)
    assert [r["samples"] for r in record.rows] == ["light", "heavy", "remote", "heavy + cpu"]
    cost = benchmark.cost_of(benchmark.kinds(8)["remote"], 0.001, 0.0)
    assert 0.005 < cost.wait <= cost.inline and cost.load > 0.005 and cost.take > 0
    for r in [*record.rows, benchmark.row("x", benchmark.kinds(8)["light"], 1, cost, 2)]:
        assert 0 <= r["predicted"] < 1 and 0 <= r["stall"][0] and r["images"][0] > 0


def test_the_benchmarks_samples(benchmark):
    kinds = benchmark.kinds(3)
    assert kinds["light"][0].shape == (3, 32, 32) and kinds["light"][0].dtype == torch.float32
    torch.manual_seed(0)
    first, second = kinds["heavy"][0], kinds["heavy"][0]
    assert first.shape == (3, 128, 128) and 0 <= first.min() and first.max() <= 1
    assert not torch.equal(first, second)  # augmented anew each time
    assert benchmark.photo() == benchmark.photo() != benchmark.photo(1)


def test_the_benchmarks_ways_to_copy(benchmark):
    batches = [[torch.arange(3)], [torch.arange(2)]]
    got = benchmark.to_device(batches, torch.device("cpu"), non_blocking=True)
    assert [t[0].tolist() for t in got] == [[0, 1, 2], [0, 1]]
    rows = benchmark.copies(torch.device("cpu"), shape=(2, 3), n=4)
    assert [r["samples"][6:] for r in rows][0::3] == ["pageable", "pinned, side stream"]
    assert all(set(benchmark.COPY_UNITS) < set(r) and 0 <= r["overlap"] <= 1 for r in rows)


@pytest.mark.parametrize(
    "step, hidden", [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (9.0, 0.0), (1.0, 1.0)]
)
def test_overlap(benchmark, step, hidden):
    assert benchmark.overlap(step, copy=1.0, compute=2.0) == hidden


@pytest.mark.gpu
def test_the_benchmarks_copies_on_cuda(benchmark):
    rows = benchmark.copies(torch.device("cuda"))
    by_way = {r["samples"][6:]: r["overlap"] for r in rows}
    assert by_way["pinned, side stream"] > by_way["pinned"]
