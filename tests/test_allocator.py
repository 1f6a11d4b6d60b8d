import os
import pickle
import random

import pytest
import torch

from helpers.allocator import (
    FREE,
    IN_USE,
    CachingAllocator,
    MiB,
    read_snapshot,
    round_size,
    segment_size,
)

TIB = 2**40
KIB = 2**10


def layout(memory):
    """Sizes of the blocks of each segment; negative: free."""
    return [[b.size if b.state != FREE else -b.size for b in s.blocks] for s in memory.segments]


def requested(memory):
    """Bytes that the owners of blocks asked for: without the rounding up."""
    return sum(block.requested for block in memory.blocks(IN_USE))


def free_bytes(memory):
    return sum(block.size for block in memory.blocks(FREE))


def releasable(memory):
    """Bytes of the segments in which nothing is in use."""
    return sum(s.size for s in memory.segments if {b.state for b in s.blocks} == {FREE})


# ---- the rules, one example each, worked out by hand


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512)],
)
def test_sizes_are_rounded_up_to_512(size, expected):
    assert round_size(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 1, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB - 511, 10 * MiB),  # rounds to 10 MiB
        (10 * MiB, 10 * MiB),
        (10 * MiB + 1, 12 * MiB),
        (1001 * MiB, 1002 * MiB),
    ],
)
def test_sizes_of_new_segments(size, expected):
    memory = CachingAllocator(TIB)
    memory.malloc(size)
    assert memory.reserved == expected == segment_size(round_size(size))
    assert requested(memory) == size


def test_small_requests_share_a_segment_and_large_ones_another():
    memory = CachingAllocator(TIB)
    for size in (1, 1000, MiB, 3 * MiB, 5 * MiB):
        memory.malloc(size)
    assert layout(memory) == [
        [512, 1024, MiB, -(MiB - 1536)],
        [3 * MiB, 5 * MiB, -12 * MiB],
    ]
    assert memory.allocated == 9 * MiB + 1536 and requested(memory) == 9 * MiB + 1001


def test_a_small_remainder_is_split_off_in_the_small_pool_only():
    memory = CachingAllocator(TIB)
    first, second = memory.malloc(MiB), memory.malloc(MiB - 512)
    assert layout(memory) == [[MiB, MiB - 512, -512]]
    large = memory.malloc(11 * MiB + 512 * KIB)  # 12 MiB; 512 KiB left: not a block of its own
    assert large.size == 12 * MiB and large.requested == 11 * MiB + 512 * KIB
    larger = memory.malloc(10 * MiB + 512 * KIB)  # 1.5 MiB left
    assert larger.size == 10 * MiB + 512 * KIB
    exact = memory.malloc(11 * MiB)  # exactly 1 MiB left: kept with the block
    assert exact.size == 12 * MiB
    assert (first.size, second.size) == (MiB, MiB - 512)


def test_the_smallest_block_that_fits_is_taken_then_the_lowest_address():
    memory = CachingAllocator(TIB)
    sizes = (16, 12, 14, 12)
    blocks = [memory.malloc(n * MiB) for n in sizes]
    for block in blocks:
        memory.free(block)
    assert memory.malloc(11 * MiB).address == blocks[1].address
    assert memory.malloc(11 * MiB).address == blocks[3].address
    assert memory.malloc(13 * MiB).address == blocks[2].address
    assert memory.reserved == 54 * MiB


def test_pools_do_not_help_each_other():
    memory = CachingAllocator(TIB)
    memory.free(memory.malloc(20 * MiB))
    memory.malloc(1)
    assert memory.reserved == 22 * MiB


def test_free_neighbours_become_one():
    memory = CachingAllocator(TIB)
    a, b, c = (memory.malloc(4 * MiB) for _ in range(3))
    memory.free(a)
    memory.free(c)
    assert layout(memory) == [[-4 * MiB, 4 * MiB, -12 * MiB]]
    memory.free(b)
    assert layout(memory) == [[-20 * MiB]]
    assert memory.allocated == 0 and memory.reserved == releasable(memory) == 20 * MiB


def test_empty_cache_frees_only_segments_without_a_block_in_use():
    """The saying that it cures running out of memory: it frees what was free already."""
    memory = CachingAllocator(TIB)
    blocks = [memory.malloc(2 * MiB) for _ in range(50)]  # 5 segments of 10 blocks
    for number, block in enumerate(blocks):
        if number % 10 or number == 40:
            memory.free(block)
    assert free_bytes(memory) == 92 * MiB and memory.allocated == 8 * MiB
    assert releasable(memory) == 20 * MiB
    assert memory.empty_cache() == 20 * MiB
    assert memory.reserved == 80 * MiB and memory.allocated == 8 * MiB
    assert memory.largest_free == 18 * MiB and free_bytes(memory) == 72 * MiB
    assert memory.empty_cache() == 0


def test_out_of_memory_with_more_free_than_asked_for():
    memory = CachingAllocator(capacity=100 * MiB)
    blocks = [memory.malloc(2 * MiB) for _ in range(50)]
    for number, block in enumerate(blocks):
        if number % 10:
            memory.free(block)
    with pytest.raises(torch.OutOfMemoryError, match=r"simulated card\): tried to allocate 20"):
        memory.malloc(19 * MiB)
    with pytest.raises(RuntimeError, match="90.00 MiB is reserved but unallocated"):
        memory.malloc(20 * MiB)
    assert memory.events[-1].action == "oom" and memory.events[-1].size == 20 * MiB
    assert memory.allocated == 10 * MiB and len(memory.segments) == 5
    memory.malloc(18 * MiB)  # but this fits into a hole


def test_cached_segments_are_given_back_before_it_gives_up():
    memory = CachingAllocator(capacity=40 * MiB)
    memory.free(memory.malloc(20 * MiB))
    memory.free(memory.malloc(1))
    kept = memory.malloc(12 * MiB)  # in the segment of 20 MiB
    memory.free(kept)
    memory.malloc(38 * MiB)
    assert memory.reserved == memory.allocated == 38 * MiB
    actions = [event.action for event in memory.events[-4:]]
    assert actions == ["segment_free", "segment_free", "segment_alloc", "alloc"]


def test_a_capacity_that_is_just_enough():
    memory = CachingAllocator(capacity=22 * MiB)
    memory.malloc(2 * MiB)
    memory.malloc(5)
    assert memory.reserved == 22 * MiB


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_cannot_be_asked_for(size):
    with pytest.raises(ValueError, match="must be at least 1 byte"):
        CachingAllocator(TIB).malloc(size)


def test_freeing_twice_is_refused_even_when_the_memory_has_a_new_owner():
    memory = CachingAllocator(TIB)
    block = memory.malloc(100)
    memory.free(block)
    with pytest.raises(ValueError, match="expected a block in use"):
        memory.free(block)
    again = memory.malloc(100)
    assert again.address == block.address
    with pytest.raises(ValueError, match="expected a block in use"):
        memory.free(block)
    with pytest.raises(ValueError, match="expected a block in use"):
        CachingAllocator(TIB).free(again)


# ---- what always holds


def assert_consistent(memory, owned):
    """Blocks tile their segments, free ones do not touch, sums agree with what the owner holds."""
    ends = 0
    for segment in memory.segments:
        assert segment.address >= ends  # segments come in the order of their addresses here
        ends = segment.address + segment.size
        address = segment.address
        for left, right in zip(segment.blocks, segment.blocks[1:], strict=False):
            assert not left.state == right.state == FREE
        for block in segment.blocks:
            assert block.address == address and block.size > 0 and block.size % 512 == 0
            assert block.state in (IN_USE, FREE)
            address += block.size
            if block.state == IN_USE:
                extra = block.size - round_size(block.requested)
                assert extra == 0 if segment.pool == "small" else 0 <= extra <= MiB
                assert (block.requested <= MiB) == (segment.pool == "small")
        assert address == ends
    assert requested(memory) == sum(size for _, size in owned)
    assert memory.allocated == sum(block.size for block, _ in owned)
    assert memory.allocated + free_bytes(memory) == memory.reserved <= memory.capacity
    sizes = [size for segment in layout(memory) for size in segment]
    assert memory.largest_free == -min([0, *sizes])


@pytest.mark.parametrize("seed", range(6))
def test_thousands_of_random_requests(seed):
    rng = random.Random(seed)
    memory, owned, failed = CachingAllocator(300 * MiB), [], 0
    for step in range(2000):
        if owned and rng.random() < 0.4:
            block, _ = owned.pop(rng.randrange(len(owned)))
            memory.free(block)
        elif rng.random() < 0.01:
            before = releasable(memory)
            assert memory.empty_cache() == before and releasable(memory) == 0
        else:
            size = int(2 ** rng.uniform(0, 26))
            hole = any(
                block.size >= round_size(size)
                for segment in memory.segments
                if segment.pool == ("small" if round_size(size) <= MiB else "large")
                for block in segment.blocks
                if block.state == FREE
            )
            reserved, unused = memory.reserved, releasable(memory)
            try:
                owned.append((memory.malloc(size), size))
            except torch.OutOfMemoryError:
                failed += 1
                assert not hole and reserved - unused + segment_size(round_size(size)) > 300 * MiB
            else:
                assert not hole or memory.reserved == reserved
        if step % 10 == 0:
            assert_consistent(memory, owned)
    assert_consistent(memory, owned)
    assert failed > 20
    for block, _ in owned:
        memory.free(block)
    assert releasable(memory) == memory.reserved and memory.allocated == 0
    memory.empty_cache()
    assert memory.segments == []
    assert balance(memory, "alloc", "free_completed") == 0
    assert balance(memory, "segment_alloc", "segment_free") == 0


def balance(memory, more, less):
    """Bytes that events called `more` added, without those that events called `less` took."""
    signs = {more: 1, less: -1}
    return sum(signs.get(event.action, 0) * event.size for event in memory.events)


# ---- snapshots: the format is that of torch.cuda.memory._snapshot and memory_snapshot.cpp


def snapshot_of(memory):
    """What PyTorch would write of this state."""
    segments = [
        {
            "device": 0,
            "address": s.address,
            "total_size": s.size,
            "allocated_size": sum(b.size for b in s.blocks if b.state == IN_USE),
            "active_size": sum(b.size for b in s.blocks if b.state != FREE),
            "requested_size": sum(b.requested for b in s.blocks),
            "stream": 0,
            "segment_type": s.pool,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": b.address,
                    "size": b.size,
                    "requested_size": b.requested,
                    "state": b.state,
                    "frames": b.frames,
                }
                for b in s.blocks
            ],
        }
        for s in memory.segments
    ]
    trace = []
    for event in memory.events:
        place = "device_free" if event.action == "oom" else "addr"
        entry = {"action": event.action, place: event.address, "size": event.size}
        trace.append(entry | {"stream": 0, "time_us": event.time, "frames": []})
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
    return {"segments": segments, "device_traces": [trace], "allocator_settings": settings}


@pytest.fixture
def used():
    memory = CachingAllocator(60 * MiB)
    blocks = [memory.malloc(n * MiB) for n in (3, 1, 30, 4)]
    memory.free(blocks[0])
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 16.00 MiB"):
        memory.malloc(15 * MiB)
    return memory


def test_a_snapshot_from_a_file_and_from_a_dict(used, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(used)))
    for source in (path, str(path), snapshot_of(used)):
        read = read_snapshot(source)
        assert read.segments == used.segments
        assert [(e.action, e.size, e.time) for e in read.events] == [
            (e.action, e.size, e.time) for e in used.events
        ]
        for figure in (requested, free_bytes, releasable):
            assert figure(read) == figure(used)
        assert read.largest_free == used.largest_free
        assert (read.reserved, read.allocated) == (52 * MiB, 35 * MiB)
        assert balance(read, "alloc", "free_completed") == requested(used)
        assert balance(read, "segment_alloc", "segment_free") == used.reserved


def test_another_device_and_a_block_that_a_stream_still_uses(used):
    data = snapshot_of(used)
    other = snapshot_of(CachingAllocator(1))
    other["segments"] = [
        {
            "device": 1,
            "address": 4096,
            "total_size": 2048,
            "segment_type": "small",
            "blocks": [
                {"size": 512, "requested_size": 100, "state": "active_allocated"},
                {"size": 512, "requested_size": 500, "state": "active_pending_free"},
                {"size": 1024, "requested_size": 77, "state": "inactive"},  # of its last owner
            ],
        }
    ]
    data["segments"] += other["segments"]
    data["device_traces"].append([])
    assert read_snapshot(data).reserved == used.reserved
    second = read_snapshot(data, device=1)
    assert (second.reserved, second.allocated, requested(second)) == (2048, 512, 100)
    assert (free_bytes(second), second.largest_free) == (1024, 1024)
    assert [b.address for s in second.segments for b in s.blocks] == [4096, 4608, 5120]
    assert [b.requested for s in second.segments for b in s.blocks] == [100, 500, 0]
    assert second.events == []
    for device in (2, -1):
        with pytest.raises(ValueError, match=f"expected one of the 2 devices .* got {device}"):
            read_snapshot(data, device)


@pytest.mark.parametrize(("place", "key"), [("segments", "total_size"), ("device_traces", "size")])
def test_a_snapshot_that_lacks_something_is_refused(used, place, key):
    data = snapshot_of(used)
    entry = data["segments"][0] if place == "segments" else data["device_traces"][0][0]
    del entry[key]
    with pytest.raises(ValueError, match=f"expected a snapshot; .* has no '{key}'"):
        read_snapshot(data)


def test_where_memory_was_allocated():
    def frame(filename, line, name):
        return {"filename": filename, "line": line, "name": name}

    memory = CachingAllocator(TIB)
    inside = "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py"
    memory.malloc(3 * MiB).frames = [
        frame("??", 0, "torch::CapturedTraceback::gather(bool, bool, bool)"),
        frame("/build/at/native/Linear.cpp", 40, "at::linear"),
        frame(inside, 125, "forward"),
        frame("/home/me/model.py", 12, "forward"),
        frame("/home/me/train.py", 80, "main"),
    ]
    for _ in range(2):
        memory.malloc(2 * MiB).frames = [frame("/home/me/train.py", 81, "main")]
    memory.malloc(1)
    got = read_snapshot(snapshot_of(memory)).largest_sites(2)
    assert got == [("train.py:81 main", 4 * MiB), ("model.py:12 forward", 3 * MiB)]
    everything = dict(read_snapshot(snapshot_of(memory)).largest_sites())
    assert everything["unknown"] == 512 and sum(everything.values()) == memory.allocated


class Attack:
    """Unpickled the usual way, this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_file_is_refused_before_anything_runs(tmp_path, used):
    made = tmp_path / "made by the pickle"
    path = tmp_path / "snapshot.pickle"
    data = snapshot_of(used) | {"extra": Attack(str(made))}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(data, protocol))
        with pytest.raises(pickle.UnpicklingError, match=r"plain data only.*mkdir"):
            read_snapshot(path)
        assert not made.exists()
    pickle.loads(path.read_bytes())
    assert made.exists()  # it would have worked


@pytest.mark.parametrize("data", [[], {}, {"segments": []}, 7])
def test_another_pickle_is_refused(data, tmp_path):
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(data))
    with pytest.raises(ValueError, match="expected a snapshot with 'segments'"):
        read_snapshot(path)


# ---- against CUDA: the history of a real allocator, played again by the model


def play_again(snapshot):
    """Give the requests of a complete history to the model; each must get CUDA's address."""
    model, blocks = CachingAllocator(TIB), {}
    for event in snapshot.events:
        if event.action == "segment_alloc":
            model._next_address = event.address  # where CUDA puts the next segment, if one is made
        elif event.action == "alloc":
            blocks[event.address] = model.malloc(event.size)
            assert blocks[event.address].address == event.address
        elif event.action == "free_completed":
            model.free(blocks.pop(event.address))
    assert sorted(layout(model)) == sorted(layout(snapshot))
    return model


def make_requests(malloc, free, steps=400):
    rng, owned = random.Random(1), []
    for _ in range(steps):
        if owned and rng.random() < 0.45:
            free(owned.pop(rng.randrange(len(owned))))
        else:
            owned.append(malloc(int(2 ** rng.uniform(0, 25))))
    return owned


def test_the_player_agrees_with_the_model_and_notices_another_allocator():
    memory = CachingAllocator(TIB)
    make_requests(memory.malloc, memory.free)
    again = play_again(read_snapshot(snapshot_of(memory)))
    assert layout(again) == layout(memory)
    last = max(i for i, e in enumerate(memory.events) if e.action == "alloc")
    memory.events[last].address += 512
    with pytest.raises(AssertionError):
        play_again(read_snapshot(snapshot_of(memory)))


@pytest.mark.gpu
def test_cuda_places_every_block_where_the_model_does():
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("needs a process that has no CUDA memory yet")
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        owned = make_requests(
            lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), lambda tensor: None
        )
        snapshot = read_snapshot(torch.cuda.memory._snapshot())
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    model = play_again(snapshot)
    assert model.allocated == snapshot.allocated == torch.cuda.memory_allocated()
    assert model.reserved == snapshot.reserved == torch.cuda.memory_reserved()
    assert requested(snapshot) == sum(tensor.nbytes for tensor in owned)
