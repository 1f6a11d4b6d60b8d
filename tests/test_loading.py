import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from helpers import environment, loading

# a machine with fewer cores than workers warns; here that is on purpose
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def load(dataset, batch_size=2, **options):
    return DataLoader(dataset, batch_size=batch_size, **options)


@pytest.mark.parametrize(
    "dataset",
    [
        loading.ListDataset([1], loading.sleep_for),
        loading.NumberStream(3),
        loading.RandomNumbers(3, "own"),
    ],
    ids=lambda d: type(d).__name__,
)
def test_datasets_cross_to_a_spawned_worker(dataset):
    """Found by import, not in `__main__`; an epoch in shared memory is the loader's business."""
    assert b"helpers.loading" in pickle.dumps(type(dataset))


def test_list_dataset():
    assert (
        loading.ListDataset([1, 2, 3], float)[1] == 2.0 and len(loading.ListDataset([], float)) == 0
    )
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(loading.ListDataset([1], lambda x: x))


def test_workers_take_turns():
    items = loading.ListDataset(range(12), loading.worker_and_process)
    ids, pids = zip(*load(items, num_workers=2), strict=True)
    assert [i.tolist() for i in ids] == [[0, 0], [1, 1]] * 3
    assert len({p for pair in pids for p in pair.tolist()}) == 2
    assert load(items).collate_fn([items[0]])[0].tolist() == [-1]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_number_stream(n, workers):
    whole, split = (
        list(DataLoader(loading.NumberStream(n, split=s), batch_size=None, num_workers=workers))
        for s in (False, True)
    )
    assert sorted(whole) == sorted([*range(n)] * max(1, workers))
    assert sorted(split) == [*range(n)]


def draws(source, workers, epochs=2, change_epoch=False, **options):
    dataset = loading.RandomNumbers(16, source)
    generator = torch.Generator().manual_seed(0)
    loader = load(dataset, num_workers=workers, generator=generator, **options)
    found = []
    for epoch in range(epochs):
        dataset.epoch.fill_(epoch if change_epoch else 0)
        found.append(torch.cat(list(loader)))
    return found


def test_numpys_own_generator_repeats_and_the_global_one_does_not():
    first, second = draws("global", 4)
    assert len(first.unique()) == 16 and not torch.equal(first, second)
    first, second = draws("own", 4)
    assert len(first.unique()) == 4 and torch.equal(first, second)
    first, second = draws("own", 4, worker_init_fn=environment.seed_worker)
    assert len(first.unique()) == 16 and not torch.equal(first, second)


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_by_index_do_not_depend_on_workers(persistent):
    options = {"persistent_workers": persistent, "change_epoch": True}
    want = draws("index", 0, change_epoch=True)
    got = draws("index", 2, **options)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert not torch.equal(*want)


def test_unknown_source():
    with pytest.raises(ValueError, match="expected source global, own or index, got 'numpy'"):
        loading.RandomNumbers(3, "numpy")


COST = loading.Cost(inline=0.03, load=0.04, wait=0.01, handover=0.001, step=0.01)


def test_period_by_hand():
    assert loading.period(COST, 0, 2) == pytest.approx(0.04)
    assert loading.period(COST, 1, 2) == pytest.approx(0.04)  # the worker
    assert loading.period(COST, 2, 2) == pytest.approx(0.02)
    assert loading.period(COST, 4, 2) == pytest.approx(0.031 / 2)  # the cores
    assert loading.period(COST, 4, 64) == pytest.approx(0.011)  # the step
    assert loading.period(COST._replace(step_cpu=0.01), 4, 2) == pytest.approx(0.041 / 2)


@given(st.tuples(*[st.floats(0, 1)] * 4), st.integers(1, 64), st.integers(1, 64))
def test_more_workers_or_cores_never_cost(times, workers, cores):
    cost = loading.Cost(times[0], times[1], times[1] * times[2], 0, times[3])
    period = loading.period(cost, workers, cores)
    assert loading.period(cost, workers + 1, cores) <= period >= cost.step
    assert loading.period(cost, workers, cores + 1) <= period


@pytest.mark.parametrize("workers, cores", [(-1, 2), (1, 0)])
def test_bad_period(workers, cores):
    with pytest.raises(ValueError, match="expected workers >= 0 and cores > 0, got"):
        loading.period(COST, workers, cores)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_model_agrees_with_a_loader_that_only_waits(workers):
    """Sleeps last at least as long as asked; a busy machine only adds, so the best of a few."""
    items = loading.ListDataset([0.02] * 24, loading.sleep_for)
    cost = loading.Cost(inline=0.04, load=0.04, wait=0.04, handover=0.0, step=0.02)
    ratios = []
    while len(ratios) < 8 and min(ratios, default=2) >= 1.3:
        waits, steps = loading.measure_epoch(
            load(items, num_workers=workers), lambda batch: loading.sleep_for(0.02)
        )
        assert len(waits) == len(steps) == 12 and min(steps) >= 0.02
        each = (sum(waits[4:]) + sum(steps[4:])) / 8
        ratios.append(each / loading.period(cost, workers, 2) + 0.02)
    assert 1.0 <= min(ratios) < 1.3


def test_waits_for_nothing():
    assert loading.measure_epoch([], print) == ([], [])


@given(st.floats(0.1, 5), st.floats(0.1, 5), st.integers(0, 6), st.integers(1, 4))
def test_the_simulation_settles_at_the_predicted_period(load, step, workers, prefetch):
    spans = loading.simulate_workers([load] * 200, step, workers, prefetch)
    starts = [span.start for span in spans if span.kind == "step"]
    cost = loading.Cost(load, load, 0.0, 0.0, step)
    window = 60  # divisible by every number of workers: they deliver in bursts
    each = (starts[-1] - starts[-1 - window]) / window
    assert each == pytest.approx(loading.period(cost, workers, 99), rel=1e-6)


@given(st.lists(st.floats(0.1, 5), max_size=30), st.integers(1, 5), st.integers(1, 3))
def test_the_simulation_keeps_the_protocol(loads, workers, prefetch):
    spans = loading.simulate_workers(loads, 1.0, workers, prefetch)
    jobs = [span for span in spans if span.kind == "load"]
    steps = [span for span in spans if span.kind == "step"]
    assert [job.lane for job in jobs] == [b % workers for b in range(len(loads))]
    assert all(step.lane == loading.MAIN for step in steps)
    for job, step in zip(jobs, steps, strict=True):
        assert step.start >= job.end - 1e-9 and job.batch == step.batch
    for before, after in zip(steps, steps[1:], strict=False):
        assert after.start >= before.end - 1e-9  # one step at a time, in order
    for before, after in zip(jobs, jobs[workers:], strict=False):
        assert after.start >= before.end - 1e-9  # a worker has one job at a time
    for b in range(prefetch * workers, len(loads)):
        assert jobs[b].start >= steps[b - prefetch * workers].start - 1e-9  # not ordered earlier


def test_without_workers_loading_and_steps_take_turns():
    spans = loading.simulate_workers([2.0, 1.0], 1.0, 0)
    assert [(s.kind, s.start, s.end) for s in spans] == [
        *(("load", 0, 2), ("step", 2, 3)),
        *(("load", 3, 4), ("step", 4, 5)),
    ]
    assert {s.lane for s in spans} == {loading.MAIN}
    assert loading.simulate_workers([], 1.0, 0) == []


@pytest.mark.parametrize("way", loading.WAYS_TO_COPY)
def test_copies_obey_the_streams(way):
    spans = loading.simulate_copies(way, 0.5, 1.0, 1.5, n=6)
    lanes = [[s for s in spans if s.lane == lane] for lane in range(3)]
    for lane in lanes:
        assert all(b.start >= a.end - 1e-9 for a, b in zip(lane, lane[1:], strict=False))
    for copy, step in zip(lanes[loading.COPY_ENGINE], lanes[loading.COMPUTE_ENGINE], strict=True):
        assert step.start >= copy.end
        assert copy.end - copy.start == (2 if way == "pageable" else 1)
    overlap = any(c.start < s.end and s.start < c.end for c in lanes[1] for s in lanes[2])
    assert overlap == (way == "side stream")
    assert any(s.kind == "wait" for s in spans) == (way in ("pageable", "pinned"))


def test_only_the_side_stream_ends_first():
    ends = [loading.simulate_copies(way, 0.5, 1, 1.5)[-1].end for way in loading.WAYS_TO_COPY]
    assert ends[0] > ends[1] == ends[2] > ends[3]


def test_unknown_way_to_copy():
    with pytest.raises(ValueError, match="expected one of .* got 'mapped'"):
        loading.simulate_copies("mapped", 1, 1, 1)


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_prefetcher_on_the_cpu_changes_nothing(n):
    batches = [(torch.full((2,), i), torch.tensor(i)) for i in range(n)]
    got = list(loading.Prefetcher(batches, torch.device("cpu")))
    assert len(got) == n
    for mine, theirs in zip(got, batches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_prefetcher_is_one_batch_ahead_and_can_be_used_again():
    taken = []

    class Source:
        def __iter__(self):
            for i in range(4):
                taken.append(i)
                yield (torch.tensor(i),)

    source = loading.Prefetcher(Source(), torch.device("cpu"))
    assert next(iter(source))[0] == 0 and taken == [0, 1]
    assert [b[0].item() for b in source] == [0, 1, 2, 3]


class Recorder:
    """Stands in for `torch.cuda` and notes the order of what a side stream is asked to do."""

    def __init__(self):
        self.log = []

    def Stream(self, device):  # noqa: N802
        return "side"

    def current_stream(self, device):
        return self

    def wait_stream(self, stream):
        self.log.append(f"wait {stream}")

    def stream(self, stream):
        recorder = self

        class Context:
            def __enter__(self):
                recorder.log.append(f"on {stream}")

            def __exit__(self, *_):
                return None

        return Context()


class FakeBatch:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def to(self, device, non_blocking):
        assert non_blocking
        self.log.append(f"copy {self.name}")
        return self

    def record_stream(self, stream):
        self.log.append(f"record {self.name}")


def test_prefetcher_orders_the_streams(monkeypatch):
    """Wait for batch i before batch i + 1 is queued: else the step would wait for both."""
    recorder = Recorder()
    monkeypatch.setattr(torch, "cuda", recorder)
    batches = [(FakeBatch(recorder.log, i),) for i in range(2)]
    for batch in loading.Prefetcher(batches, torch.device("cuda")):
        recorder.log.append(f"step {batch[0].name}")
    assert recorder.log == [
        *("on side", "copy 0", "wait side", "record 0", "on side", "copy 1", "step 0"),
        *("wait side", "record 1", "step 1"),
    ]


@pytest.mark.gpu
def test_prefetcher_on_cuda():
    device = torch.device("cuda")
    batches = [(torch.full((1 << 20,), i).pin_memory(),) for i in range(20)]
    sums = [b[0].sum().item() for b in loading.Prefetcher(batches, device)]
    assert sums == [i << 20 for i in range(20)]


def test_in_order_is_what_makes_a_fast_batch_wait():
    items = loading.ListDataset([0.6, 0, 0, 0], loading.sleep_for)
    first = {
        flag: next(iter(load(items, 1, num_workers=2, in_order=flag))).item() > 0
        for flag in (True, False)
    }
    assert first == {True: True, False: False}
