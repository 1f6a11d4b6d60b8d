"""Chapter 02: strides, broadcasting step by step, which operation copies."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Say whether both read one storage; `a.data_ptr()` alone misses views such as `a[1:]`."""
    pointer = a.untyped_storage().data_ptr()
    return pointer != 0 and pointer == b.untyped_storage().data_ptr()  # 0: nothing is stored


def element_offset(index: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Return where element `index` lies in the storage, counted in elements."""
    if len(index) != len(stride):
        raise ValueError(f"expected {len(stride)} indices, one for each stride, got {list(index)}")
    return offset + sum(i * s for i, s in zip(index, stride, strict=True))


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """Return the common shape, as `torch.broadcast_shapes`: align right, equal or 1 in each place.

    Raises ValueError naming the first place, from the right, where two sizes disagree.
    """
    result = []
    for place, sizes in enumerate(zip_longest(*map(reversed, shapes), fillvalue=1), 1):
        wanted = set(sizes) - {1}
        if len(wanted) > 1 or min(sizes) < 0:
            got = ", ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"dimension -{place}: expected equal sizes or 1, got {sizes} in {got}")
        result.append(wanted.pop() if wanted else 1)
    return torch.Size(reversed(result))
