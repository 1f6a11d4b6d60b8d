"""Chapter 09: less memory: exact accumulation, checkpointing from outside, the largest batch."""

import functools
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from helpers.tensors import storage_id

# ---- gradient accumulation


def in_groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` batches; the last list may be shorter, and no batch is lost.

    Python 3.12 has this as `itertools.batched`, with tuples.
    """
    if size < 1:
        raise ValueError(f"expected groups of at least 1 batch, got {size}")
    iterator = iter(batches)
    while group := list(itertools.islice(iterator, size)):
        yield group


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_sum: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
) -> Tensor:
    """Add the gradient of the mean loss over all `micro_batches` to `.grad`; return that loss.

    loss_sum(model, batch) -> the sum, not the mean, of the losses of all items in the batch.
    count(batch) -> how many items that is: samples, or tokens that are not padding.

    Each item has the weight 1 / total, in whatever micro-batch it is, so the gradient is that of
    one large batch up to rounding. This needs a loss that is a sum over items, each computed by
    itself: with batch normalization it is not. One process; several need the total of all.
    """
    total = sum(count(batch) for batch in micro_batches)
    if total < 1:
        raise ValueError(f"expected at least one item that counts, got {total}")
    losses = []
    for batch in micro_batches:
        loss = loss_sum(model, batch) / total
        loss.backward()  # now, not after the loop: it frees what this micro-batch has saved
        losses.append(loss.detach())
    return torch.stack(losses).sum()


# ---- activation checkpointing


class Checkpointed:
    """Recompute the inside of some modules in the backward pass; the model's code stays as it is.

        change = Checkpointed(model.blocks)  # or model.blocks[::2], or [b.mlp for b in …]
        ...
        change.remove()

    Also a context manager. Until it is removed, each module refers to itself, so that a model that
    is no longer used is freed by Python's garbage collector only. Names in the `state_dict`,
    `deepcopy` and hooks are not affected; the hooks of modules inside a block run twice, because
    the block does.

    policy: what to keep all the same, see `create_selective_checkpoint_contexts`: a list of
    operations such as `torch.ops.aten.mm.default`, or a function of (context, operation, *args).
    """

    def __init__(self, modules: Iterable[nn.Module], policy: list | Callable | None = None):
        self.modules = list(modules)
        changed = [type(m).__name__ for m in self.modules if "forward" in vars(m)]
        if changed:
            raise ValueError(f"their forward is replaced already: {', '.join(changed)}")

        context_fn = noop_context_fn
        if policy is not None:
            context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
        for module in self.modules:
            # an attribute of the object comes before the method of its class
            module.forward = functools.partial(_checkpointed, module, context_fn)

    def remove(self) -> None:
        """Give the modules their own forward back; calling it twice does no harm."""
        for module in self.modules:
            vars(module).pop("forward", None)

    def __enter__(self) -> "Checkpointed":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _checkpointed(module: nn.Module, context_fn: Callable, *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(type(module).forward, module)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


def group_peak(layers: int, ratio: float, size: int) -> float:
    """Return the most that is alive in backward with groups of `size` blocks, in block inputs.

    ratio: what a block keeps inside, divided by the size of its input. Alive are the inputs of all
    groups, and the inside of the one group that is recomputed.
    """
    if not 1 <= size <= layers:
        raise ValueError(f"expected a group of 1 to {layers} blocks, got {size}")
    return math.ceil(layers / size) + size * ratio


# ---- offload


class Offload(saved_tensors_hooks):
    """Keep what is saved for backward in host memory until the backward pass needs it.

        with Offload(exclude=model.parameters(), at_least=2**20) as offload:
            loss = model(x).sum()
        loss.backward()
        offload.bytes  # so many went to the host, and as many came back

    PyTorch's own `torch.autograd.graph.save_on_cpu` moves everything: weights as well, which stay
    on the device anyway, and small tensors, for which the trip costs more than it saves.
    pin_memory: page-locked host memory, so that the host does not wait for copies (CUDA). They are
        queued on the current stream, so they do not overlap with what the device computes.
    """

    def __init__(
        self, exclude: Iterable[Tensor] = (), at_least: int = 0, *, pin_memory: bool = False
    ):
        self.bytes = 0
        self._excluded = {storage_id(t) for t in exclude}
        self._at_least = at_least
        self._pin = pin_memory
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> "Offload":
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        size = tensor.nbytes  # of a view only what it shows, not its whole storage
        if size < self._at_least or storage_id(tensor) in self._excluded:
            return tensor.device, tensor.detach()  # with its grad_fn the graph would hold itself
        self.bytes += size
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pin)
        return tensor.device, host.copy_(tensor, non_blocking=self._pin)

    def _unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=self._pin)


# ---- out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there was no memory left, on a GPU or in the host.

    `torch.OutOfMemoryError` is raised by the caching allocator of an accelerator. A CPU, a GPU
    library and a driver raise a plain RuntimeError, which only its text tells from others.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    texts = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",  # Windows, Android
        "MPS backend out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def largest_batch(fits: Callable[[int], bool], limit: int = 2**20) -> int:
    """Return the largest size up to `limit` for which `fits(size)` is true; 0 if 1 is too large.

    fits: makes one whole training step with that batch size. False, or running out of memory,
        means that it does not fit; any other error is passed on. It must build everything it needs
        inside, because what the caller holds stays in memory.

    The sizes are doubled until one does not fit, and the gap is then halved: about 2 log₂ trials.
    This finds the largest size if every size below one that fits also fits. Memory need not be
    like that, for example when a library chooses its algorithm by size. The result has at
    least been tried twice; a size that fits only once is given a warning and one less is tried.
    """
    if limit < 1:
        raise ValueError(f"expected a limit of at least 1, got {limit}")
    low, high = 0, 1  # low fits, high is the next to try
    while high <= limit and _attempt(fits, high):
        low, high = high, 2 * high
    high = min(high, limit + 1)  # the smallest size known, or not allowed, to fit

    while high - low > 1:
        middle = (low + high) // 2
        if _attempt(fits, middle):
            low = middle
        else:
            high = middle

    while low > 0 and not _attempt(fits, low):
        message = f"size {low} fitted once and then did not: the result is not certain"
        warnings.warn(message, stacklevel=2)
        low -= 1
    return low


def _attempt(fits: Callable[[int], bool], size: int) -> bool:
    try:
        return bool(fits(size))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Only here is `error` gone, and with its traceback the frames of `fits` and their tensors.
    release()
    return False


def release() -> None:
    """Free tensors in reference cycles, then give cached device memory back to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
