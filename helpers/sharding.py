"""Chapter 15: FSDP2 on the book's GPT, clipping on any mesh, and what each rank then holds."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from helpers.memory import PeakMemory

# Fully sharded data parallel


def shard(model: nn.Module, **options: Any) -> FSDPModule:
    """Shard every block of `model.blocks`, then what is left; return the model, changed in place.

    Each call of `fully_shard` makes a group of parameters that are gathered and freed together: a
    block at a time, and embeddings, last norm and head with the model itself. Build the optimizer
    afterwards. options: those of `fully_shard`, for all groups: `mesh`, `mp_policy`,
    `offload_policy` and `reshard_after_forward`: True frees each group as soon as its forward is
    over and gathers it again in backward (ZeRO-3), False keeps it for backward (ZeRO-2). Without
    it blocks are freed, and the group of the model itself is not: backward begins with it.
    Raises ValueError for a model without blocks.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(f"expected a model with a ModuleList `blocks`, got {type(model).__name__}")
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def full_tensors(tensors: Any) -> list[Tensor]:
    """Gather each DTensor among `tensors` on every rank, as a plain tensor; all ranks must call."""
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


# Clipping


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], limit: float, group: dist.ProcessGroup | None = None
) -> float:
    """Scale the gradients down until their common norm is at most `limit`; return it as it was.

    As `torch.nn.utils.clip_grad_norm_`, and also where that raises an error or counts too little:
    parameters may be DTensors on several meshes, and ordinary tensors, of which every rank must
    have all. group: ranks with other parameters, such as the stages of a pipeline: their squares
    are added. Every rank must call it, with at least one parameter that has a gradient.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    squares = []
    for parameter in parameters:
        norm = parameter.grad.norm()
        if isinstance(norm, DTensor):  # so far each rank has the norm of its own shard
            placements = list(norm.placements)
            for dimension in range(norm.device_mesh.ndim):
                placements[dimension] = Replicate()
                norm = norm.redistribute(placements=placements)  # combined along this dimension
            norm = norm.to_local()
        squares.append(norm.square())
    total = torch.stack(squares).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    # foreach=False: one tensor at a time, or DTensors and ordinary tensors would be mixed
    nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=False)
    return norm.item()


# What a rank holds


def bytes_held(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return this rank's bytes now: parameters, gathered, gradients, optimizer, buckets.

    Counted are storages, each once (`helpers.memory.PeakMemory`), so padding counts, too.
    parameters: those that the optimizer updates; of a sharded model, this rank's part. gathered:
    whole copies of sharded parameters, which are there while FSDP computes with them. gradients:
    this rank's. optimizer: its state; of a `ZeroRedundancyOptimizer`, this rank's. buckets: those
    of DDP, as far as gradients are not views of them (`gradient_as_bucket_view`).
    """
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim  # which updates this rank's part; the wrapper broadcasts it
    with PeakMemory(nn.ParameterList(owned), optimizer, *model.parameters()) as memory:
        now = memory.by_category(at=0)
    held = {name: now[name] for name in ("parameters", "gradients", "optimizer")}
    buckets = _bucket_bytes(model, gradients=held["gradients"])
    return {
        "parameters": held["parameters"],
        "gathered": now["other"],
        **held,
        "buckets": buckets,
    }


def _bucket_bytes(model: nn.Module, gradients: int) -> int:
    """Return the bytes of DDP's buckets that `gradients` bytes of gradients do not share."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    facts = model._get_ddp_logging_data()  # the buckets are in C++, no tensor of them is public
    sizes = sum(int(size) for size in facts["bucket_sizes"].split(", "))
    return sizes - gradients if int(facts["gradient_as_bucket_view"]) else sizes


class BytesByMoment:
    """Note `bytes_held` during a step: when a module's forward begins, and where `mark` is called.

    with BytesByMoment(model, optimizer, model.blocks) as moments:
        loss = loss_fn(model, batch)
        moments.mark("end of forward")
    moments.found  # [("blocks.0", {"parameters": …, "gathered": …}), …]
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, modules: Any = ()):
        self.model, self.optimizer, self.modules = model, optimizer, list(modules)
        self.found: list[tuple[str, dict[str, int]]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "BytesByMoment":
        names = {module: name for name, module in self.model.named_modules()}
        for module in self.modules:
            # FSDP's own hook comes first: it has gathered the parameters by then
            hook = module.register_forward_pre_hook(self._note(names[module]))
            self._hooks.append(hook)
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def mark(self, name: str) -> None:
        """Note what is held now under this name."""
        self.found.append((name, bytes_held(self.model, self.optimizer)))

    def _note(self, name: str) -> Callable[..., None]:
        return lambda *_: self.mark(name)
