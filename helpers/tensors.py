"""Chapter 02: where an element lies in memory, and which operations copy."""

from collections.abc import Sequence

from torch import Tensor


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Say whether a and b are views of one storage.

    `a.data_ptr() == b.data_ptr()` would miss views that begin elsewhere, such as `a[1:]`. Two
    tensors without elements share nothing: they store nothing.
    """
    pointer = a.untyped_storage().data_ptr()
    stores_something = pointer != 0
    return stores_something and pointer == b.untyped_storage().data_ptr()


def element_offset(index: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Return where element `index` lies in the storage, in elements from its beginning.

    index, stride: one number for each dimension. Raises ValueError when they differ in length.
    """
    if len(index) != len(stride):
        raise ValueError(f"expected {len(stride)} indices, one for each stride, got {list(index)}")
    return offset + sum(i * s for i, s in zip(index, stride, strict=True))
