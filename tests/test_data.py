import gzip
import hashlib
import http.server
import itertools
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

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
    for name in data.SHA256:
        packed = gzip.compress((small_mnist / "MNIST" / "raw" / name).read_bytes())
        (served / f"{name}.gz").write_bytes(packed)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
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
    assert data.mnist(download=False).source == "full MNIST"  # and it is whole now


def test_what_is_whole_is_not_fetched_again(mirror, small_mnist, tmp_path):
    cache = tmp_path / "cache" / "pytorch-book"
    shutil.copytree(small_mnist, cache)
    (cache / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    (mirror / "train-images-idx3-ubyte.gz").unlink()
    assert data.mnist().source == "full MNIST"


def test_damage_is_found_in_each_file():
    for name in data.SHA256:
        with pytest.raises(RuntimeError, match=f"{name} is damaged: SHA-256 e3b0c44298fc…, exp"):
            data._verify(name, b"")


def test_damaged_download_is_not_kept(mirror, small_mnist, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(data.SHA256, "t10k-labels-idx1-ubyte", "0" * 64)
    assert data.mnist().source.startswith("5,000")
    assert "t10k-labels-idx1-ubyte is damaged" in capsys.readouterr().out
    assert "t10k-labels-idx1-ubyte" not in names_in(tmp_path / "cache")


def names_in(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("where", ["variable", "cache"])
def test_what_may_not_be_read_is_passed_over(where, small_mnist, no_network, monkeypatch, capsys):
    """chmod stops no administrator, and tests may run as one: so the system's answer is played."""
    if where == "variable":
        monkeypatch.setenv("PYTORCH_BOOK_DATA", str(small_mnist))
    else:
        shutil.copytree(small_mnist, data._cache())
    read_bytes = Path.read_bytes

    def refuse(path):
        if path.name.endswith("ubyte"):
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert data.mnist().source.startswith("5,000 embedded")
    place = small_mnist if where == "variable" else data._cache()
    assert f"{place}: [Errno 13] Permission denied" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_a_silent_server_is_given_up(small_mnist, monkeypatch, capsys):
    """It accepts the connection and never says a word; the second mirror is tried all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(MNIST, "mirrors", [address, "http://127.0.0.1:9/"])
        monkeypatch.setattr(data, "TIMEOUT", 0.1)
        assert data.mnist().source.startswith("5,000 embedded")
    out = capsys.readouterr().out
    assert f"{address}train-images-idx3-ubyte.gz: timed out" in out
    assert "http://127.0.0.1:9/train-images-idx3-ubyte.gz: " in out


def test_the_second_mirror_is_used_when_the_first_sends_something_else(
    mirror, tmp_path, monkeypatch
):
    portal = tmp_path / "portal"  # a hotel's network answers everything with its own page
    portal.mkdir()
    for name in data.SHA256:
        (portal / f"{name}.gz").write_bytes(b"<html>Please log in")
    (mirror / "portal").symlink_to(portal)
    monkeypatch.setattr(MNIST, "mirrors", [f"{MNIST.mirrors[0]}portal/", *MNIST.mirrors])
    assert data.mnist().source == "full MNIST"


@pytest.mark.parametrize("arrives", ["before a file is written", "while the network fails"])
def test_a_set_that_another_process_brought_is_taken(arrives, mirror, small_mnist, monkeypatch):
    def fetch(name):
        shutil.copytree(small_mnist, data._cache(), dirs_exist_ok=True)
        if arrives == "while the network fails":
            raise RuntimeError("no route to host")
        return original(name)

    original = data._fetch
    monkeypatch.setattr(data, "_fetch", fetch)
    assert data.mnist().source == "full MNIST"


def test_a_killed_download_leaves_nothing(small_mnist, tmp_path):
    """SIGKILL while the second file arrives, very slowly: no folder, no half file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""if True:
            from pathlib import Path
            from helpers import data
            data.MNIST.mirrors = ["http://127.0.0.1:{server.getsockname()[1]}/"]
            data._download(Path({str(tmp_path / "cache")!r}))
        """
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as child:
            server.settimeout(120)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 999\r\n\r\n\x1f\x8b")
                child.kill()
                child.wait()
    assert names_in(tmp_path / "cache") == []
    assert [p.name for p in (tmp_path / "cache").rglob("*")] == ["MNIST", "raw"]


def test_remains_of_dead_processes_are_removed(mirror, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    raw = data._raw(data._cache())
    raw.mkdir(parents=True)
    host = platform.node()
    dead = raw / f"train-images-idx3-ubyte.{host}.{child.pid}.partial"
    others = [
        raw / f"train-images-idx3-ubyte.{host}.{os.getppid()}.partial",  # still being written
        raw / f"train-images-idx3-ubyte.other-{host}.{child.pid}.partial",  # who knows
        raw / f"train-images-idx3-ubyte.{host}.notes.partial",  # not ours
    ]
    for path in (dead, *others):
        path.write_bytes(b"half")
    assert data.mnist().source == "full MNIST"
    assert not dead.exists()
    assert all(path.exists() for path in others)


def test_a_full_disk_leaves_nothing(mirror, monkeypatch, capsys):
    def full(path, content):
        with open(path, "wb") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert data.mnist().source.startswith("5,000 embedded")
    assert "download: [Errno 28] No space left on device" in capsys.readouterr().out
    assert names_in(data._cache()) == []


@pytest.mark.parametrize("value", ["", "relative/cache", None])
def test_the_cache_is_in_the_home_folder_unless_the_variable_is_absolute(
    value, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert data._cache() == tmp_path / ".cache" / "pytorch-book"


def test_a_tilde_is_the_home_folder(small_mnist, no_network, monkeypatch):
    monkeypatch.setenv("HOME", str(small_mnist.parent))
    monkeypatch.setenv("PYTORCH_BOOK_DATA", f"~/{small_mnist.name}")
    assert data.mnist().source == "full MNIST"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert data._cache() == small_mnist.parent / "elsewhere" / "pytorch-book"


def test_an_empty_variable_is_none(small_mnist, no_network, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(small_mnist)  # an empty path would mean this folder, and find the set
    monkeypatch.setenv("PYTORCH_BOOK_DATA", "")
    assert data.mnist().source.startswith("5,000 embedded")
    assert capsys.readouterr().out.count("no MNIST/raw") == 1


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((3, 1, 28, 28), [0, 9, 10], r"expected labels in 0\.\.9, got \[10\]"),
        ((3, 1, 28, 28), [0, -1, -100], r"expected labels in 0\.\.9, got \[-100, -1\]"),
        ((3, 1, 28, 28), [0, 1], r"expected labels int64 \[3\], got torch.int64 \[2\]"),
        ((1, 1, 28, 28), [0.0], r"expected labels int64 \[1\], got torch.float32 \[1\]"),
        ((1, 28, 28), [0], r"expected images uint8 \[N, 1, 28, 28\], got torch.uint8 \[1, 28,"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_bad_digits(part, images, labels, message):
    good = torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 9])
    bad = torch.zeros(images, dtype=torch.uint8), torch.tensor(labels)
    parts = (*bad, *good) if part == "train" else (*good, *bad)
    with pytest.raises(ValueError, match=message):
        data.Digits(*parts, source="")


def test_digits_are_uint8():
    floats = torch.zeros(1, 1, 28, 28), torch.tensor([0])
    with pytest.raises(ValueError, match=r"expected images uint8 .* got torch.float32"):
        data.Digits(*floats, *floats, source="")


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


def test_the_statistics_are_those_of_digits(embedded):
    """The 5,000 are a sample of the 60,000: their statistics differ by less than 0.002."""
    pixels = torch.cat([embedded.train_images, embedded.test_images]).double() / 255
    assert pixels.mean().item() == pytest.approx(data.MEAN, abs=0.002)
    assert pixels.std().item() == pytest.approx(data.STD, abs=0.002)


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
    for size in (5, 0, -1):
        words = f"expected a batch size from 1 to the 3 samples, got {size}"
        with pytest.raises(ValueError, match=words):
            next(data.batches(torch.ones(3), size=size, seed=0))
    with pytest.raises(ValueError, match="expected a batch number start >= 0, got -1"):
        next(data.batches(torch.ones(3), size=1, seed=0, start=-1))


def test_a_transform_must_keep_its_rows():
    x = torch.arange(6)
    with pytest.raises(ValueError, match="expected a transform that keeps 3 rows, got 2"):
        take(1, x, size=3, seed=0, transform=lambda t, generator: t[1:])


def test_a_transform_does_not_repeat_the_draws_of_the_order():
    """Batch 0 of epoch 0: both generators come from (seed, 0), and must differ all the same."""

    def permutation(t, generator):
        return torch.randperm(len(t), generator=generator)

    x = torch.arange(1000)
    for seed in range(3):
        ((drawn, order),) = take(1, x, x, size=1000, seed=seed, transform=permutation)
        assert not torch.equal(drawn, order)


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


def test_buckets_mix_their_samples_anew_in_each_epoch():
    """Lengths are equal, so only the first shuffle decides who shares a batch."""
    sampler = buckets([5] * 40, 4, 2)
    first, second = ({frozenset(b) for b in sampler} for _ in range(2))
    assert first != second
    assert first != {frozenset(range(k, k + 4)) for k in range(0, 40, 4)}


def test_buckets_do_not_go_from_short_to_long():
    """One pool: batch contents are fixed by the lengths, only the second shuffle orders them."""
    sampler = buckets([*range(40)], 4, 10)
    first, second = ([min(b) for b in sampler] for _ in range(2))
    assert sorted(first) == sorted(second) == [*range(0, 40, 4)]
    assert first != second and first != sorted(first)


@pytest.mark.parametrize(("size", "pool"), [(0, 1), (1, 0)])
def test_bad_buckets(size, pool):
    with pytest.raises(ValueError, match=f"size and pool of at least 1, got {size} and {pool}"):
        buckets([1], size, pool)


@pytest.fixture
def bench(monkeypatch, load_benchmark):
    module = load_benchmark("data")
    monkeypatch.setattr(module, "REPEATS", 3)
    yield module
    torch.set_num_threads(os.cpu_count() or 1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_benchmark_runs(bench, monkeypatch):
    monkeypatch.setattr(bench, "WORKERS", (0,))
    monkeypatch.setattr(bench, "BATCH", 2)
    monkeypatch.setattr(bench, "STEP", 0.001)
    monkeypatch.setattr(bench, "batches", lambda workers: 4)
    record = bench.measure(torch.device("cpu"))
    assert record.name == "data" and set(record.units) == set(bench.UNITS)
    assert [r["samples"] for r in record.rows] == ["light", "heavy", "remote", "heavy + cpu"]
    cost = bench.cost_of(bench.kinds(8)["remote"], 0.001, 0.0)
    assert 0.005 < cost.wait <= cost.inline and cost.load > 0.005 and cost.handover > 0
    for r in [*record.rows, bench.row("x", bench.kinds(8)["light"], 1, cost, 2)]:
        assert 0 <= r["predicted"] < 1 and 0 <= r["stall"][0] and r["images"][0] > 0


def test_the_benchmarks_samples(bench):
    kinds = bench.kinds(3)
    assert kinds["light"][0].shape == (3, 32, 32) and kinds["light"][0].dtype == torch.float32
    torch.manual_seed(0)
    first, second = kinds["heavy"][0], kinds["heavy"][0]
    assert first.shape == (3, 128, 128) and 0 <= first.min() and first.max() <= 1
    assert not torch.equal(first, second)  # augmented anew each time
    assert bench.photo() == bench.photo() != bench.photo(1)


def test_the_benchmarks_ways_to_copy(bench):
    batches = [[torch.arange(3)], [torch.arange(2)]]
    got = bench.to_device(batches, torch.device("cpu"), non_blocking=True)
    assert [t[0].tolist() for t in got] == [[0, 1, 2], [0, 1]]
    rows = bench.copies(torch.device("cpu"), shape=(2, 3), n=4)
    assert [r["samples"][6:] for r in rows][0::3] == ["pageable", "pinned, side stream"]
    assert all(set(bench.COPY_UNITS) == set(r) and 0 <= r["overlap"] <= 1 for r in rows)


def test_copies_and_steps_are_timed_by_one_clock(bench, monkeypatch):
    options = []

    def time_ms(call, device, **chosen):
        options.append(chosen)
        return bench.timing.Quantiles(1.0, 1.0, 1.0)

    monkeypatch.setattr(bench.timing, "time_ms", time_ms)
    bench.copies(torch.device("cpu"), shape=(2, 3), n=4)
    assert options == [{"by_host": True}] * 3  # copy, product, compute; a step is the host's time


@pytest.mark.parametrize(
    "step, hidden", [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (9.0, 0.0), (1.0, 1.0)]
)
def test_overlap(bench, step, hidden):
    assert bench.overlap(step, copy=1.0, compute=2.0) == hidden


@pytest.mark.gpu
def test_the_benchmarks_copies_on_cuda(bench):
    record = bench.measure(torch.device("cuda"))
    by_way = {r["samples"][6:]: r["overlap"] for r in record.rows}
    assert by_way["pinned, side stream"] > by_way["pinned"]


def test_each_batch_of_an_epoch_is_augmented_by_draws_of_its_own():
    def draw(x, generator):
        return torch.rand(len(x), generator=generator)

    feed = data.batches(torch.arange(8), size=2, seed=0, transform=draw)
    drawn = [next(feed)[0] for _ in range(4)]  # one epoch
    assert len({tuple(one.tolist()) for one in drawn}) == 4
