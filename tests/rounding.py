"""How far rounding may take a computation from its exact result, whatever the order of its sums.

Every operation that PyTorch computes, backward and updates included, is traced; each element of
each result may be off by some e with |e| ≤ k u s: k roundings, u half a unit in the last place of
float32, and s its size if nothing in it cancelled (for a matrix product |A| |B|; Higham, Accuracy
and Stability of Numerical Algorithms, §3). Then autograd, in float64, gives d(result)/de for every
e; the sum of |d(result)/de| k u s is the bound, to first order. Two float32 computations of the
same thing are at most twice the bound apart.
"""

import torch
from torch._decomp import core_aten_decompositions
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

UNIT = torch.finfo(torch.float32).eps / 2
EXTRA = 8  # roundings of partial sums, scalings and copies to float16-free buffers: a few, not K
SECOND_ORDER = 1.01  # what first order leaves out: products of errors, each about 1e-5 of its size

aten = torch.ops.aten
EXACT = {  # views, copies, choices: no rounding
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "expand",
    "clone", "copy", "alias", "detach", "slice", "select", "cat", "split", "split_with_sizes",
    "unbind", "neg", "abs", "relu", "where", "gather", "embedding", "index", "amax", "max", "full",
    "full_like", "zeros", "zeros_like", "ones_like", "scalar_tensor", "select_scatter",
    "slice_scatter", "_to_copy", "constant_pad_nd", "masked_fill", "lift_fresh_copy", "sign",
    "scatter", "flip", "clamp", "new_zeros", "new_full", "as_strided", "slice_backward", "maximum",
    "logical_not", "squeeze_copy", "unfold", "index_select", "bitwise_not", "threshold_backward",
}  # fmt: skip
ONCE = {"add", "sub", "mul", "div", "sqrt", "reciprocal"}  # correctly rounded
FUNCTIONS = {"exp", "log", "erf", "tanh", "rsqrt", "pow"}  # a few units: those of Sleef and libm
SUMS = {"sum", "mean", "cumsum"}


def bounds(function, *inputs, chunk=256):
    """Return, for every element of the tensors that `function` returns, the bound; float64."""
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, _double, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        graph = make_fx(function, decomposition_table=_decompositions())(*inputs)
    with torch.enable_grad():
        run = _Perturbed(graph)
        results = run.run(*torch.utils._pytree.tree_leaves(inputs))
    found = []
    for result in torch.utils._pytree.tree_leaves(results):
        flat = result.reshape(-1)
        total = torch.zeros_like(flat)
        for start in range(0, len(flat), chunk):
            part = torch.eye(len(flat), dtype=flat.dtype)[start : start + chunk]
            slopes = torch.autograd.grad(
                flat, run.errors, part, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
            for slope in slopes:
                if slope is not None:
                    total[start : start + chunk] += slope.reshape(len(part), -1).abs().sum(1)
        found.append((SECOND_ORDER * UNIT * total).view(result.shape).detach())
    return found


def _double(tensor):
    tensor = tensor.detach()
    return tensor.double() if tensor.is_floating_point() else tensor


def _decompositions():
    table = dict(core_aten_decompositions())
    more = [aten.gelu.default, aten.gelu_backward.default]
    more += [aten.native_layer_norm_backward.default, aten._softmax.default]
    more += [aten._softmax_backward_data.default, aten._log_softmax.default]
    more += [aten._log_softmax_backward_data.default, aten.addmm.default]
    more += [aten.embedding_dense_backward.default, aten.nll_loss_forward.default]
    own = {aten.native_layer_norm.default: _layer_norm}
    return table | torch._decomp.get_decompositions(more) | own


def _layer_norm(x, shape, weight, bias, eps):
    dims = list(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    return centred * scale * weight + bias, mean, scale


class _Perturbed(Interpreter):
    """Run a graph with an error of size 0 added to every result that rounds."""

    def __init__(self, graph):
        super().__init__(graph)
        self.errors = []

    def run(self, *flat):
        return super().run(*flat, enable_io_processing=False)

    def call_function(self, target, args, kwargs):
        if target is aten.detach.default:  # of weights between steps: errors go through
            return args[0]
        result = super().call_function(target, args, kwargs)
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        size = self._size(target, args, kwargs, result)
        if size is None:
            return result
        # e is in units of the size: d(result)/de holds the size already
        error = torch.zeros(result.shape, dtype=result.dtype, requires_grad=True)
        self.errors.append(error)
        finite = torch.where(size.isfinite(), size, 0.0)  # the mask of attention is exact
        return result + error * finite.detach()

    def _size(self, target, args, kwargs, result):
        """Roundings times the size that the result would have if nothing in it cancelled."""
        name = target._schema.name.partition("::")[2]
        if name in EXACT:
            return None
        if name in ONCE:
            return result.abs()
        if name in FUNCTIONS:
            return 4 * result.abs()
        if name in SUMS or name in ("mm", "bmm", "index_put"):
            absolute = [a.abs() if _is_float(a) else a for a in args]
            if name in ("mm", "bmm"):
                return (args[0].shape[-1] + EXTRA) * target(*absolute, **kwargs)
            if name == "index_put":  # backward of an embedding: up to so many rows meet
                return (args[2].shape[0] * args[2].shape[1] + EXTRA) * target(*absolute, **kwargs)
            terms = max(args[0].numel() // max(result.numel(), 1), 1)
            return (terms + EXTRA) * target(*absolute, **kwargs)
        raise NotImplementedError(f"{name}: how often does it round?")


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()
