import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from helpers import environment


class Noise(Dataset):
    """Each sample draws from all three generators, as careless augmentation code does."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def test_pick_device_takes_the_named_one_and_says_so(capsys):
    assert environment.pick_device("cpu") == torch.device("cpu")
    assert capsys.readouterr().out == "device: cpu\n"


def test_pick_device_chooses_what_is_there(capsys):
    device = environment.pick_device()
    torch.ones(1, device=device).add_(1)  # usable, not just named
    assert capsys.readouterr().out == f"device: {device.type} (chosen automatically)\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_pick_device_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="device 'cuda' asked for, but this machine offers"):
        environment.pick_device("cuda")


def test_seed_everything_repeats_all_generators():
    def draw():
        environment.seed_everything(7)
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    first, second = draw(), draw()
    assert first == second
    environment.seed_everything(8)
    assert random.random() != first[0]


def test_seed_everything_refuses_nondeterministic_operations():
    environment.seed_everything(0)
    assert torch.are_deterministic_algorithms_enabled()
    environment.seed_everything(0, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=f"got {seed}"):
        environment.seed_everything(seed)


def test_cublas_workspace_cannot_be_set_too_late(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG must be set before CUDA"):
        environment.seed_everything(0)


def test_workers_draw_different_numbers_that_repeat():
    def epoch():
        generator = environment.seed_everything(3)
        loader = DataLoader(
            Noise(),
            batch_size=4,
            num_workers=2,
            generator=generator,
            worker_init_fn=environment.seed_worker,
        )
        return torch.cat(list(loader))

    first = epoch()
    assert torch.equal(first, epoch())
    assert first.unique().numel() == first.numel()  # no worker repeats another


def test_versions_name_chip_and_torch():
    info = environment.versions(torch.device("cpu"))
    assert info["torch"] == torch.__version__
    assert info["device"] and info["threads"] == str(torch.get_num_threads())
    assert all(isinstance(v, str) for v in info.values())


def test_device_name_without_proc(monkeypatch):
    def missing(*_args):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert environment.device_name(torch.device("cpu"))


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, time; t = time.perf_counter(); import helpers;"
        "assert time.perf_counter() - t < 0.05; assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
