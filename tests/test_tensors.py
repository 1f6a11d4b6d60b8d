import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import tensors, timing

CPU = torch.device("cpu")


# storage and strides


def base():
    return torch.arange(24).view(2, 3, 4)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(6, 4),
        lambda x: x[1:],
        lambda x: x[:, 1, ::2],
        lambda x: x.permute(2, 0, 1),
        lambda x: x.diagonal(dim1=1, dim2=2),
        lambda x: x[..., :1].expand(2, 3, 5),
        lambda x: x.unfold(2, 2, 1),
        lambda x: x.detach(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.from_numpy(x[1:].numpy()),
        lambda x: torch.from_dlpack(x[1:]),
    ],
)
def test_views_share_storage_and_a_write_shows(view):
    x = base()
    y = view(x)
    assert tensors.shares_storage(x, y) and tensors.shares_storage(y, x)
    before = x.sum()
    x += 1
    assert torch.equal(y, view(base() + 1)) and x.sum() == before + 24


@pytest.mark.parametrize(
    "copy",
    [torch.clone, lambda x: x + 0, lambda x: x[[0, 1]], lambda x: x.mT.contiguous(), torch.flatten],
    ids=["clone", "add", "index", "contiguous", "flatten of a transpose"],
)
def test_copies_do_not_share(copy):
    x = base().transpose(0, 2)  # not contiguous
    assert not tensors.shares_storage(x, copy(x))


def test_empty_tensors_share_nothing():
    assert not tensors.shares_storage(torch.empty(0), torch.empty(0))
    empty = torch.empty(0, 3)
    assert not tensors.shares_storage(empty, empty.view(3, 0))


def test_neighbors_in_memory_do_not_share():
    """Two storages, one right behind the other: the end of the first is not part of it."""
    memory = np.arange(12)
    left, right = torch.from_numpy(memory[:6]), torch.from_numpy(memory[6:])
    assert not tensors.shares_storage(left, right) and not tensors.shares_storage(right, left)
    middle = torch.from_numpy(memory[5:7])
    assert tensors.shares_storage(left, middle) and tensors.shares_storage(right, middle)


def test_meta_tensors_share_nothing():
    one = torch.empty(3, device="meta")
    assert not tensors.shares_storage(one, torch.empty(3, device="meta"))


def test_a_storage_has_one_number_for_all_its_views():
    x = base()
    views = [x[1:], x.mT, x.detach(), x.view(6, 4)[:, 0]]
    assert {tensors.storage_id(view) for view in views} == {tensors.storage_id(x)}
    assert tensors.storage_id(x.clone()) != tensors.storage_id(x)
    around = torch.from_numpy(x.numpy())  # a storage of its own, over the same memory
    assert tensors.storage_id(around) != tensors.storage_id(x)


def test_storages_without_data_have_different_numbers():
    with FakeTensorMode():
        fake = [torch.zeros(3), torch.zeros(3)]
    meta = [torch.empty(3, device="meta"), torch.empty(3, device="meta")]
    some = [torch.empty(0), torch.empty(0), *meta, *fake]
    assert len({tensors.storage_id(x) for x in some}) == len(some)


def test_a_sparse_tensor_has_no_storage_of_its_own():
    with pytest.raises(NotImplementedError, match="Cannot access storage"):
        tensors.storage_id(torch.eye(2).to_sparse())


@given(st.integers(0, 2**32 - 1))
def test_element_offset_finds_every_element(seed):
    rng = np.random.default_rng(seed)
    x = torch.arange(120).view(2, 3, 4, 5).permute(*rng.permutation(4).tolist())
    x = x[tuple(slice(int(rng.integers(0, size)), None, 2) for size in x.shape)]
    memory = torch.arange(120)  # the storage of x, in order
    for index in np.ndindex(*x.shape):
        at = tensors.element_offset(index, x.stride(), x.storage_offset())
        assert memory[at] == x[index]


def test_element_offset_of_a_scalar_and_with_a_wrong_index():
    assert tensors.element_offset((), (), 7) == 7
    with pytest.raises(ValueError, match=r"expected 2 indices, one for each stride, got \[1\]"):
        tensors.element_offset([1], (4, 1))


# the benchmark


@pytest.fixture
def bench(load_benchmark):
    return load_benchmark("tensors")


def test_the_benchmark_returns_a_record(bench):
    record = bench.measure(CPU, sizes=(4, 8), repeats=3)
    assert record.name == "tensors" and record.column("n") == [4, 8]
    assert set(record.units) == {"n", "cpu_first", "cpu"}
    assert all(row["cpu_first"] > 0 and row["cpu"][0] > 0 for row in record.rows)


def test_cpu_and_accelerator_are_timed_by_one_clock(bench, monkeypatch):
    """A kernel's own time holds no launch: beside the host's time of a CPU it would look better."""
    options = []

    def time_ms(call, device, repeats, **chosen):
        options.append(chosen)
        return timing.Quantiles(1.0, 1.0, 1.0)

    monkeypatch.setattr(bench.timing, "time_ms", time_ms)
    monkeypatch.setattr(bench.timing, "wait_for", lambda device: None)
    bench._on_accelerator(torch.ones(2, 2), torch.ones(2, 2), torch.device("meta"), 3)
    assert options == [{"by_host": True}] * 2


@pytest.mark.gpu
def test_the_benchmark_on_a_gpu(bench):
    record = bench.measure(torch.device("cuda"), sizes=(64, 2048), repeats=5)
    small, large = record.rows
    assert large["gpu"][1] < large["cpu"][1]
    assert large["gpu_launch"][1] < large["gpu"][1] < large["gpu_copies"][1]
    assert small["gpu_first"] > small["gpu"][1]
