import datetime
import os
import random
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.cpp_extension import CUDA_GCC_VERSIONS
from torch.utils.data import ConcatDataset, DataLoader, Subset

from helpers import environment

ROOT = Path(__file__).resolve().parents[1]


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


def test_the_generator_for_a_loader_follows_the_seed():
    assert environment.seed_everything(7).initial_seed() == 7
    seeds = (1, 1, 2)
    first, second, other = (torch.rand(3, generator=environment.seed_everything(s)) for s in seeds)
    assert first.equal(second) and not first.equal(other)


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


def noise(rng, *, wrap=lambda data: data, init=environment.seed_worker, seed=3):
    """What eight samples get in two epochs with two workers: [2, 8, 1]."""
    data = environment.Noisy(torch.zeros(8, 1), torch.arange(8), rng)
    how = {"num_workers": 2, "worker_init_fn": init, "batch_size": 2}
    loader = DataLoader(wrap(data), generator=torch.Generator().manual_seed(seed), **how)
    return torch.stack([torch.cat([x for x, _ in loader]) for _ in range(2)])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, range(8))], ids=["bare", "subset"]
)
def test_workers_draw_different_numbers_that_repeat(own, wrap):
    def make():
        return np.random.default_rng(0) if own else None

    first = noise(make(), wrap=wrap)
    assert torch.equal(first, noise(make(), wrap=wrap))
    assert first.unique().numel() == first.numel()  # no worker and no epoch repeats another
    assert not torch.equal(first, noise(make(), wrap=wrap, seed=4))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_without_the_init_function_workers_and_epochs_repeat():
    drawn = noise(np.random.default_rng(0), init=None)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0, :2], drawn[0, 2:4])  # batches 0 and 1: two workers


def test_reseeding_leaves_other_datasets_alone():
    plain = torch.utils.data.TensorDataset(torch.zeros(4, 1))
    loader = DataLoader(plain, num_workers=1, worker_init_fn=environment.seed_worker)
    assert len(list(loader)) == 4
    parts = [environment.Noisy(torch.zeros(2, 1), torch.arange(2)) for _ in range(2)]
    joined = DataLoader(ConcatDataset(parts), num_workers=1, worker_init_fn=environment.seed_worker)
    assert len(list(joined)) == 4


def test_only_a_generator_is_replaced(monkeypatch):
    plain = torch.utils.data.TensorDataset(torch.zeros(4, 1))
    without = environment.Noisy(torch.zeros(2, 1), torch.arange(2))
    for dataset in (plain, without):
        info = SimpleNamespace(dataset=Subset(dataset, [0]), seed=1)
        monkeypatch.setattr(environment, "get_worker_info", lambda info=info: info)
        environment.seed_worker(0)
    assert not hasattr(plain, "rng")
    assert without.rng is None


@pytest.mark.parametrize("shape", [(3,), (3, 2), (0, 2), (3, 1, 2)])
def test_noisy_adds_fresh_noise_to_a_sample(shape):
    x = torch.arange(float(np.prod(shape)), dtype=torch.float64).view(shape)
    data = environment.Noisy(x, torch.arange(len(x)), np.random.default_rng(0))
    rng = np.random.default_rng(0)
    assert len(data) == len(x)
    for i in range(len(x)):
        sample, label = data[i]
        assert sample.shape == x.shape[1:] and sample.dtype == torch.float64
        assert torch.equal(sample, x[i] + torch.as_tensor(rng.normal(size=x.shape[1:])))
        assert label == i


def test_versions_name_chip_and_torch():
    info = environment.versions(torch.device("cpu"))
    assert info["torch"] == torch.__version__
    assert info["device"] and info["threads"] == str(torch.get_num_threads())
    assert all(isinstance(v, str) for v in info.values())


def test_device_name_without_proc(monkeypatch):
    monkeypatch.setattr(environment.platform, "system", lambda: "Darwin")
    assert environment.device_name(torch.device("cpu"))


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("450.51.05", None),
        ("520.61.05", "11.8"),
        ("535.113.01", "12.2"),
        ("565.57", "12.6"),
        ("580.65.06", "13.0"),
        ("610.43.02", "13.3"),
        ("999", "13.3"),
    ],
)
def test_newest_cuda_of_a_driver(driver, cuda):
    assert environment.newest_cuda(driver) == cuda


def test_newer_cuda_came_with_newer_drivers():
    versions = [tuple(map(int, cuda.split("."))) for cuda in environment.TOOLKIT_DRIVER]
    branches = list(environment.TOOLKIT_DRIVER.values())
    assert versions == sorted(set(versions)) and branches == sorted(set(branches))
    assert {major for major, _ in versions} == set(environment.OLDEST_DRIVER)


@given(st.sampled_from(sorted(environment.TOOLKIT_DRIVER)), st.integers(300, 900))
def test_a_driver_starts_what_it_came_with_and_anything_older(cuda, branch):
    if branch >= environment.TOOLKIT_DRIVER[cuda]:
        assert environment.driver_starts(f"{branch}.1", cuda)
    shown = environment.newest_cuda(f"{branch}.1")
    if shown is not None:
        major = int(shown.split(".")[0])
        assert environment.driver_starts(f"{branch}.1", cuda) == (int(cuda.split(".")[0]) <= major)


@pytest.mark.parametrize(("major", "branch"), environment.OLDEST_DRIVER.items())
def test_the_oldest_driver_starts_its_cuda_and_the_one_before_does_not(major, branch):
    assert environment.driver_starts(f"{branch}.00", f"{major}.9")
    assert not environment.driver_starts(f"{branch - 1}.99", f"{major}.0")


def test_the_table_says_where_it_comes_from_and_lies_in_the_package():
    path = resources.files("helpers") / "cuda.yml"
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(table["checked"], datetime.date)
    for part in ("toolkit_driver", "oldest_driver"):
        assert table[part]["source"].startswith("https://docs.nvidia.com/")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "*.yml" in pyproject["tool"]["setuptools"]["package-data"]["helpers"]


def test_cuda_of_an_unknown_major_version():
    with pytest.raises(ValueError, match=r"expected CUDA with a major version in .*, got 9.2"):
        environment.driver_starts("580.65.06", "9.2")


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="the chapter quotes PyTorch 2.15")
def test_the_chapter_quotes_gcc_as_pytorch_has_it():
    for cuda, last in {"12.1": 12, "12.4": 13, "12.6": 13, "12.8": 14, "13.0": 15}.items():
        first, beyond = CUDA_GCC_VERSIONS[cuda]
        assert (first[0], beyond[0] - 1) == (6, last)


def test_report_on_this_machine():
    info = environment.report()
    assert info["torch"] == torch.__version__ and int(info["cores"]) >= 1
    assert all(isinstance(v, str) and v for v in info.values())


CARD = SimpleNamespace(name="Card", total_memory=24 * 2**30)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_report_names_every_card(monkeypatch, kind):
    for name in ("cuda", "xpu"):
        module, cards = getattr(torch, name), 2 * (name == kind)
        monkeypatch.setattr(module, "device_count", lambda cards=cards: cards)
        monkeypatch.setattr(module, "get_device_properties", lambda _: CARD)
    assert environment.report()["accelerators"] == "Card, 24.0 GiB; Card, 24.0 GiB"


def test_report_on_a_mac(monkeypatch):
    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(kind, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 2**30)
    assert environment.report()["accelerators"] == "Apple GPU, 12.0 GiB to use"


def test_report_of_a_cpu_only_build(monkeypatch):
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, None)
    monkeypatch.setattr(torch.__config__, "show", lambda: "PyTorch built with: nothing")
    monkeypatch.setattr(environment, "_driver", lambda: None)
    info = environment.report()
    assert (info["built for"], info["blas"], info["driver"]) == ("CPU", "none", "none")


@pytest.mark.parametrize(("code", "driver"), [(0, "580.65.06"), (9, None)])
def test_the_driver_is_what_nvidia_smi_says_if_it_can(monkeypatch, code, driver):
    answer = subprocess.CompletedProcess([], code, stdout="580.65.06\n580.65.06\n")
    monkeypatch.setattr(environment.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert environment._driver() == driver


def test_no_driver_without_nvidia_smi(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert environment._driver() is None


def test_versions_on_cuda_name_the_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    monkeypatch.setattr(environment, "_driver", lambda: "580.65.06")
    info = environment.versions(torch.device("cuda"))
    assert info["device"] == "Card" and info["driver"] == "580.65.06"


def test_seeding_before_cuda_fixes_the_workspace(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # off only if it is turned off
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    environment.seed_everything(0)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, time; t = time.perf_counter(); import helpers;"
        "assert time.perf_counter() - t < 0.05; assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
