import errno
import io
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import time
import traceback
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import checkpoint
from tests import training_job


class Payload:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_round_trip_and_no_leftovers(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save_atomic({"a": torch.arange(5), "b": [1, "two", None]}, path)
    state = checkpoint.load(path, expected={"a", "b"})
    assert torch.equal(state["a"], torch.arange(5)) and state["b"] == [1, "two", None]
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save_atomic({"a": 1}, path)
    with pytest.raises(AttributeError):
        checkpoint.save_atomic({"a": lambda: None}, path)  # cannot be pickled
    assert checkpoint.load(path, expected={"a"}) == {"a": 1}


# --- partial files --------------------------------------------------------------------------------


def dead_writer(path, moment):
    """Let another process save to `path`, and die by SIGKILL inside `moment`, say "os.fsync"."""
    code = (
        "import os, signal, sys, torch; from helpers import checkpoint\n"
        f"{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save_atomic({'a': torch.ones(100_000)}, sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL


def test_what_dead_writers_leave_is_removed_by_the_next_save(tmp_path):
    path = tmp_path / "c.pt"
    dead_writer(path, "os.fsync")
    dead_writer(path, "os.replace")  # removes the first one's
    assert len(list(tmp_path.glob("c.pt.*.partial"))) == 1
    checkpoint.save_atomic({"a": 1}, path)
    assert os.listdir(tmp_path) == ["c.pt"]


@pytest.mark.parametrize("name", ["c.pt", "c[1].pt"])
def test_what_dead_writers_leave_is_removed_when_the_path_is_checked(tmp_path, name):
    dead_writer(tmp_path / name, "os.fsync")
    checkpoint.require_writable(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_living_writers_file_and_foreign_files_stay(tmp_path):
    path = tmp_path / "c.pt"
    foreign = [tmp_path / "c.pt.partial", tmp_path / "c.pt.notahexa.partial", tmp_path / "d.pt"]
    for file in foreign:
        file.write_bytes(b"somebody else's")
    with checkpoint._partial_file(path) as file:
        checkpoint.save_atomic({"a": 1}, path)  # another writer, meanwhile
        assert os.path.exists(file.name)
    assert sorted(tmp_path.iterdir()) == sorted([path, *foreign])


def test_a_file_taken_for_a_dead_writers_is_made_anew(tmp_path, monkeypatch):
    """Between making a file and locking it, another process may think that its writer is dead."""
    lock, made = checkpoint._lock, []

    def late(file, *, wait):
        made.append(file.name)
        if len(made) == 1:
            os.unlink(file.name)
        return lock(file, wait=wait)

    monkeypatch.setattr(checkpoint, "_lock", late)
    checkpoint.save_atomic({"a": 1}, tmp_path / "c.pt")
    assert len(made) == 2 and os.listdir(tmp_path) == ["c.pt"]
    assert checkpoint.load(tmp_path / "c.pt", expected={"a"}) == {"a": 1}


def test_without_locks_saving_works_and_nothing_is_removed(tmp_path, monkeypatch):
    dead_writer(tmp_path / "c.pt", "os.fsync")

    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(checkpoint.fcntl, "flock", unsupported)
    checkpoint.save_atomic({"a": 1}, tmp_path / "c.pt")
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_an_interrupted_save_leaves_the_old_file_alone(tmp_path, monkeypatch, moment):
    path = tmp_path / "c.pt"
    checkpoint.save_atomic({"a": 1}, path)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_atomic({"a": 2}, path)
    assert os.listdir(tmp_path) == ["c.pt"]
    assert checkpoint.load(path, expected={"a"}) == {"a": 1}


def write_for_ever(path, number):
    """Save states of one number, again and again, until killed; importable for forkserver."""
    torch.set_num_threads(1)
    while True:
        checkpoint.save_atomic({"a": torch.full((50_000,), number), "b": [number] * 100}, path)


def two_writers(path, kills, seed):
    """Kill one of two writers of one path, again and again; count the good files read meanwhile."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_checkpoint"])
    rng, reads = random.Random(seed), 0

    def start(number):
        process = context.Process(target=write_for_ever, args=(path, number), daemon=True)
        process.start()
        return process

    writers = [start(1.0), start(2.0)]
    while not path.exists():
        time.sleep(0.01)
    for kill in range(kills):
        end = time.monotonic() + rng.uniform(0, 0.1)
        while time.monotonic() < end:
            state = checkpoint.load(path, expected={"a", "b"})
            assert len({*state["a"].tolist(), *state["b"]}) == 1  # never a mixture
            reads += 1
        victim = kill % 2
        writers[victim].kill()
        writers[victim].join()
        if kill % 3 == 0:  # sometimes both are dead
            writers[1 - victim].kill()
            writers[1 - victim].join()
            checkpoint.load(path, expected={"a", "b"})
            writers[1 - victim] = start(2.0 - victim)
        writers[victim] = start(1.0 + victim)
    for process in writers:
        process.kill()
        process.join()
    checkpoint.save_atomic({"a": torch.ones(1), "b": [1]}, path)
    assert os.listdir(path.parent) == [path.name]
    return reads


def test_two_writers_never_mix(tmp_path):
    assert two_writers(tmp_path / "c.pt", kills=8, seed=0)


@pytest.mark.slow
def test_two_writers_killed_fifty_times(tmp_path):
    assert two_writers(tmp_path / "c.pt", kills=50, seed=1) > 50


# --- the order of the steps -----------------------------------------------------------------------


def is_folder(handle):
    return stat.S_ISDIR(os.fstat(handle).st_mode)


def test_the_data_is_on_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    """Flush, fsync, rename, fsync of the folder: seen as a power cut would see them."""
    path, events = tmp_path / "c.pt", []
    fsync, replace = os.fsync, os.replace

    def log_fsync(handle):
        parts = list(tmp_path.glob("*.partial"))
        events.append(("fsync", is_folder(handle), [zipfile.is_zipfile(part) for part in parts]))
        fsync(handle)

    def log_replace(a, b):
        events.append(("replace", Path(a).suffix, Path(b).name))
        replace(a, b)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    checkpoint.save_atomic({"a": torch.arange(5)}, path)
    assert events == [
        ("fsync", False, [True]),  # all of it is in the file: it was flushed
        ("replace", ".partial", "c.pt"),
        ("fsync", True, []),
    ]


def test_killed_between_write_and_rename(tmp_path):
    """The one moment the random kills may miss: the new file is whole, but has no name yet."""
    path = tmp_path / "c.pt"
    checkpoint.save_atomic({"a": 1}, path)
    dead_writer(path, "os.replace")
    assert checkpoint.load(path, expected={"a"}) == {"a": 1}


def folder_fsync_fails(monkeypatch, number):
    fsync = os.fsync

    def fails(handle):
        if is_folder(handle):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails)


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    folder_fsync_fails(monkeypatch, errno.EINVAL)
    checkpoint.save_atomic({"a": 1}, tmp_path / "c.pt")
    assert checkpoint.load(tmp_path / "c.pt", expected={"a"}) == {"a": 1}


def test_any_other_error_of_the_folder_is_told(tmp_path, monkeypatch):
    folder_fsync_fails(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="cannot save .*c.pt"):
        checkpoint.save_atomic({"a": 1}, tmp_path / "c.pt")


# --- paths ----------------------------------------------------------------------------------------


class FullDisk:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, chunk):
        self.room -= len(bytes(chunk))
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(chunk)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@pytest.mark.parametrize("room", [0, 1000, 100_000])
def test_a_full_disk_is_named_and_nothing_is_left_on_it(tmp_path, monkeypatch, room):
    path = tmp_path / "c.pt"
    checkpoint.save_atomic({"a": 1}, path)
    full = lambda path, mode: FullDisk(Path(path).open(mode), room)  # noqa: E731
    monkeypatch.setattr(checkpoint, "open", full, raising=False)
    message = "No space left on device; cannot save .*c.pt to the disk at /.* MiB free there"
    with pytest.raises(OSError, match=message) as error:
        checkpoint.save_atomic({"a": torch.zeros(100_000)}, path)
    assert error.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["c.pt"]
    assert checkpoint.load(path, expected={"a"}) == {"a": 1}


def test_a_file_size_limit_is_named(tmp_path):
    code = (
        "import resource, signal, sys, torch; from helpers import checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "checkpoint.save_atomic({'a': torch.ones(100_000)}, sys.argv[1])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large; cannot save" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_link_leads_to_its_target_and_stays(tmp_path):
    (tmp_path / "big disk").mkdir()
    link, target = tmp_path / "c.pt", tmp_path / "big disk" / "c.pt"
    link.symlink_to(target)
    for n in range(2):  # the target need not be there
        checkpoint.save_atomic({"a": n}, link)
        assert link.is_symlink() and checkpoint.load(target, expected={"a"}) == {"a": n}
    assert os.listdir(target.parent) == ["c.pt"]


def test_the_file_mode_stays_and_a_new_file_follows_the_umask(tmp_path):
    path = tmp_path / "c.pt"
    old = os.umask(0o027)
    try:
        checkpoint.save_atomic({"a": 1}, path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o600)
    checkpoint.save_atomic({"a": 1}, path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_regular_file_is_not_replaced(tmp_path, make):
    make(tmp_path / "c.pt")
    for call in (checkpoint.require_writable, lambda path: checkpoint.save_atomic({}, path)):
        with pytest.raises(ValueError, match="c.pt is not a regular file"):
            call(tmp_path / "c.pt")
    with pytest.raises(ValueError, match="null is not a regular file"):
        checkpoint.require_writable("/dev/null")


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint.require_writable("~/new/c.pt")
    checkpoint.save_atomic({"a": 1}, "~/new/c.pt")
    assert checkpoint.load("~/new/c.pt", expected={"a"}) == {"a": 1}
    assert (tmp_path / "new" / "c.pt").exists()


@pytest.mark.parametrize("name", ["a" * 250, "检" * 83, "a b\nc", "-rf", "c.[0-9]*"])
def test_any_name_of_a_file_will_do(tmp_path, name):
    for n in range(2):
        checkpoint.save_atomic({"a": n}, tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_cannot_be_written_is_known_at_once(tmp_path, monkeypatch):
    def read_only(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(checkpoint, "open", read_only, raising=False)
    with pytest.raises(PermissionError, match="Permission denied: .*c.pt"):
        checkpoint.require_writable(tmp_path / "c.pt")


# --- damaged and foreign files --------------------------------------------------------------------


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    path = tmp_path / "c.pt"
    message = r"c.pt could not be loaded again: expected tensors .* needs numpy.*scalar"
    with pytest.raises(ValueError, match=message):
        checkpoint.save_atomic({"lr": np.float64(0.1)}, path)
    assert os.listdir(tmp_path) == []


def test_malicious_checkpoint_is_refused_and_does_not_run(tmp_path):
    path, proof = tmp_path / "evil.pt", tmp_path / "executed"
    torch.save({"model": Payload(f"touch {proof}")}, path)
    message = "evil.pt is not a readable checkpoint: expected tensors and plain .* needs posix"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path, expected={"model"})
    assert not proof.exists()
    torch.load(path, weights_only=False)  # the payload is real: the unsafe way does run it
    assert proof.exists()


def test_the_message_neither_colours_nor_recommends_the_unsafe_way(tmp_path):
    path = tmp_path / "c.pt"
    torch.save({"a": torch.nn.Linear(1, 1)}, path)
    with pytest.raises(ValueError, match="needs torch.nn.modules.linear.Linear$") as error:
        checkpoint.load(path, expected={"a"})
    told = "".join(traceback.format_exception(error.value))
    assert "\x1b" not in told and "weights_only=False" not in told


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"hello", b"PK\x03\x04 broken"])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "c.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="c.pt is not a readable checkpoint: BadZipFile"):
        checkpoint.load(path, expected={"a"})


def test_another_programs_archive(tmp_path):
    np.savez(tmp_path / "c.pt.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="c.pt.npz is not a readable checkpoint"):
        checkpoint.load(tmp_path / "c.pt.npz", expected={"a"})


def sample(path):
    """A small file with all that a checkpoint of a Trainer holds."""
    trainer = training_job.make_trainer(torch.float16)
    trainer.train_step(training_job.batches_from(0))
    trainer.save(path)
    keys = set(torch.load(path, weights_only=True))
    return path.read_bytes(), keys, checkpoint.load(path, expected=keys)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def flip_bits(path, flips, seed):
    """Flip one bit, load, and count: refused, or harmless (in the archive's padding)."""
    good, keys, want = sample(path)
    rng, counts = random.Random(seed), {"refused": 0, "harmless": 0}
    for _ in range(flips):
        bad = bytearray(good)
        bad[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            got = checkpoint.load(path, expected=keys)
        except ValueError as error:
            assert str(path) in str(error) and "\x1b" not in str(error)
            counts["refused"] += 1
        else:
            assert equal(want, got)
            counts["harmless"] += 1
    return counts


def test_no_flipped_bit_loads_as_another_value(tmp_path):
    counts = flip_bits(tmp_path / "c.pt", flips=60, seed=0)
    assert counts["refused"] > counts["harmless"]


@pytest.mark.slow
def test_none_of_six_hundred_flipped_bits_loads_as_another_value(tmp_path):
    counts = flip_bits(tmp_path / "c.pt", flips=600, seed=1)
    assert counts["refused"] > counts["harmless"], counts


def test_a_record_marked_as_a_folder(tmp_path):
    """One bit in the archive's directory: torch then returns memory that nobody has written."""
    path = tmp_path / "c.pt"
    good, keys, _ = sample(path)
    entry, entries = good.find(b"PK\x01\x02"), 0
    while entry != -1:
        bad = bytearray(good)
        bad[entry + 38] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is damaged, its checksum or its entry is wrong"):
            checkpoint.load(path, expected=keys)
        entry, entries = good.find(b"PK\x01\x02", entry + 1), entries + 1
    assert entries == len(zipfile.ZipFile(io.BytesIO(good)).infolist())


def test_truncated_file(tmp_path):
    good, keys, _ = sample(tmp_path / "c.pt")
    for size in [*range(0, len(good), len(good) // 20), len(good) - 1]:
        (tmp_path / "c.pt").write_bytes(good[:size])
        with pytest.raises(ValueError, match="c.pt is not a readable checkpoint"):
            checkpoint.load(tmp_path / "c.pt", expected=keys)


def test_missing_file_is_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.pt", expected=set())


@pytest.mark.parametrize("content", [{"model": 1}, {"a": 1, "b": 2}, [1, 2]])
def test_another_kind_of_file(tmp_path, content):
    path = tmp_path / "c.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"not a checkpoint of this kind: expected \['a'\], got"):
        checkpoint.load(path, expected={"a"})


def test_shapes_and_dtypes_are_compared_by_name():
    here = {"w": torch.zeros(2, 3), "only_here": torch.zeros(1), "note": "not a tensor"}
    there = {"w": torch.zeros(2, 4), "only_there": torch.zeros(5, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="holds another model") as error:
        checkpoint.require_same_tensors("f.pt", here, there)
    assert str(error.value) == (
        "f.pt holds another model; only_here: expected [1] torch.float32, got None; "
        "only_there: expected None, got [5] torch.bfloat16; "
        "w: expected [2, 3] torch.float32, got [2, 4] torch.float32"
    )
    checkpoint.require_same_tensors("f.pt", here, dict(here))


# --- random state ---------------------------------------------------------------------------------


def test_rng_state_survives_a_safe_load(tmp_path):
    device = torch.device("cpu")
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # leaves a cached second Gaussian in the state
    checkpoint.save_atomic({"rng": checkpoint.rng_state(device)}, tmp_path / "c.pt")
    want = random.random(), np.random.randn(), torch.rand(2).tolist()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    state = checkpoint.load(tmp_path / "c.pt", expected={"rng"})
    checkpoint.set_rng_state(state["rng"], device)
    assert (random.random(), np.random.randn(), torch.rand(2).tolist()) == want


def test_rng_state_of_another_device():
    state = checkpoint.rng_state(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"\['cpu', 'numpy', 'python'\] cannot resume on 'cuda'"):
        checkpoint.require_rng_state("c.pt", state, torch.device("cuda"))


@pytest.mark.parametrize("part", ["python", "numpy", "cpu"])
@pytest.mark.parametrize("value", [None, (), [], torch.zeros(3, dtype=torch.uint8), "text"])
def test_random_state_that_no_generator_takes(part, value):
    device = torch.device("cpu")
    state = checkpoint.rng_state(device)
    before = checkpoint.rng_state(device)
    checkpoint.require_rng_state("c.pt", state, device)
    with pytest.raises(ValueError, match="c.pt: random state does not fit"):
        checkpoint.require_rng_state("c.pt", state | {part: value}, device)
    assert equal(checkpoint.rng_state(device), before)
