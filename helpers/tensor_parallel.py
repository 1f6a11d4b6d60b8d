"""Chapter 15: tensor parallel by hand, from two collectives, and by DTensor for the book's GPT."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import GPT, Block

# By hand: where the ranks meet, in forward and in backward


class _CopyToRanks(torch.autograd.Function):
    """Every rank computes with the same x, each for a part of the result."""

    @staticmethod
    def forward(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    @once_differentiable  # autograd would not see the all-reduce: a wrong second derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # x was used n times: its gradient is the sum of n
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    """Every rank has a term of the sum, and then all have the sum."""

    @staticmethod
    def forward(term: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = term.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # d(a + b)/da = 1, and every rank has the gradient of the sum already
        return gradient, None


class ColumnLinear(nn.Module):
    """A rank's columns of y = x Aᵀ + b: [..., in] -> [..., out / n], x the same on all ranks.

    `linear.weight` is [out, in], so columns of Aᵀ are rows of it: this rank keeps out / n of them,
    and as many numbers of the bias. Shoeybi et al., 2019, Megatron-LM: arXiv:1909.08053.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_own_part(linear.weight, 0, group))
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(_own_part(linear.bias, 0, group))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """The sum over ranks of x Aᵀ, plus b: [..., in / n] -> [..., out], the same on all ranks.

    x: this rank's part of the last dimension, as a `ColumnLinear` leaves it. This rank keeps in / n
    columns of `linear.weight`, and all of the bias, which is added once, after the sum.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_own_part(linear.weight, 1, group))
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        total = _SumOverRanks.apply(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


def _own_part(tensor: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    ranks = dist.get_world_size(group)
    if tensor.shape[dim] % ranks:
        raise ValueError(f"{tensor.shape[dim]} rows or columns cannot be split over {ranks} ranks")
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()


# By DTensor


def parallelize_mlp(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Split pairs of linear layers over a mesh of one dimension: columns, then rows; in place.

    What stands between the two of a pair must work number by number, as ReLU does. The last of an
    odd number of layers stays whole on every rank.
    """
    names = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    plan = {}
    for first, second in zip(names[::2], names[1::2], strict=False):
        plan[first] = ColwiseParallel()
        plan[second] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def parallelize_gpt(model: GPT, mesh: DeviceMesh, *, sequence: bool = False) -> GPT:
    """Split every block over a mesh of one dimension: heads, and the MLP's width; in place.

    Between blocks each rank has all of x. sequence=True gives each rank T / n of the tokens there,
    so that norms and residuals are not computed n times: an all-reduce becomes a reduce-scatter
    and an all-gather, which send as much (Korthikanti et al., 2022: arXiv:2205.05198). Embeddings,
    last norm and head stay whole on every rank, as DTensors too, or no norm could be taken of all
    gradients together. `block.qkv` becomes three layers (`SplitQKV`).
    Raises ValueError where n does not divide the heads, and for a model with dropout: each rank
    would drop other numbers of an x that must be the same on all.
    """
    ranks = mesh.size()
    if model.config.dropout:
        raise ValueError(f"expected a model without dropout, got {model.config.dropout}")
    if model.config.heads % ranks:
        raise ValueError(f"{model.config.heads} heads cannot be split over {ranks} ranks")
    for block in model.blocks:
        _parallelize_block(block, mesh, sequence)
    for whole in (model.tokens, model.positions, model.norm):
        _replicate(whole, mesh)
    model.head.weight = model.tokens.weight  # tied, as before: the DTensor is another parameter
    _replicate(model.head, mesh)
    if sequence:
        split = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
        join = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(model.blocks[0], mesh, split)
        parallelize_module(model.blocks[-1], mesh, join)
    return model


def _parallelize_block(block: Block, mesh: DeviceMesh, sequence: bool) -> None:
    tokens = Shard(1) if sequence else Replicate()  # of x [B, T, C] between the parts of a block
    # one gather for q, k and v together, and in backward one sum of their three gradients
    gather = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
    plan = {
        "qkv": gather,
        "qkv.q": ColwiseParallel(),  # whole heads: a rank's rows are those of heads / n
        "qkv.k": ColwiseParallel(),
        "qkv.v": ColwiseParallel(),
        "projection": RowwiseParallel(output_layouts=tokens),
        "mlp.0": ColwiseParallel(input_layouts=tokens),
        "mlp.2": RowwiseParallel(output_layouts=tokens),
    }
    if sequence:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    else:
        _replicate(block.norm1, mesh)
        _replicate(block.norm2, mesh)
    block.qkv = SplitQKV(block.qkv)
    block.config = replace(block.config, heads=block.config.heads // mesh.size())
    parallelize_module(block, mesh, plan)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make its parameters DTensors of which every rank has all; plain tensors go in and out."""

    def enter(_: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()

    distribute_module(module, mesh, input_fn=enter, output_fn=leave)


class SplitQKV(nn.Module):
    """Three linear layers in place of one with three times the rows: [B, T, C] -> [B, T, 3C].

    n equal parts of the one layer's rows would give the first rank all queries and some keys. Of
    three layers, each rank gets the queries, keys and values of its own heads.
    """

    def __init__(self, qkv: nn.Linear):
        super().__init__()
        self.q, self.k, self.v = (_like_rows(qkv, part) for part in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


def _like_rows(qkv: nn.Linear, part: int) -> nn.Linear:
    layer = nn.Linear(qkv.in_features, qkv.out_features // 3, device="meta")
    layer.weight = nn.Parameter(qkv.weight.detach().chunk(3)[part].clone())
    layer.bias = nn.Parameter(qkv.bias.detach().chunk(3)[part].clone())
    return layer


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join what `SplitQKV` split in a state dict, so that a plain GPT can load it.

    state: plain tensors (`full_tensor()` of each DTensor). Keys `….qkv.q.weight` and so on become
    `….qkv.weight`; the others stay, in their order.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block, inside, kind = name.rpartition(".q.")
        if inside:
            parts = [state[f"{block}.{part}.{kind}"] for part in "qkv"]
            found[f"{block}.{kind}"] = torch.cat(parts)
        elif not any(f".qkv.{part}." in name for part in "kv"):
            found[name] = tensor
    return found


# Counting


class Collectives(TorchDispatchMode):
    """Count the collectives of the operations inside, by name, those of DTensors too: `counts`.

    Like CommDebugMode, which fails before PyTorch 2.14 where a module is called twice, as the
    dropout of a `Block` is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor computes; what it sends comes here again
        name = op.__name__.split(".")[0]  # beside them are wait_tensor and the like
        if op.namespace == "_c10d_functional" and name.startswith(("all_", "reduce_", "broadcast")):
            self.counts[name] += 1
        return op(*args, **(kwargs or {}))
