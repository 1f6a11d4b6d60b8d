"""Chapter 02: where an element lies in memory, and which operations copy."""

from collections.abc import Sequence

from torch import Tensor


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Say whether the storages of a and b overlap in memory.

    The beginnings alone do not tell: `a[1:].data_ptr()` lies behind `a.data_ptr()`, and the storage
    of `torch.from_numpy(a[1:].numpy())` begins in the middle of that of a. Two views of different
    parts, such as `a[:, 0]` and `a[:, 1]`, share their storage. Tensors that store nothing (empty
    ones, those on the meta device) share nothing.
    """
    first, second = a.untyped_storage(), b.untyped_storage()
    if 0 in (first.data_ptr(), second.data_ptr()):
        return False
    first_end = first.data_ptr() + first.nbytes()
    second_end = second.data_ptr() + second.nbytes()
    return first.data_ptr() < second_end and second.data_ptr() < first_end


def storage_id(tensor: Tensor) -> int:
    """Return a number that stands for the storage of `tensor`, the same for all views of it.

    As with Python's `id`, it holds as long as the storage is alive: another one may get the number
    afterwards. It is the address of the storage object in C++, not that of the data, which is 0 for
    every tensor that stores nothing, empty or fake ones for example. So it tells storages apart,
    but not whether two of them lie over the same memory (`shares_storage`). Raises PyTorch's
    NotImplementedError for a tensor without a storage of its own, such as a sparse one.
    """
    return tensor.untyped_storage()._cdata  # private, but public names give only data_ptr()


def element_offset(index: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Return where element `index` lies in the storage, in elements from its beginning.

    index, stride: one number for each dimension. Raises ValueError when they differ in length.
    """
    if len(index) != len(stride):
        raise ValueError(f"expected {len(stride)} indices, one for each stride, got {list(index)}")
    return offset + sum(i * s for i, s in zip(index, stride, strict=True))
