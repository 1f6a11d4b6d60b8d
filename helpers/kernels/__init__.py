"""Chapter 13: GPU kernels in Triton; where there is no GPU, the same code is interpreted.

Each file has the same six blocks: the formula and its source, the letters for dimensions, the
kernels with the shape beside each pointer, the operators that autograd and `torch.compile` see,
the public function, and a module where a layer is wanted. Import what you need:
`from helpers.kernels.softmax import softmax`.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

# Triton decides at `@triton.jit` whether a kernel is compiled or interpreted, for its own library
# of functions when it is imported: set this before.
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    if "triton" in sys.modules:
        raise RuntimeError(
            "expected helpers.kernels to be imported before triton, got triton first (as by "
            "torch.compile): restart, and import helpers.kernels or set TRITON_INTERPRET=1 first"
        )
    os.environ["TRITON_INTERPRET"] = "1"
# a * b + c as one instruction, as nvcc does. Triton 3.9 warns where this is not set, because 3.10
# turns it off by default: then the kernels would need more instructions, and round differently.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# What Triton takes for yes (`triton.knobs`, which cannot be asked before triton is imported).
YES = ("1", "true", "on", "yes", "y")
INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "").lower() in YES


def can_write(folder: Path) -> bool:
    """Say whether a compiler could keep its files in `folder`, which is made if it is not there.

    Compilers keep them in the home folder, which not every machine lets one write. Asked by
    trying: the mode of a folder tells root nothing, and a whole file system may be read-only.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
