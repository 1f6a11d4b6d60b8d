"""Chapter 09: the bytes of training, counted exactly: what is saved, what lives, the peak."""

import copy
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as norm_types
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from helpers.tensors import storage_id

# Names above that begin with an underscore are private and may change; of PyTorch 2.15 nothing
# public fakes a model that exists, or says which loops an optimizer chooses and who calls an
# operation. `SavedTensors` needs none of them.
TORCH = os.path.dirname(torch.__file__)
HIDE_IN_PLACE = {  # what autograd computes in place, but under a mode out of place
    torch.ops.aten.add.Tensor,  # where gradients meet
    torch.ops.aten.index_put.default,  # backward of x[indices]
    torch.ops.aten.index_add.default,  # of index_select
    torch.ops.aten.put.default,  # of take
    torch.ops.aten.scatter.src,  # of max, sort, topk along a dimension
    torch.ops.aten.scatter_add.default,  # of gather
}
ENGINE = _engine_run_backward.__code__  # from here Python calls autograd's engine
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "activations", "other")


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
        self._excluded = {storage_id(t) for t in exclude}
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
        found = {storage_id(t): t for t in self._alive}
        return [tensor for storage, tensor in found.items() if storage not in self._excluded]

    @property
    def bytes(self) -> int:
        """Bytes of the storages saved now."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


class PeakMemory(TorchDispatchMode):
    """Count the bytes of all tensors that are alive, after every operation in this context.

        with PeakMemory(model, optimizer) as memory:
            memory.mark("forward")
            loss = model(x).sum()
            memory.mark("backward")
            loss.backward()
        memory.peak           # the most bytes alive at once
        memory.by_category()  # what they were

    existing: modules (with their gradients), optimizers (with their state), tensors, or lists,
    tuples and dicts of these (not generators: `list(model.parameters())`): what is there before
    and counts from the start; numbers and other things among them are passed over. Memory that
    operations inside the context make counts from then on, until it is freed; other memory from
    outside never counts. Each storage counts once, with all its bytes, whoever shares it.
    device: count only what lies there, such as "cuda" or "cuda:1"; None: on all devices together.

    The numbers are exact and the same on every machine, because they are those of tensors. So
    these do not count:
    - what an operation takes and gives back before it returns: the scratch memory of oneDNN,
      cuBLAS and cuDNN, copies that a kernel makes for itself;
    - what an allocator adds when it rounds sizes up (`helpers.allocator`);
    - storages made without an operation: by `torch.load`, `torch.UntypedStorage` and NumPy
      (`torch.from_numpy` shares NumPy's memory), and the states of random generators, of which
      checkpointing keeps one per block (5,056 bytes in the memory of the host).

    It sees the backward pass as well, also the threads in which autograd runs it for a GPU, since
    autograd hands the modes on to them; other threads it does not see. Code from `torch.compile`
    runs uncompiled in here. Wrapped and sparse tensors count as the tensors that they hold;
    mkldnn's opaque ones do not count.

    What counts is a run without this context. Where gradients of a tensor meet, autograd adds the
    second into the first if that has no other owner; under any mode it makes a third tensor, which
    is left out here (`_hides_in_place`). In a few cases the peak of backward is too high: formulas
    that go another way under a mode (`prod`, `cumprod`), a dense gradient that meets a sparse one.

    live: bytes alive now. peak: the most so far, taken after operations.
    timeline: (operation, live bytes right after it); the first entry is ("start", bytes).
    marks: (name, position in `timeline`) of each call of `mark`.
    """

    def __init__(self, *existing: Any, device: torch.device | str | None = None):
        super().__init__()
        for thing in tree_iter(existing, is_leaf=_is_known):
            if isinstance(thing, Iterator):
                name = type(thing).__name__
                raise ValueError(f"expected modules, optimizers, tensors or a list, got a {name}")
        self._existing = existing
        self._device = None if device is None else torch.device(device)
        self._blocks: list[_Block] = []
        self._alive: dict[int, _Block] = {}  # of each storage, by its address in C++
        self._cleanup = ExitStack()
        self._node: tuple | None = None  # of the graph, whose backward runs now
        self._node_began = 0  # in the timeline
        self._written: _Written | None = None  # the last operation, if it `_hides_in_place`
        self.live = self.peak = 0
        self.timeline: list[tuple[str, int]] = []
        self.marks: list[tuple[str, int]] = []

    def __enter__(self) -> "PeakMemory":
        if self.timeline:
            raise RuntimeError("PeakMemory counts once: make a new one for another `with`")
        for thing in tree_iter(self._existing, is_leaf=_is_known):
            self._add_existing(thing)
        self._existing = ()  # or nothing of it could be freed in here
        self._record("start")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._cleanup.close()

    def mark(self, name: str) -> None:
        """Begin a phase: what follows, until the next mark, belongs to `name`."""
        self.marks.append((name, len(self.timeline)))

    def phases(self) -> dict[str, int]:
        """Return the peak in bytes of each marked phase; a name used twice counts as one."""
        ends = [start for _, start in self.marks[1:]] + [len(self.timeline)]
        peaks: dict[str, int] = {}
        for (name, start), end in zip(self.marks, ends, strict=True):
            for _, live in self.timeline[start:end]:
                peaks[name] = max(live, peaks.get(name, 0))
        return peaks

    def by_category(self, at: int | None = None) -> dict[str, int]:
        """Return the bytes alive at a position of the timeline (default: the peak), by purpose.

        parameters, buffers: those of the modules in `existing`. gradients: what became the `.grad`
        of their parameters, from when it was made. optimizer: the state of optimizers in
        `existing`. activations: made while operations were recorded for backward, or recomputed
        by checkpointing. other: the rest, such as the batch, gradients on their way, what an
        optimizer needs for a moment. A purpose that is known later holds for the whole life.
        Raises ValueError for a position that the timeline does not have, such as -1.
        """
        count = len(self.timeline)
        if at is None and count:
            at = max(range(count), key=lambda i: self.timeline[i][1])
        if at not in range(count):
            raise ValueError(f"expected a position in a timeline of {count} entries, got {at}")
        found = dict.fromkeys(CATEGORIES, 0)
        for block in self._blocks:
            if block.born <= at and (block.died is None or at < block.died):
                found[block.category] += block.bytes
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):  # questions and notes: no memory
            return func(*args, **kwargs)

        self._written = None  # its first operand lives on, so it did need a new tensor
        self._follow_backward()
        given = {storage_id(t): t.untyped_storage() for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)

        for key, storage in given.items():
            self._resize(key, storage)  # `out=`, `resize_`
        # `torch.tensor` and `from_numpy` end in `lift_fresh`, which returns its own operand: there
        # the memory is new; but NumPy's, which cannot be resized, stays NumPy's
        fresh = func is torch.ops.aten.lift_fresh.default
        borrowed = fresh and not all(s.resizable() for s in given.values())
        if not borrowed:
            purpose = "activations" if torch.is_grad_enabled() else "other"
            self._add(out, purpose, without=() if fresh else given)

        peak = self.peak
        self._record(str(getattr(func, "overloadpacket", func)))
        if self._hides_in_place(func, args, kwargs):
            self._written = _Written(storage_id(args[0]), storage_id(out), peak)
        return out

    def _follow_backward(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:  # not the node itself: that would keep its part of the graph
            node = torch._C._current_graph_task_id(), node._sequence_nr(), node.name()
        if node != self._node:
            self._node, self._node_began = node, len(self.timeline)

    def _hides_in_place(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Whether without a mode the engine may have written this result into its first operand.

        It adds the gradients that meet at a node in `accumulate`, torch/csrc/autograd/
        input_buffer.cpp: in place, if grad mode is off, both are ordinary tensors, the first one
        is dense, and neither it nor its storage has another owner. Formulas of backward do alike
        with the zeros into which they write a gradient (torch/csrc/autograd/FunctionsManual.cpp).
        Both ask `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h): under a mode each tensor
        counts as special, and they make a new one. Another owner shows itself afterwards: without
        one the operand dies at once, and `_take_over` is called.

        Really out of place are sums inside of formulas, of what they have made themselves (the
        engine adds to what came from another node, or if an operand was given twice, as in
        x * x), and sums in Python code: hooks, `backward` of a `torch.autograd.Function`.
        """
        node = torch._C._current_autograd_node()
        if func not in HIDE_IN_PLACE or node is None or torch.is_grad_enabled() or kwargs:
            return False
        first, others = args[0], [t for t in tree_iter(args[1:]) if isinstance(t, Tensor)]
        if not others or not all(_is_ordinary(t) for t in (first, *others)):
            return False
        if first._is_view() or not is_dense(first):  # a view holds its base: another owner
            return False
        key = storage_id(first)
        if key not in self._alive or key in map(storage_id, others):
            return False
        own = self._alive[key].born >= self._node_began
        if func is torch.ops.aten.add.Tensor:
            edges = node.next_functions
            right = not own or len(edges) > len(set(edges))
        else:
            right = own
        return right and _is_called_by_autograd()

    def _take_over(self, block: "_Block") -> None:
        """Let a result have the memory of its first operand, which has just died."""
        self.live -= self._blocks.pop().bytes  # the result's own: without a mode it is not made
        self._alive[self._written.result] = block
        self.timeline[-1] = (self.timeline[-1][0], self.live)
        self.peak = max(self._written.peak_before, self.live)
        self._written = None

    def _record(self, operation: str) -> None:
        self.timeline.append((operation, self.live))
        self.peak = max(self.peak, self.live)

    def _add_existing(self, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            for parameter in thing.parameters():
                self._add(parameter, "parameters")
                self._watch_gradient(parameter)
            for buffer in thing.buffers():
                self._add(buffer, "buffers")
        elif isinstance(thing, Optimizer):
            self._add(list(thing.state.values()), "optimizer")
            hook = thing.register_step_post_hook(
                lambda *_: self._add(list(thing.state.values()), "optimizer")
            )
            self._cleanup.callback(hook.remove)
        elif isinstance(thing, Tensor):
            self._add(thing, "other")
            self._watch_gradient(thing)

    def _watch_gradient(self, tensor: Tensor) -> None:
        if tensor.grad is not None:
            self._add(tensor.grad, "gradients")
        if tensor.is_leaf and tensor.requires_grad:
            hook = tensor.register_post_accumulate_grad_hook(
                lambda owner: self._add(owner.grad, "gradients")
            )
            self._cleanup.callback(hook.remove)

    def _add(self, tree: Any, category: str, without: Collection[int] = ()) -> None:
        """Count the storages in `tree` that are not counted yet; those that are get a purpose."""
        for tensor in _tensors(tree):
            key = storage_id(tensor)
            if key in without or not _lies_on(self._device, tensor):
                continue
            block = self._alive.get(key)
            if block is None:
                storage = tensor.untyped_storage()
                self._begin(key, storage.nbytes(), category)
                end = weakref.finalize(storage, self._end, key)
                end.atexit = False  # when Python ends, nobody asks for the count any more
            elif block.category in ("activations", "other"):
                block.category = category

    def _resize(self, key: int, storage: torch.UntypedStorage) -> None:
        block = self._alive.get(key)
        if block is not None and block.bytes != storage.nbytes():
            self._end(key)
            self._begin(key, storage.nbytes(), block.category)

    def _begin(self, key: int, size: int, category: str) -> None:
        block = _Block(size, category, born=len(self.timeline))
        self._alive[key] = block
        self._blocks.append(block)
        self.live += size

    def _end(self, key: int) -> None:
        block = self._alive.pop(key)
        if self._written is not None and key == self._written.operand:
            self._take_over(block)
            return
        block.died = len(self.timeline)
        self.live -= block.bytes


class _Written(NamedTuple):
    """An operation that without a mode may write its result into its first operand.

    operand, result: `storage_id` of both. peak_before: the peak without this operation.
    """

    operand: int
    result: int
    peak_before: int


@dataclass(slots=True)
class _Block:
    """A storage; it is alive at the positions of the timeline from `born` up to before `died`."""

    bytes: int
    category: str
    born: int
    died: int | None = None


def _is_known(thing: Any) -> bool:
    """Whether this is looked into by us, not by `tree_iter`."""
    return isinstance(thing, (nn.Module, Optimizer))


def _is_ordinary(thing: Any) -> bool:
    """Whether this is a tensor of no special kind; a fake one stands for such a tensor."""
    strided = isinstance(thing, Tensor) and thing.layout is torch.strided
    return strided and type(thing) in (Tensor, nn.Parameter, FakeTensor)


def _is_called_by_autograd() -> bool:
    """Whether between autograd's engine and here only PyTorch and modes are being called."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not ENGINE:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if not (file == __file__ or name == "__torch_dispatch__" or file.startswith(TORCH)):
            return False
        frame = frame.f_back
    return True


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in `tree` that have a storage; a wrapped or sparse one holds several."""
    for tensor in tree_iter(tree):
        if not isinstance(tensor, Tensor) or tensor.layout is torch._mkldnn:
            continue
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _tensors([getattr(tensor, name) for name in names])
        elif tensor.layout is torch.sparse_coo:
            yield from _tensors([tensor._indices(), tensor._values()])
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from _tensors([tensor.crow_indices(), tensor.col_indices(), tensor.values()])
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from _tensors([tensor.ccol_indices(), tensor.row_indices(), tensor.values()])
        else:
            yield tensor


def _lies_on(device: torch.device | None, tensor: Tensor) -> bool:
    """Whether the tensor lies there; "cuda" stands for every GPU, None for every device."""
    if device is None:
        return True
    return device.type == tensor.device.type and device.index in (None, tensor.device.index)


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise ValueError(f"expected a model with parameters, got {type(model).__name__} without any")


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The bytes of one training step, all of them of tensors on the model's device.

    parameters, buffers: of the model. gradients: of its parameters, at the end of backward.
    optimizer: its state (for Adam two tensors a parameter, and on the CPU a counter of 4 bytes).
    inputs: the batch. activations: what the forward pass leaves for backward, the loss included.
    peak: the most bytes alive at any moment of the step.
    memory: the `PeakMemory` of the step, with its timeline.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    peak: int
    memory: PeakMemory = field(repr=False, compare=False)

    @property
    def total(self) -> int:
        """The sum of all parts. It is not the peak: gradients come as activations go."""
        parts = self.parameters + self.buffers + self.gradients
        return parts + self.optimizer + self.inputs + self.activations


def breakdown(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> Breakdown:
    """Predict the bytes of a training step without making it: `measure_step` on fake tensors.

    loss_fn(model, batch) -> scalar loss.

    Fake tensors have a shape, a dtype and a device, but no memory: PyTorch works out the shape of
    every result and computes none. The model, the optimizer and the batch stay as they are; they
    may be fake themselves, so that a model too large for this machine can be asked about:

        with FakeTensorMode():
            model = GPT(config)  # allocates nothing
            tokens = torch.zeros(8, 1024, dtype=torch.int64)
        breakdown(model, torch.optim.AdamW(model.parameters()), loss_fn, tokens)

    The prediction equals `measure_step` to the byte where both choose the same operations. Code
    that asks for the values of tensors (`if x.max() > 1`) raises PyTorch's error. Raises ValueError
    for a model on the meta device, or without parameters.
    """
    with _faked(model, optimizer, batch) as fake_batch:
        return measure_step(model, optimizer, loss_fn, fake_batch)


def dry_run(
    step: Callable[[nn.Module, Optimizer, Any], object],
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
) -> PeakMemory:
    """Return the memory of `step(model, optimizer, batch)`, whatever it does, on fake tensors.

    Only what lies on the model's device counts. As in `breakdown` nothing is computed or changed,
    it is the second step that counts, and the same errors are raised.
    """
    device = _device_of(model)
    with _faked(model, optimizer, batch) as fake_batch:
        step(model, optimizer, fake_batch)
        with PeakMemory(model, optimizer, fake_batch, device=device) as memory:
            step(model, optimizer, fake_batch)
    return memory


@contextmanager
def _faked(model: nn.Module, optimizer: Optimizer, batch: Any) -> Iterator[Any]:
    """Let `model` and `optimizer` hold fake tensors for a while; yield a fake batch."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: make it under FakeTensorMode instead")
    mode = detect_fake_mode(list(model.parameters())) or FakeTensorMode(allow_non_fake_inputs=True)

    tables = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    real_tables = [dict(table) for table in tables]
    groups = [group["params"] for group in optimizer.param_groups]
    real_groups = [list(group) for group in groups]
    real_state = optimizer.state
    with FakeCopyMode(mode):  # a single deepcopy: what is shared stays shared
        held = real_tables, real_groups, real_state, batch
        fake_tables, fake_groups, fake_state, fake_batch = copy.deepcopy(held)
    _keep_counters(real_state, fake_state)

    def hold(in_tables: list[dict], in_groups: list[list], state: dict) -> None:
        for table, content in zip(tables, in_tables, strict=True):
            table.update(content)
        for group, content in zip(groups, in_groups, strict=True):
            group[:] = content
        optimizer.state = state

    try:
        hold(fake_tables, fake_groups, fake_state)
        with mode, _LikeRealTensors():
            yield fake_batch
    finally:
        hold(real_tables, real_groups, real_state)


def _keep_counters(real_state: dict, fake_state: dict) -> None:
    """Let the fake copies of an optimizer's step counters know their value: it asks for them."""
    for real, fake in zip(real_state.values(), fake_state.values(), strict=True):
        for name, tensor in real.items():
            if isinstance(tensor, Tensor) and tensor.ndim == 0:
                known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
                fake[name].constant = None if known is None else known.detach().clone()


FOREACH_TYPES = (optimizer_types, norm_types)  # PyTorch's own lists: to be added to in place


class _LikeRealTensors(TorchDispatchMode):
    """Mend where PyTorch 2.15 treats fake tensors in another way than real ones.

    Batch norm of a bfloat16 input with float32 weights, as under autocast, keeps the mean and the
    deviation of each channel in float32; the fake one, in bfloat16. Optimizers and
    `clip_grad_norm_` choose their loops by the type of the tensors, with a list of known types.
    """

    def __enter__(self) -> "_LikeRealTensors":
        for types in FOREACH_TYPES:
            types.append(FakeTensor)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for types in FOREACH_TYPES:
            types.remove(FakeTensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_batch_norm.default:
            held = [t.dtype for t in args[1:5] if t is not None]  # weight, bias, running statistics
            if held:
                out = (out[0], out[1].to(held[0]), out[2].to(held[0]))
        return out


def measure_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> Breakdown:
    """Make two training steps, and count the bytes of the second.

    loss_fn(model, batch) -> scalar loss. Only what lies on the model's device counts. The first
    step lets the optimizer make its state. Weights and optimizer change, as in training. Both
    steps: gradients to None, forward, backward, update; the loss lives to the end. Raises
    ValueError for a model without parameters.
    """
    device = _device_of(model)
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()

    inputs = {storage_id(t): t.untyped_storage() for t in _tensors(batch) if _lies_on(device, t)}
    with PeakMemory(model, optimizer, batch, device=device) as memory:
        memory.mark("forward")
        loss = loss_fn(model, batch)
        activations = memory.live - memory.timeline[0][1]
        memory.mark("backward")
        loss.backward()
        at_rest = memory.by_category(at=len(memory.timeline) - 1)
        memory.mark("step")
        optimizer.step()
    return Breakdown(
        parameters=at_rest["parameters"],
        buffers=at_rest["buffers"],
        gradients=at_rest["gradients"],
        optimizer=at_rest["optimizer"],
        inputs=sum(storage.nbytes() for storage in inputs.values()),
        activations=activations,
        peak=memory.peak,
        memory=memory,
    )
