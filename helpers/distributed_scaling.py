"""Chapter 14: two more all-reduces, through one rank and in two levels; buckets beside backward."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

# Through rank 0: what a ring improves on


def rank0_all_reduce(tensor: Tensor) -> int:
    """Replace `tensor` by the sum over all ranks, added by rank 0; return the bytes sent here.

    Contiguous, with the same shape and dtype on all ranks. Rank 0 sends n − 1 times the tensor.
    """
    ranks = dist.get_world_size()
    if dist.get_rank() != 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return tensor.nbytes
    arrived = torch.empty_like(tensor)
    for other in range(1, ranks):
        dist.recv(arrived, src=other)
        tensor += arrived
    for other in range(1, ranks):
        dist.send(tensor, dst=other)
    return (ranks - 1) * tensor.nbytes


def rank0_seconds(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of `rank0_all_reduce`: 2 (n − 1) messages, one after the other."""
    return 2 * (ranks - 1) * (latency + size / bandwidth)


# Over nodes: two levels


def two_level_groups(
    per_node: int, device_type: str = "cpu"
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return (the ranks of this rank's node, the ranks with its local rank on all nodes).

    Every rank has to call it. Raises ValueError where the nodes would not be equally large.
    """
    ranks = dist.get_world_size()
    if per_node < 1 or ranks % per_node:
        raise ValueError(f"{ranks} ranks cannot be divided into nodes of {per_node}")
    shape = (ranks // per_node, per_node)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("inter", "intra"))
    return mesh.get_group("intra"), mesh.get_group("inter")


def two_level_all_reduce(
    tensor: Tensor, intra: dist.ProcessGroup, inter: dist.ProcessGroup
) -> None:
    """Replace the vector `tensor` by the sum over all ranks; groups are `two_level_groups`'.

    Contiguous. Raises ValueError where the size of a node does not divide the elements.
    """
    per_node = dist.get_world_size(intra)
    if len(tensor) % per_node:
        raise ValueError(f"{len(tensor)} elements cannot be shared equally by {per_node} ranks")
    part = tensor.new_empty(len(tensor) // per_node)
    dist.reduce_scatter_tensor(part, tensor, group=intra)
    dist.all_reduce(part, group=inter)
    dist.all_gather_into_tensor(tensor, part, group=intra)


# Buckets, in time


def equal_buckets(size: int, buckets: int) -> list[int]:
    """Return `buckets` sizes that differ by one byte at most, and add up to `size` bytes."""
    if not 1 <= buckets <= size:
        raise ValueError(f"expected from 1 bucket to one for each byte of {size}, got {buckets}")
    ends = [size * number // buckets for number in range(buckets + 1)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def bucket_spans(
    forward: float, backward: float, buckets: Sequence[int], reduce: Callable[[int], float]
) -> list[tuple[float, float]]:
    """Return (start, end) in seconds of each bucket's all-reduce.

    The arguments and the rules are those of `collectives.step_seconds`, which returns the last end.
    """
    spans = []
    total, complete, free = sum(buckets), 0, 0.0
    for size in buckets:
        complete += size
        ready = forward + backward * complete / total
        start = max(ready, free)  # not before the previous one has ended
        free = start + reduce(size)
        spans.append((start, free))
    return spans
