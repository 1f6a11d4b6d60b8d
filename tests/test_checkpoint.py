import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers import checkpoint


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


def test_a_leftover_partial_file_is_overwritten(tmp_path):
    path = tmp_path / "c.pt"
    (tmp_path / "c.pt.partial").write_bytes(b"half a file")
    checkpoint.save_atomic({"a": 1}, path)
    assert os.listdir(tmp_path) == ["c.pt"]


def test_malicious_checkpoint_is_refused_and_does_not_run(tmp_path):
    path, proof = tmp_path / "evil.pt", tmp_path / "executed"
    torch.save({"model": Payload(f"touch {proof}")}, path)
    with pytest.raises(ValueError, match="evil.pt is not a readable checkpoint: Weights only load"):
        checkpoint.load(path, expected={"model"})
    assert not proof.exists()
    torch.load(path, weights_only=False)  # the payload is real: the unsafe way does run it
    assert proof.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 broken"])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "c.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="c.pt is not a readable checkpoint"):
        checkpoint.load(path, expected={"a"})


def test_truncated_file(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save_atomic({"a": torch.randn(1000)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="c.pt is not a readable checkpoint"):
        checkpoint.load(path, expected={"a"})


def test_missing_file_is_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.pt", expected=set())


@pytest.mark.parametrize("content", [{"model": 1}, {"a": 1, "b": 2}, [1, 2]])
def test_another_kind_of_file(tmp_path, content):
    path = tmp_path / "c.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match="not a checkpoint of this kind: expected {'a'}, got"):
        checkpoint.load(path, expected={"a"})


def test_shapes_are_compared_by_name():
    here = {"w": torch.zeros(2, 3), "only_here": torch.zeros(1), "note": "not a tensor"}
    there = {"w": torch.zeros(2, 4), "only_there": torch.zeros(5)}
    with pytest.raises(ValueError) as error:
        checkpoint.require_same_shapes("f.pt", here, there)
    assert str(error.value) == (
        "f.pt holds another model; only_here: expected [1], got None; "
        "only_there: expected None, got [5]; w: expected [2, 3], got [2, 4]"
    )
    checkpoint.require_same_shapes("f.pt", here, dict(here))


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
        checkpoint.set_rng_state(state, torch.device("cuda"))


def test_killed_between_write_and_rename(tmp_path):
    """The one moment the random kills may miss: the new file is whole, but has no name yet."""
    code = (
        "import os, signal, sys, torch; from helpers import checkpoint\n"
        "checkpoint.save_atomic({'a': 1}, sys.argv[1])\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save_atomic({'a': 2}, sys.argv[1])\n"
    )
    path = tmp_path / "c.pt"
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.load(path, expected={"a"}) == {"a": 1}
