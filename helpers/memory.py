"""Chapter 09: the bytes that autograd saves for the backward pass, counted exactly."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensors(saved_tensors_hooks):
    """Watch what operations save for backward while this context is open.

        with SavedTensors(exclude=model.parameters()) as saved:
            loss = model(x).sum()
        saved.bytes  # 0 as soon as `loss.backward()` has freed them

    Each storage counts once, whoever shares it; `exclude` names tensors that do not count, such
    as parameters. Not seen: Python numbers, and what selective activation checkpointing keeps.
    While any saved-tensor hook is on, PyTorch does not check versions: in-place edits go unseen.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()):
        self._excluded = {_storage(t) for t in exclude}
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        super().__init__(self._pack, lambda packed: packed)

    def __enter__(self) -> "SavedTensors":
        super().__enter__()  # returns None; `with … as saved` needs the object
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        packed = tensor.detach()  # with its grad_fn it would keep the graph alive for ever
        self._alive.add(packed)  # autograd drops this object when it no longer needs it
        return packed

    @property
    def tensors(self) -> list[Tensor]:
        """What is saved now, one tensor for each storage, in no particular order."""
        found = {_storage(t): t for t in self._alive}
        return [tensor for storage, tensor in found.items() if storage not in self._excluded]

    @property
    def bytes(self) -> int:
        """Bytes of the storages saved now."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


def _storage(tensor: Tensor) -> int:
    """The storage itself, as a number: under `FakeTensorMode` its data has no address."""
    return tensor.untyped_storage()._cdata
