"""Chapter 13: GPU kernels in Triton; where there is no GPU, the same code is interpreted.

Each file has the same six blocks: the formula and its source, the letters for dimensions, the
kernels with the shape beside each pointer, the operators that autograd and `torch.compile` see,
the public function, and a module where a layer is wanted. Import what you need:
`from helpers.kernels.softmax import softmax`.
"""

import os

import torch

# Triton decides at `@triton.jit` whether a kernel is compiled or interpreted: set this before.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c as one instruction, as nvcc does

INTERPRETED: bool = os.environ.get("TRITON_INTERPRET") == "1"
