"""Chapter 09: how PyTorch keeps GPU memory: a small caching allocator, and snapshots to read."""

import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MiB = 2**20

# c10/core/AllocatorConfig.h of PyTorch 2.15, which has these as kMinBlockSize, kSmallSize,
# kSmallBuffer, large_segment_size, kMinLargeAlloc and kRoundLarge
SMALLEST_BLOCK = 512  # every size is rounded up to a multiple of this
SMALL_REQUEST = 1 * MiB  # up to here a request is served from the pool of small blocks …
SMALL_SEGMENT = 2 * MiB  # … whose segments all have this size
LARGE_SEGMENT = 20 * MiB  # the segment for a request above 1 MiB …
OWN_SEGMENT = 10 * MiB  # … and below this; a larger one gets a segment of its own …
SEGMENT_STEP = 2 * MiB  # … rounded up to a multiple of this

IN_USE, FREE = "active_allocated", "inactive"


@dataclass
class Block:
    """A piece of a segment, in bytes: `size` of it are taken, `requested` were asked for.

    state: in use ("active_allocated"); freed, but another stream may still be working on it
    ("active_pending_free"; only in snapshots); or free ("inactive").
    frames: where it was allocated, innermost call first: dicts with filename, line, name.
    """

    address: int
    size: int
    requested: int = 0
    state: str = FREE
    frames: list[dict[str, Any]] = field(default_factory=list, repr=False)


@dataclass
class Segment:
    """What one `cudaMalloc` returned, cut into blocks without gaps; its pool is small or large."""

    address: int
    size: int
    pool: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Event:
    """One entry of the allocator's history; `size` in bytes, `time` in µs, or a step count.

    action: "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
    "segment_map", "segment_unmap" (expandable segments), "oom", "snapshot", "annotate".
    The sizes of "alloc" and "free…" are those asked for, before rounding up.
    """

    action: str
    address: int
    size: int
    time: int = 0
    frames: list[dict[str, Any]] = field(default_factory=list, repr=False)


class DeviceMemory:
    """The segments of one device, and how they came about; all figures in bytes.

    A GPU's own `cudaMalloc` and `cudaFree` are slow, and `cudaFree` waits for the GPU. PyTorch
    calls them rarely: it takes whole segments from CUDA, gives out blocks of them, and keeps what
    the program frees for the next request. So more is reserved (the segments) than is allocated
    (the blocks in use), and free memory may lie in pieces too small for a request.
    """

    def __init__(self, segments: list[Segment], events: list[Event]):
        self.segments, self.events = segments, events

    @property
    def reserved(self) -> int:
        """All segments together: what `nvidia-smi` sees of PyTorch, besides the CUDA context."""
        return sum(segment.size for segment in self.segments)

    @property
    def allocated(self) -> int:
        """The blocks in use, rounded sizes: `torch.cuda.memory_allocated()`."""
        return sum(block.size for block in self.blocks(IN_USE))

    @property
    def largest_free(self) -> int:
        """The largest single free block: a request above it needs another segment."""
        return max((block.size for block in self.blocks(FREE)), default=0)

    def blocks(self, state: str) -> list[Block]:
        """Return the blocks in this state, by segment and address."""
        return [block for s in self.segments for block in s.blocks if block.state == state]


class CachingAllocator(DeviceMemory):
    """A small model of PyTorch's CUDA caching allocator: the same rules, no GPU.

        memory = CachingAllocator(capacity=64 * MiB)
        block = memory.malloc(3 * MiB)
        memory.free(block)
        memory.reserved  # still 20 MiB: kept for the next request

    The rules are those of c10/cuda/CUDACachingAllocator.cpp, whose functions are named below, for
    one stream and the default settings: no `expandable_segments`, no `max_split_size_mb`, no
    `roundup_power2_divisions`, no CUDA graphs. Addresses of segments are made up: each one lies
    after all before it. `capacity` is what CUDA would give to this process, in bytes.
    """

    def __init__(self, capacity: int):
        super().__init__([], [])
        self.capacity = capacity
        self._next_address = SEGMENT_STEP  # not 0: an address of 0 means none

    def malloc(self, size: int) -> Block:
        """Return a block for `size` bytes: a cached one if one fits, else from a new segment.

        Raises torch.OutOfMemoryError when CUDA has no room for the segment, not even after the
        segments without a block in use are given back; ValueError for a size below 1 (PyTorch
        does not ask the allocator for an empty tensor).
        """
        if size < 1:
            raise ValueError(f"size must be at least 1 byte, got {size}")
        rounded = round_size(size)
        pool = "small" if rounded <= SMALL_REQUEST else "large"

        found = self._best_fit(pool, rounded)
        if found is None:
            found = self._new_segment(pool, rounded)
        if found is None:
            self.empty_cache()
            found = self._new_segment(pool, rounded)
        if found is None:
            self._record("oom", 0, rounded)
            raise torch.OutOfMemoryError(self._out_of_memory(rounded))

        segment, free = found
        taken = Block(free.address, free.size, size, IN_USE)
        parts = [taken]
        if should_split(pool, free.size - rounded):
            taken.size = rounded
            parts.append(Block(free.address + rounded, free.size - rounded))
        where = segment.blocks.index(free)
        segment.blocks[where : where + 1] = parts

        self._record("alloc", taken.address, size)
        return taken

    def free(self, block: Block) -> None:
        """Keep the block for later requests, merged with the free blocks on both sides of it.

        Raises ValueError for a block that is not in use here.
        """
        owners = [s for s in self.segments if any(block is b for b in s.blocks)]
        if not owners or block.state != IN_USE:
            raise ValueError(f"expected a block in use, got {block}")
        self._record("free_requested", block.address, block.requested)
        self._record("free_completed", block.address, block.requested)
        block.state = FREE
        block.requested = 0
        _merge(owners[0])

    def empty_cache(self) -> int:
        """Give the segments without a block in use back to CUDA; return their bytes.

        `release_cached_blocks`: a segment of which one block is in use stays, whole.
        """
        unused = [s for s in self.segments if all(block.state == FREE for block in s.blocks)]
        for segment in unused:
            self.segments.remove(segment)
            self._record("segment_free", segment.address, segment.size)
        return sum(segment.size for segment in unused)

    def _best_fit(self, pool: str, size: int) -> tuple[Segment, Block] | None:
        """`get_free_block`: the smallest that is large enough; of equals, the lowest address."""
        fitting = [
            (segment, block)
            for segment in self.segments
            if segment.pool == pool
            for block in segment.blocks
            if block.state == FREE and block.size >= size
        ]
        return min(fitting, key=lambda fit: (fit[1].size, fit[1].address), default=None)

    def _new_segment(self, pool: str, size: int) -> tuple[Segment, Block] | None:
        """`alloc_block`: ask CUDA for a segment; None when it has no room for it."""
        size = segment_size(size)
        if self.reserved + size > self.capacity:
            return None
        block = Block(self._next_address, size)
        segment = Segment(block.address, size, pool, [block])
        self._next_address += size
        self.segments.append(segment)
        self._record("segment_alloc", segment.address, size)
        return segment, block

    def _record(self, action: str, address: int, size: int) -> None:
        self.events.append(Event(action, address, size, time=len(self.events)))

    def _out_of_memory(self, size: int) -> str:
        return (
            f"out of memory (simulated card): tried to allocate {_mib(segment_size(size))}; of the "
            f"capacity of {_mib(self.capacity)}, {_mib(self.capacity - self.reserved)} is free, "
            f"{_mib(self.allocated)} is allocated, and {_mib(self.reserved - self.allocated)} is "
            f"reserved but unallocated, in pieces of at most {_mib(self.largest_free)}"
        )


def round_size(size: int) -> int:
    """Return the bytes that a request for `size` takes: a multiple of 512 (`round_size`)."""
    return _round_up(size, SMALLEST_BLOCK)


def segment_size(rounded: int) -> int:
    """Return the size of the segment made for a rounded request (`get_allocation_size`)."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if rounded < OWN_SEGMENT:
        return LARGE_SEGMENT
    return _round_up(rounded, SEGMENT_STEP)


def should_split(pool: str, remaining: int) -> bool:
    """Whether the `remaining` bytes of a block become a free block of their own (`should_split`).

    In the small pool always, in the large one above 1 MiB: less than that stays unused as long as
    the block is in use.
    """
    return remaining >= SMALLEST_BLOCK if pool == "small" else remaining > SMALL_REQUEST


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple  # // rounds down, so on the negative number, up


def _merge(segment: Segment) -> None:
    """`try_merge_blocks`: two free neighbours become one."""
    merged: list[Block] = []
    for block in segment.blocks:
        if merged and merged[-1].state == block.state == FREE:
            merged[-1].size += block.size
        else:
            merged.append(block)
    segment.blocks = merged


def _mib(size: int) -> str:
    return f"{size / MiB:.2f} MiB"


class Snapshot(DeviceMemory):
    """One device's part of a memory snapshot."""

    def largest_sites(self, count: int = 5) -> list[tuple[str, int]]:
        """Return where the most bytes in use were allocated: ("file.py:12 name", bytes).

        The place is the innermost Python line outside PyTorch that was recorded.
        """
        sites: Counter[str] = Counter()
        for block in self.blocks(IN_USE):
            sites[_site(block.frames)] += block.size
        return sites.most_common(count)


def _site(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        path = Path(frame["filename"])
        if path.suffix == ".py" and "torch" not in path.parts:
            return f"{path.name}:{frame['line']} {frame['name']}"
    return "unknown"


def read_snapshot(source: str | Path | dict[str, Any], device: int = 0) -> Snapshot:
    """Read what `torch.cuda.memory._dump_snapshot(path)` wrote, or `_snapshot()` returned.

    A pickle can run any code when it is loaded, and snapshots get sent around. This reader takes
    dicts, lists, texts and numbers only, which is all that a snapshot holds.
    device: the index of the GPU whose memory is meant.

    Raises pickle.UnpicklingError, before anything runs, for a file that wants more; ValueError
    for one that holds something else than a snapshot, and for a device that it does not have.
    """
    if isinstance(source, dict):
        data = source
    else:
        with open(source, "rb") as file:
            data = _PlainUnpickler(file).load()

    if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
        raise ValueError("expected a snapshot with 'segments' and 'device_traces'")

    traces = data["device_traces"]  # one for each GPU, empty if no history was recorded
    if device not in range(len(traces)):
        raise ValueError(f"expected one of the {len(traces)} devices in the file, got {device}")
    try:
        segments = [_segment(s) for s in data["segments"] if s.get("device", 0) == device]
        events = [_event(entry) for entry in traces[device]]
    except KeyError as missing:
        raise ValueError(f"expected a snapshot; one of its entries has no {missing}") from missing
    return Snapshot(segments, events)


class _PlainUnpickler(pickle.Unpickler):
    """Build dicts, lists, tuples, texts and numbers; refuse to look up anything by its name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"a memory snapshot holds plain data only, this file asks for {module}.{name}; "
            "nothing of it was run"
        )


def _segment(entry: dict[str, Any]) -> Segment:
    blocks = []
    address = entry["address"]
    for block in entry["blocks"]:
        size, state = block["size"], block["state"]
        requested = block.get("requested_size", size)  # older snapshots lack it, and addresses
        if state == FREE:
            requested = 0  # the file keeps what the block's last owner asked for
        blocks.append(Block(address, size, requested, state, block.get("frames", [])))
        address += size
    return Segment(entry["address"], entry["total_size"], entry["segment_type"], blocks)


def _event(entry: dict[str, Any]) -> Event:
    address = entry.get("addr", 0)  # an "oom" has none
    time = entry.get("time_us", 0)
    return Event(entry["action"], address, entry["size"], time, entry.get("frames", []))
