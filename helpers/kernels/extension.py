"""Chapter 13: bias and GELU once more (see gelu.py), in C++, compiled on the spot.

Registered as PyTorch's own are: https://docs.pytorch.org/tutorials/advanced/cpp_custom_ops.html.
"""

import os
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import library, ops
from torch.utils import cpp_extension

from helpers.kernels import can_write

SOURCE = r"""
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
using at::Tensor;
template <bool BACK>  // z = x + b, F(z) the normal distribution: z F(z), or dy (F(z) + z F'(z))
Tensor run(const Tensor& x, const Tensor& b, const Tensor& dy) {
  TORCH_CHECK_VALUE(x.dim() == 2 && b.dim() == 1 && b.size(0) == x.size(1) &&
      b.dtype() == x.dtype(), "expected x [R, D] and bias [D] of one dtype, got ",
      x.dtype(), " ", x.sizes(), " and ", b.dtype(), " ", b.sizes());
  Tensor in = x.contiguous(), bias = b.contiguous(), up = dy.contiguous(), y = at::empty_like(in);
  const int64_t R = x.size(0), D = x.size(1);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "bias_gelu", [&] {
    using T = scalar_t;
    auto px = in.const_data_ptr<T>(), pb = bias.const_data_ptr<T>(), pu = up.const_data_ptr<T>();
    auto py = y.mutable_data_ptr<T>();
    at::parallel_for(0, R, 32768 / (D + 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first * D; i < last * D; i++) {
        const T z = px[i] + pb[i % D], F = T(0.5) * (1 + std::erf(z * T(0.7071067811865476)));
        const T density = T(0.3989422804014327) * std::exp(-z * z / 2);
        py[i] = BACK ? pu[i] * (F + z * density) : z * F;
      }
    });
  });
  return y;
}
Tensor forward(const Tensor& x, const Tensor& b) { return run<false>(x, b, x); }
TORCH_LIBRARY(book_cpp, m) {
  m.def("bias_gelu(Tensor x, Tensor b) -> Tensor", torch::dispatch(at::kCPU, forward));
  m.def("bias_gelu_backward(Tensor x, Tensor b, Tensor dy) -> Tensor",
        torch::dispatch(at::kCPU, run<true>));
}
"""


@cache  # an operator is defined once in a process: after changing SOURCE, restart the kernel
def load() -> Callable:
    """Compile SOURCE, or find it in the cache; return the operator GELU(x [R, D] + b [D]).

    On the CPU, float32 or float64. It raises ValueError when shapes or dtypes do not fit.
    """
    old = os.environ["PATH"]
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + old  # where pip puts ninja
    try:
        cpp_extension.load_inline(
            "book_cpp",
            [SOURCE],
            is_python_module=False,
            no_implicit_headers=True,
            build_directory=_fallback_folder(),
        )
    finally:
        os.environ["PATH"] = old
    for name in ("bias_gelu", "bias_gelu_backward"):
        library.register_fake(f"book_cpp::{name}", lambda x, *_: x.new_empty(x.shape))
    keep = {"setup_context": lambda ctx, inputs, output: ctx.save_for_backward(*inputs)}
    library.register_autograd("book_cpp::bias_gelu", _backward, **keep)
    return ops.book_cpp.bias_gelu


def _fallback_folder() -> str | None:
    """Return None, PyTorch's own choice, or a temporary folder where that cannot be written."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", cpp_extension.get_default_build_root()))
    return None if can_write(root) else tempfile.mkdtemp(prefix="torch_extensions_")


def _backward(ctx, dy):
    dx = ops.book_cpp.bias_gelu_backward(*ctx.saved_tensors, dy)
    return dx, dx.sum(0)
