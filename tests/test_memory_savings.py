import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import memory_savings, models
from helpers.memory import PeakMemory, SavedTensors
from helpers.memory_savings import (
    Checkpointed,
    Offload,
    accumulate,
    in_groups,
    is_out_of_memory,
    largest_batch,
)

SIZES = models.GPTConfig(vocabulary=11, context=8, layers=4, heads=2, width=16)
PER_TOKEN = 4 * (16 * 16 + 4 + 2)  # bytes a block saves: 16 C, four statistics, one of each head


def gpt(**changes):
    torch.manual_seed(0)
    return models.GPT(SIZES if not changes else models.GPTConfig(**{**vars(SIZES), **changes}))


def tokens(count=3):
    return torch.randint(11, (count, 8), generator=torch.Generator().manual_seed(1))


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def step(model, batch):
    torch.manual_seed(5)  # for dropout
    model.zero_grad()
    model(batch).square().mean().backward()
    return gradients(model)


def saved_bytes(model, batch):
    with SavedTensors(exclude=[*model.parameters(), batch]) as saved:
        _out = model(batch)
    return saved.bytes


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


# ---- accumulation


def squares(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y).square().sum()


def samples(batch):
    return len(batch[0])


def line(count):
    """A line and integers small enough that no sum is rounded, however it is taken."""
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
        model.bias.zero_()
    x = torch.arange(3.0 * count).double().view(count, 3) % 7
    return model, x, torch.arange(float(count)).double()


@pytest.mark.parametrize("sizes", [[8], [4, 4], [3, 3, 2], [1, 7], [1] * 8])
def test_accumulation_is_exact_where_nothing_is_rounded(sizes):
    model, x, y = line(8)
    want = torch.autograd.grad((model(x).squeeze(1) - y).square().mean(), model.weight)[0]
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    loss = accumulate(model, parts, squares, samples)
    assert torch.equal(model.weight.grad, want)
    assert loss == (model(x).squeeze(1) - y).square().mean() and not loss.requires_grad


def test_accumulation_adds_to_what_is_there():
    model, x, y = line(2)
    accumulate(model, [(x, y)], squares, samples)
    once = model.weight.grad.clone()
    accumulate(model, [(x, y)], squares, samples)
    assert torch.equal(model.weight.grad, 2 * once)


def next_token(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


def valid(batch):
    return int((batch[1] != -100).sum())


def test_tokens_that_are_not_padding_have_equal_weights():
    model = gpt().double()
    inputs, targets = tokens(4), tokens(4).flip(0)
    for row, length in enumerate([8, 1, 0, 3]):
        targets[row, length:] = -100
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    want = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    parts = list(zip(inputs.split(1), targets.split(1), strict=True))  # one has nothing to learn
    loss = accumulate(model, parts, next_token, valid)
    assert loss.isfinite()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-13)


def test_each_micro_batch_is_freed_before_the_next():
    model, seen = gpt(), []

    def watched(model, batch):
        seen.append(saved.bytes)
        return next_token(model, batch)

    parts = [(tokens(1), tokens(1)) for _ in range(3)]
    with SavedTensors(exclude=model.parameters()) as saved:
        accumulate(model, parts, watched, valid)
    assert seen == [0, 0, 0]


def test_accumulation_needs_something_that_counts():
    model = gpt()
    for parts in ([], [(tokens(1), torch.full((1, 8), -100))]):
        with pytest.raises(ValueError, match="expected at least one item that counts"):
            accumulate(model, parts, next_token, valid)


def test_groups_keep_the_tail():
    assert list(in_groups(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(in_groups(range(6), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(in_groups([], 3)) == []
    with pytest.raises(ValueError, match="groups of at least 1 batch, got 0"):
        next(in_groups([1], 0))


# ---- checkpointing


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "choose",
    [
        lambda m: m.blocks,
        lambda m: m.blocks[::2],
        lambda m: [block.mlp for block in m.blocks],
        lambda m: [],
    ],
)
def test_gradients_are_the_same_bits(choose, dropout):
    model, batch = gpt(dropout=dropout), tokens()
    want = step(model, batch)
    with Checkpointed(choose(model)):
        assert_equal(step(model, batch), want)


def test_bytes_of_whole_blocks():
    model, batch = gpt(), tokens()
    count = batch.numel()
    plain = saved_bytes(model, batch)
    with Checkpointed(model.blocks[:3]):
        lean = saved_bytes(model, batch)
    inputs = 4 * 16  # of one block and token: all that is left
    assert plain - lean == count * 3 * (PER_TOKEN - inputs)


@pytest.mark.parametrize(
    ("layers", "ratio", "size", "peak"),
    [(16, 1, 4, 8), (16, 1, 1, 17), (16, 1, 16, 17), (8, 16, 1, 24), (8, 16, 3, 51)],
)
def test_peak_of_groups(layers, ratio, size, peak):
    assert memory_savings.group_peak(layers, ratio, size) == peak


@pytest.mark.parametrize("size", [0, 9])
def test_groups_are_not_larger_than_the_model(size):
    with pytest.raises(ValueError, match="expected a group of 1 to 8 blocks"):
        memory_savings.group_peak(8, 1, size)


def test_a_policy_keeps_what_it_names():
    model, batch = gpt(), tokens()
    want = step(model, batch)
    calls = []
    original = F.gelu

    def policy(context, operation, *args, **kwargs):
        if operation is torch.ops.aten.gelu.default:
            calls.append(context.is_recompute)
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    for choice in ([torch.ops.aten.addmm.default], policy):
        with Checkpointed(model.blocks, choice):
            assert_equal(step(model, batch), want)
    assert calls == [False] * 4 and F.gelu is original


def count_calls(model, batch, operation, **kwargs):
    """How often `operation` really runs in a step: recomputed ones count, kept ones do not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += function is operation
            return function(*args, **({} if kwargs is None else kwargs))

    with Count() as count, Checkpointed(model.blocks, **kwargs):
        step(model, batch)
    return count.calls


def test_only_what_the_policy_names_is_not_computed_twice():
    model, batch = gpt(), tokens()
    gelu, addmm = torch.ops.aten.gelu.default, torch.ops.aten.addmm.default
    assert count_calls(model, batch, gelu) == 8
    assert count_calls(model, batch, gelu, policy=[addmm]) == 8
    assert count_calls(model, batch, gelu, policy=[gelu]) == 4


def test_removing_restores_everything():
    model, batch = gpt(), tokens()
    before, names = saved_bytes(model, batch), list(model.state_dict())
    change = Checkpointed(model.blocks)
    assert saved_bytes(model, batch) < before
    assert list(model.state_dict()) == names
    change.remove()
    change.remove()
    assert saved_bytes(model, batch) == before
    assert all("forward" not in vars(block) for block in model.blocks)


def test_a_second_change_is_refused():
    model = gpt()
    with (
        Checkpointed(model.blocks[:1]),
        pytest.raises(ValueError, match="forward is replaced already: Block"),
    ):
        Checkpointed(model.blocks)
    assert all("forward" not in vars(block) for block in model.blocks)


def test_copies_and_pickles_are_checkpointed_with_their_own_weights():
    model, batch = gpt(), tokens()
    with Checkpointed(model.blocks):
        copied = copy.deepcopy(model)
        loaded = pickle.load(io.BytesIO(pickle.dumps(model)))
    lean = saved_bytes(copied, batch)
    assert lean < saved_bytes(model, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # whoever still used these would compute zeros
    want = step(gpt(), batch)
    assert_equal(step(copied, batch), want)
    assert_equal(step(loaded, batch), want)


# ---- offload


def test_offload_counts_and_gives_the_same_gradients():
    model, batch = gpt(), tokens()
    want = step(model, batch)
    weights = list(model.parameters())
    with SavedTensors(exclude=weights) as saved:
        _out = model(batch)
    sizes = [t.numel() * t.element_size() for t in saved.tensors]
    with Offload(exclude=weights) as offload:
        found = step(model, batch)
    assert_equal(found, want)
    assert offload.bytes >= sum(sizes) > 0
    with Offload(exclude=weights, at_least=max(sizes) + 1) as none:
        step(model, batch)
    assert none.bytes == 0


def test_offloaded_tensors_are_copies():
    x = torch.ones(5, requires_grad=True)
    with Offload() as offload:
        y = x.exp()
    assert offload.bytes == 20
    y.detach().zero_()  # the copy keeps its numbers
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(5).exp())


def test_weights_are_not_offloaded():
    layer = nn.Linear(10, 10)
    x = torch.ones(3, 10, requires_grad=True)
    with Offload(exclude=layer.parameters()) as offload:
        layer(x).sum().backward()
    assert offload.bytes == x.nbytes
    with Offload() as everything:
        layer(x).sum().backward()
    assert everything.bytes == x.nbytes + layer.weight.nbytes


@pytest.mark.parametrize("at_least", [0, 10**6])
def test_a_graph_that_is_not_used_is_freed(at_least):
    x = torch.ones(5, requires_grad=True)
    with PeakMemory(x) as memory, Offload(at_least=at_least):
        y = x.exp()  # saves its own output
        del y
        gc.collect()
        assert memory.live == x.nbytes


# ---- out of memory


def petabytes():
    torch.empty(10**15)


def test_the_cpu_runs_out_of_memory_with_these_words():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        petabytes()
    assert is_out_of_memory(caught.value)
    assert not isinstance(caught.value, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.cuda.OutOfMemoryError(), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("a model about running out of memory"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_mean_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_sizes_that_overflow_are_a_mistake_not_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="Storage size calculation overflowed") as caught:
        torch.empty(2**62)
    assert not is_out_of_memory(caught.value)


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 4, 7, 8, 9, 100, 127, 128])
@pytest.mark.parametrize("limit", [1, 5, 128, 1000])
def test_the_largest_batch_is_found_in_few_trials(largest, limit):
    trials = []

    def fits(size):
        assert 1 <= size <= limit
        trials.append(size)
        return size <= largest

    assert largest_batch(fits, limit) == min(largest, limit)
    assert len(trials) <= 2 * limit.bit_length() + 2


def test_running_out_of_memory_means_that_it_does_not_fit():
    def fits(size):
        torch.empty(size * 10**13 if size > 5 else 1)
        return True

    assert largest_batch(fits, 64) == 5


def test_other_errors_are_passed_on():
    def fits(size):
        raise RuntimeError("a mistake in the model")

    with pytest.raises(RuntimeError, match="mistake in the model"):
        largest_batch(fits)


def test_nothing_of_a_failed_trial_is_alive_afterwards(monkeypatch):
    alive, at_release = [], []

    def fits(size):
        batch = torch.ones(size)
        alive.append(weakref.ref(batch))
        if size > 2:
            petabytes()
        return True

    def release():
        at_release.append(alive[-1]() is None)  # before the cache is emptied, not after

    monkeypatch.setattr(memory_savings, "release", release)
    assert largest_batch(fits, 64) == 2
    assert at_release == [True, True]  # sizes 4 and 3


def test_the_real_release_collects_cycles():
    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself = cycle
    gone = weakref.ref(cycle)
    del cycle
    memory_savings.release()
    assert gone() is None


def test_a_size_that_fits_only_once_is_reported():
    seen = set()

    def fits(size):
        again = size in seen
        seen.add(size)
        return size < 6 and not (again and size == 5)

    with pytest.warns(UserWarning, match="size 5 fitted once"):
        assert largest_batch(fits, 64) == 4


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit of at least 1, got 0"):
        largest_batch(lambda size: True, 0)
