"""Chapter 14: all-reduce from send and receive, as a ring and as a tree, and what it costs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# The schedule: pure data, which needs no process


@dataclass(frozen=True)
class Transfer:
    """In `round`, `sender` sends its `chunk` to `receiver`, who adds it or replaces its own."""

    round: int
    sender: int
    receiver: int
    chunk: int
    adds: bool


def ring_schedule(ranks: int) -> list[Transfer]:
    """Return who sends which chunk to whom: n − 1 steps of reduce-scatter, n − 1 of all-gather.

    In every step each rank sends one chunk to the next rank and receives one from the one before.
    Patarasuk and Yuan, 2009: https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    _require_ranks(ranks)
    found = []
    for step in range(2 * (ranks - 1)):
        adds = step < ranks - 1
        for rank in range(ranks):
            # the rule goes on in all-gather: it begins with the chunk that was completed last
            chunk = (rank - step) % ranks
            found.append(Transfer(step, rank, (rank + 1) % ranks, chunk, adds))
    return found


def tree_schedule(ranks: int) -> list[Transfer]:
    """Return the transfers of a binomial tree: everything to rank 0, and back; one chunk, the 0th.

    In the first step every odd rank sends to the one before, which adds; then every second of
    those that are left; after ⌈log2 n⌉ steps rank 0 has the sum, and it goes the same way back.
    Thakur, Rabenseifner and Gropp, 2005: https://doi.org/10.1177/1094342005051521
    """
    _require_ranks(ranks)
    up = []
    levels = math.ceil(math.log2(ranks))
    for level in range(levels):
        distance = 2**level
        for receiver in range(0, ranks - distance, 2 * distance):
            up.append(Transfer(level, receiver + distance, receiver, 0, True))
    last = 2 * levels - 1
    down = [Transfer(last - t.round, t.receiver, t.sender, 0, False) for t in up]
    return up + sorted(down, key=lambda t: (t.round, t.sender))


def holdings(schedule: Sequence[Transfer], ranks: int, chunks: int) -> list[list[list[set[int]]]]:
    """Replay a schedule: `[k][rank][chunk]` is the set of ranks whose numbers are summed there.

    Entry 0 is the beginning, entry k + 1 what is held after round k.
    """
    now = [[{rank} for _ in range(chunks)] for rank in range(ranks)]
    found = [now]
    rounds = 1 + max((t.round for t in schedule), default=-1)
    for k in range(rounds):
        after = [[set(chunk) for chunk in rank] for rank in now]
        for t in schedule:
            if t.round == k:
                came, own = now[t.sender][t.chunk], now[t.receiver][t.chunk]
                if t.adds and came & own:
                    raise ValueError(f"ranks {came & own} would be counted twice: {t}")
                after[t.receiver][t.chunk] = came | own if t.adds else set(came)
        found.append(after)
        now = after
    return found


def _require_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"expected at least 1 rank, got {ranks}")


# The same on tensors


PIECE = 2**22  # bytes of the largest message: what arrives is added while it is in the cache


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Replace `tensor` on every rank by the sum over all ranks; return the bytes this rank sent.

    Same shape and dtype on all ranks. Any size: where there are fewer elements than ranks, some
    chunks are empty. Every rank ends with the same bits. Which ranks talk in which step is
    `ring_schedule`: 2 (n − 1) steps, each with 1/n of the tensor. One of more than 4 MiB for each
    rank is reduced slice by slice.
    """
    ranks = dist.get_world_size(group)
    flat = tensor.contiguous().view(-1)
    slices = flat.split(_slice_length(ranks, tensor.element_size()))
    sent = 0
    for part in slices:
        sent += _ring(part, group)
    if flat.data_ptr() != tensor.data_ptr():  # it was not contiguous
        tensor.copy_(flat.view(tensor.shape))
    return sent


def _ring(flat: Tensor, group: dist.ProcessGroup | None) -> int:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = flat.tensor_split(ranks)
    arrived = torch.empty_like(chunks[0])  # the first chunk is the longest
    sent = 0

    # reduce-scatter: sums travel along the ring, and grow by this rank's own part
    for step in range(ranks - 1):
        outgoing, target = chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks]
        buffer = arrived[: len(target)]
        _exchange(outgoing, after, buffer, before, group)
        target += buffer
        sent += outgoing.nbytes

    # all-gather: each rank has the whole sum of one chunk, and passes it on
    for step in range(ranks - 1):
        outgoing, target = chunks[(rank + 1 - step) % ranks], chunks[(rank - step) % ranks]
        _exchange(outgoing, after, target, before, group)
        sent += outgoing.nbytes
    return sent


def _slice_length(ranks: int, element_size: int) -> int:
    return ranks * max(1, PIECE // element_size)


def _exchange(
    outgoing: Tensor, after: int, incoming: Tensor, before: int, group: dist.ProcessGroup | None
) -> None:
    """Send `outgoing` to the next rank while `incoming` arrives from the previous one."""
    operations = [
        # gloo starts them in this order; one that sends first may let the other side's data wait
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=before),
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=after),
    ]
    # together: if everybody sent first and received afterwards, all might wait for all
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def tree_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None, *, acknowledge: bool = False
) -> int:
    """Like `ring_all_reduce`, along `tree_schedule`: 2 ⌈log2 n⌉ steps, each with all of the tensor.

    Rank 0 sends it ⌈log2 n⌉ times, half of the ranks only once: they wait most of the time.
    gloo's send returns when the data are in the socket's buffer, so a rank begins its next send
    while the last one is still on the way. acknowledge: it waits for an answer of one byte (not
    counted as sent), so that two messages never share its link.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.contiguous().view(-1)
    arrived = torch.empty_like(flat)
    answer = torch.zeros(1, dtype=torch.uint8, device=flat.device)
    sent = 0
    for t in tree_schedule(ranks):
        if t.sender == rank:
            dist.send(flat, group=group, group_dst=t.receiver)
            sent += flat.nbytes
            if acknowledge:
                dist.recv(answer, group=group, group_src=t.receiver)
        elif t.receiver == rank:
            dist.recv(arrived if t.adds else flat, group=group, group_src=t.sender)
            if acknowledge:
                dist.send(answer, group=group, group_dst=t.sender)
            if t.adds:
                flat += arrived

    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
    return sent


def ring_bytes(ranks: int, elements: int, element_size: int) -> list[int]:
    """Return how many bytes each rank sends in `ring_all_reduce`: 2 (n − 1)/n of the tensor.

    Exactly so where n divides the number of elements; else chunks differ by one element.
    """
    sent = [0] * ranks
    for part in torch.empty(elements, device="meta").split(_slice_length(ranks, element_size)):
        lengths = [len(chunk) for chunk in part.tensor_split(ranks)]
        for t in ring_schedule(ranks):
            sent[t.sender] += lengths[t.chunk] * element_size
    return sent


class Written:
    """The bytes that this process has written since `start`; see `bytes_written`."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def bytes_written() -> Iterator[Written]:
    """Count what this process hands to the kernel to write: with gloo, the bytes on the wire.

    Read from /proc/self/io, so on Linux only. Contains all of the process: files and prints, and
    gloo's headers (48 bytes a message). Raises OSError elsewhere.
    """
    counted = Written()
    before = _written()
    yield counted
    counted.bytes = _written() - before


def _written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


# The cost: seconds = latency + bytes / bandwidth for each message


def ring_seconds(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes: 2 (n − 1) (α + size / (n β)).

    latency α: seconds that a message takes whatever its size. bandwidth β: bytes/s at which one
    rank sends while it receives. Assumed: every message costs α + bytes/β (Hockney 1994), all
    links are equal and used by nobody else, the additions cost nothing.
    Thakur, Rabenseifner and Gropp, 2005: https://doi.org/10.1177/1094342005051521
    """
    _require_network(ranks, size, latency, bandwidth)
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def tree_seconds(
    ranks: int, size: float, latency: float, bandwidth: float, *, pipelined: bool = False
) -> float:
    """Return the seconds of a tree all-reduce of `size` bytes: 2 ⌈log2 n⌉ (α + size/β).

    Assumed is what `ring_seconds` assumes. pipelined: the message is cut so finely that all
    levels work at once, and two trees share the bytes so that no rank is idle in one of them, as
    in NCCL since 2.4: 2 ⌈log2 n⌉ α + 2 size/β, a limit that no real cut reaches. Sanders, Speck
    and Träff, 2009: https://doi.org/10.1016/j.parco.2009.09.001
    """
    _require_network(ranks, size, latency, bandwidth)
    levels = math.ceil(math.log2(ranks))
    if pipelined:
        return 2 * levels * latency + (2 * size / bandwidth if levels else 0.0)
    return 2 * levels * (latency + size / bandwidth)


def step_seconds(
    forward: float,
    backward: float,
    buckets: Sequence[int],
    reduce: Callable[[int], float],
    *,
    overlap: bool = True,
) -> float:
    """Return the seconds of a DDP step until all gradients are reduced.

    forward, backward: seconds of computing. buckets: bytes, in the order in which backward
    completes them. reduce(bytes) -> seconds of one all-reduce, such as a `ring_seconds`.
    Assumed: backward time is proportional to the bytes of gradients; buckets are reduced one
    after the other, each as soon as it is complete; computing and sending do not slow each other
    (on a CPU they do: they share the cores). overlap=False: all buckets after backward.
    Li et al., 2020, PyTorch Distributed: https://doi.org/10.14778/3415478.3415530
    """
    if not buckets or min(buckets) <= 0:
        raise ValueError(f"expected buckets of at least 1 byte, got {list(buckets)}")
    if not overlap:
        return forward + backward + sum(reduce(size) for size in buckets)
    total, complete, free = sum(buckets), 0, 0.0
    for size in buckets:
        complete += size
        ready = forward + backward * complete / total
        free = max(ready, free) + reduce(size)  # when the network is free again
    return free


def fit_network(
    ranks: int, sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
    """Return (latency in s, bandwidth in bytes/s) with which `ring_seconds` fits measured points.

    Least squares of the relative errors, so that small messages count as much as large ones.
    Raises ValueError for fewer than two different sizes, or points that no such line fits: time
    must grow with the size. A latency below 0 comes out as 0.
    """
    if ranks < 2:
        raise ValueError(f"expected at least 2 ranks, one alone sends nothing, got {ranks}")
    x = torch.tensor(sizes, dtype=torch.float64)
    t = torch.tensor(seconds, dtype=torch.float64)
    if len(x) != len(t) or len(x.unique()) < 2 or not (t > 0).all():
        raise ValueError("expected two or more different sizes, and a time above 0 for each")
    steps = 2.0 * (ranks - 1)
    columns = torch.stack([torch.full_like(x, steps), steps / ranks * x], dim=1)
    latency, per_byte = torch.linalg.lstsq(columns / t[:, None], torch.ones_like(t)).solution
    if latency < 0:
        slope = columns[:, 1] / t
        latency, per_byte = torch.zeros(()), slope.sum() / slope.square().sum()
    if per_byte <= 0:
        raise ValueError("the times do not grow with the size: no bandwidth fits them")
    return latency.item(), 1 / per_byte.item()


def _require_network(ranks: int, size: float, latency: float, bandwidth: float) -> None:
    _require_ranks(ranks)
    if size < 0 or latency < 0 or not bandwidth > 0:
        raise ValueError(
            "expected size and latency of at least 0 and a bandwidth above 0, "
            f"got {size}, {latency}, {bandwidth}"
        )
