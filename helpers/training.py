"""Chapter 06: the Trainer, all of it: AMP, accumulation, clipping, DDP and FSDP, exact resume."""

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers import checkpoint

FORMAT = 2  # of the checkpoints; 1 had no version, settings as text and rank 0's random state only
SKIPS_ALLOWED = 40  # float16: 16 halvings take the scale from 2**16 to 1, 24 more to 2**-24


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The numbers of a run. What is an object (model, optimizer, data) is passed as an object.

    steps: optimizer updates in the whole run, resumed parts included (elsewhere: max_steps).
    micro_batches: batches per update (elsewhere: gradient accumulation steps); their losses are
        averaged, so they must be equal in size.
    clip_norm: largest global gradient norm; None: the norm is measured, but nothing is clipped.
    amp_dtype: bfloat16 or float16 for autocast; None: full precision. float16 adds loss scaling.
    check_every: read loss and gradient norm back from the device every so many steps, and before
        a save. Each reading waits for the device. Above 1 the optimizer must be a fused one
        (`fused=True`), which skips an update with non-finite gradients without being waited for:
        they never reach the weights. Given up is the stop at the very step: up to check_every - 1
        more steps are made, and BatchNorm's averages may have seen non-finite numbers.
    """

    steps: int
    micro_batches: int = 1
    clip_norm: float | None = None
    amp_dtype: torch.dtype | None = None
    check_every: int = 1

    def __post_init__(self):
        for name in ("steps", "micro_batches", "check_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:  # True and 2.0 are not meant as counts
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive or None, got {self.clip_norm}")
        if self.amp_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"amp_dtype must be bfloat16, float16 or None, got {self.amp_dtype}")


class Trainer:
    """A training loop that can be stopped anywhere and resumed to the same bits.

    loss_fn(model, batch) -> scalar mean loss of the batch.
    lr_at(step) -> learning rate, a pure function, so there is no scheduler to save. With several
        parameter groups it is the first group's; the others keep their ratio to it.

    The optimizer must hold every parameter of the model that requires a gradient, and no other:
    build it after `fully_shard`. Under DDP every rank calls `save`, and `load`; rank 0 writes.
    Sharded models save and load by `helpers.resharding`, which needs DCP (chapter 15).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        config: TrainConfig,
        lr_at: Callable[[int], float] | None = None,
    ):
        _require_trainable(model, optimizer, config)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.config, self.lr_at = config, lr_at
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=config.amp_dtype is torch.float16
        )
        self.step = 0  # updates made so far
        self.stopping = False  # whether `stop` was called
        self.data_seed: int | None = None  # of the batches' random numbers; drawn by the first fit
        self.inside_step = False  # True at the start of a step: the last one was interrupted
        self.unread: list[tuple[int, Tensor, Tensor]] = []  # step, loss, norm: not checked yet
        self.skipped = 0  # float16 updates skipped in a row

        for group in optimizer.param_groups:  # where PyTorch's schedulers keep it, too
            group.setdefault("initial_lr", group["lr"])
        self._optimizer_settings = checkpoint.optimizer_settings(
            optimizer, _bare(model), scheduled=lr_at is not None
        )

    def fit(
        self,
        batches_from: Callable[[int], Iterable],
        on_step: Iterable[Callable[["Trainer", dict[str, Tensor]], None]] = (),
    ) -> None:
        """Train to `config.steps`; `batches_from(n)` begins at batch number n.

        A run resumes to the same bits if `batches_from(n)` yields what `batches_from(0)` yields
        from batch n on when both begin with the same state of the global random generators. This
        holds for a pure function of n (`helpers.data.batches`), and for a DataLoader with any
        number of workers, over any number of epochs, from which the first n batches are dropped:

            def batches_from(n):
                epochs = itertools.chain.from_iterable(itertools.repeat(loader))
                return itertools.islice(epochs, n, None)

        because the batches draw from generators of their own (`_OwnRandomness`): no draw of the
        model moves them. Reading again all that was dropped takes time; a pure function takes
        none. Not covered: a `generator=` that is made outside `batches_from`, other state that a
        dataset keeps, and what the batches draw on an accelerator.

        on_step: called with the Trainer and the step's metrics after each step; they may `save`,
        `stop`, and switch the model to evaluation: every step begins with `model.train()`.
        """
        on_step = list(on_step)
        if self.step > self.config.steps:
            raise ValueError(f"expected at most {self.config.steps} steps, made are {self.step}")
        if self.step == self.config.steps:
            warnings.warn(f"nothing to train: all {self.step} steps are made", stacklevel=2)
            return

        if self.data_seed is None:
            self.data_seed = _seed_from_torch()
        first = self.step * self.config.micro_batches
        batches = _OwnRandomness(lambda: batches_from(first), self.data_seed)

        self.stopping = False
        while not self.finished:
            self.model.train()  # all of it: a callback may have left a part in evaluation mode
            metrics = self.train_step(batches)
            for watch in on_step:
                watch(self, metrics)
        self._read_back()

    @property
    def finished(self) -> bool:
        """Whether no step follows: `config.steps` are made, or `stop` was called."""
        return self.stopping or self.step >= self.config.steps

    def stop(self) -> None:
        """End `fit` after this step. Under DDP every rank must decide to."""
        self.stopping = True

    def train_step(self, batches: Iterator) -> dict[str, Tensor]:
        """Make one update from `micro_batches` batches; return loss and grad_norm, detached.

        Raises FloatingPointError when the loss or the norm of the gradient is not finite, before
        weights and optimizer are touched. (BatchNorm has seen the batch by then: go on from a
        checkpoint.) In float16 such a gradient is a matter of the scale: the update is skipped and
        the scale halved; 40 updates skipped in a row raise the error. An interrupt during the
        forward and backward passes is forgotten by the next step; one in the middle of the update
        itself leaves some weights updated: go on from a checkpoint, too.
        Raises ValueError when `batches` has no batch left, or the learning rate is not finite.
        """
        config = self.config

        # An interrupted step leaves gradients, also in parameters the optimizer does not know,
        # and a scaler that would refuse to unscale a second time.
        self.model.zero_grad(set_to_none=True)
        if self.inside_step:
            self.scaler = self._fresh_scaler()
        self.inside_step = True

        self._set_learning_rate()

        losses = []
        for number in range(config.micro_batches):
            batch = _to_device(self._next(batches), self.device)
            # ranks exchange gradients once per update, not once per micro-batch
            with self._gradient_sync(last=number == config.micro_batches - 1):
                with self._autocast():  # the forward pass only: backward follows its dtypes
                    loss = self.loss_fn(self.model, batch)
                # divided, so that the sum over micro-batches is the mean; scaled up in float16,
                # whose smallest number is 6e-8: gradients below it would be lost
                part = loss if config.micro_batches == 1 else loss / config.micro_batches
                self.scaler.scale(part).backward()
            losses.append(loss.detach())
        loss = mean_over_ranks(losses[0] if len(losses) == 1 else torch.stack(losses).mean())

        self.scaler.unscale_(self.optimizer)  # before clipping: the limit is for true gradients
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if config.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), config.clip_norm, norm)
        if hasattr(norm, "full_tensor"):  # FSDP2: each rank has its part of the sum
            norm = norm.full_tensor()

        self.unread.append((self.step, loss, norm))
        if config.check_every == 1:
            self._read_back()  # before the update: the weights must not meet what is not finite
        elif not self.scaler.is_enabled():
            # a fused optimizer looks at this number on the device and leaves the update out
            self.optimizer.found_inf = 1.0 - (loss.isfinite() & norm.isfinite()).float()

        self.scaler.step(self.optimizer)  # left out when float16 overflowed
        self.scaler.update()
        self.optimizer.found_inf = None
        self.step += 1
        self.inside_step = False
        if self.step % config.check_every == 0:
            self._read_back()
        return {"loss": loss, "grad_norm": norm}

    def _set_learning_rate(self) -> None:
        if self.lr_at is None:
            return
        rate = float(self.lr_at(self.step))  # not NumPy's float, which no checkpoint may hold
        if not 0 <= rate < math.inf:
            got = f"lr_at({self.step}) = {rate}"
            raise ValueError(f"expected a finite learning rate, at least 0, got {got}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate * checkpoint.rate_ratio(group, self.optimizer)

    def _next(self, batches: Iterator) -> Any:
        try:
            return next(batches)
        except StopIteration:
            needed = self.config.steps * self.config.micro_batches
            raise ValueError(
                f"the batches ended in step {self.step}: expected {needed} in all, "
                f"{self.config.micro_batches} for each of {self.config.steps} steps"
            ) from None

    def _gradient_sync(self, *, last: bool) -> AbstractContextManager:
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def _autocast(self) -> AbstractContextManager:
        if self.config.amp_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.config.amp_dtype)

    def _fresh_scaler(self) -> torch.amp.GradScaler:
        fresh = torch.amp.GradScaler(self.device.type, enabled=self.scaler.is_enabled())
        fresh.load_state_dict(self.scaler.state_dict())
        return fresh

    def _read_back(self) -> None:
        """Read the losses and norms that are still on the device; stop if one is not finite."""
        unread, self.unread = self.unread, []
        if not unread:
            return
        pairs = [torch.stack([loss, norm.to(loss.device)]) for _, loss, norm in unread]
        values = torch.stack(pairs).tolist()  # waits for the device, once
        for (step, _, _), (loss, norm) in zip(unread, values, strict=True):
            if not math.isfinite(loss):
                raise FloatingPointError(self._not_finite("loss", loss, step))
            if math.isfinite(norm):
                self.skipped = 0
            elif self.scaler.is_enabled():
                self.skipped += 1
            else:
                raise FloatingPointError(self._not_finite("gradient norm", norm, step))
        if self.skipped >= SKIPS_ALLOWED:
            raise FloatingPointError(
                f"the last {self.skipped} updates were skipped: expected gradients that are finite "
                f"in float16 at some scale, got none down to {self.scaler.get_scale():.3g}"
            )

    def _not_finite(self, what: str, value: float, step: int) -> str:
        kept = "weights and optimizer are as before this step"
        if step < self.step:
            kept = f"its update was left out, as noticed at step {self.step}"
        return f"{what} is {value} at step {step}, expected a finite number; {kept}"

    def save(self, path: str | Path) -> None:
        """Write everything that the next step depends on, atomically (`checkpoint.save_atomic`).

        Under DDP every rank must call it: each contributes its random state, rank 0 writes (its
        BatchNorm averages, as DDP does), and all return, or raise, when it has.
        Raises FloatingPointError rather than save after a loss that is not finite.
        """
        _require_whole(self.model, "save")
        self._read_back()
        state = {
            "version": FORMAT,
            "torch": str(torch.__version__),  # to be read by people; not compared
            "config": self._settings(),
            "step": self.step,
            "model": _bare(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_settings": self._optimizer_settings,
            "scaler": self.scaler.state_dict(),
            "rng": _of_all_ranks(
                {"data_seed": self.data_seed, "generators": checkpoint.rng_state(self.device)}
            ),
        }
        failure = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                checkpoint.save_atomic(state, path)
            except Exception as error:  # raised below, by every rank: none waits for the others
                failure = error
        failure = _of_all_ranks(failure)[0]
        if failure is not None:
            raise failure

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint; ValueError, and nothing changed, when it does not fit.

        Settings must be those of the first part: the config (but `steps` may grow), the optimizer
        with its options (the file's would replace those asked for), and the number of processes.
        """
        _require_whole(self.model, "load")
        keys = {"version", "torch", "config", "step", "model", "optimizer"}
        keys |= {"optimizer_settings", "scaler", "rng"}
        state = checkpoint.load(path, expected=keys)
        model, rank = _bare(self.model), dist.get_rank() if dist.is_initialized() else 0

        self._require_fit(path, state)
        self.optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.skipped, self.unread = state["step"], 0, []
        self.data_seed = state["rng"][rank]["data_seed"]
        checkpoint.set_rng_state(state["rng"][rank]["generators"], self.device)

    def _require_fit(self, path: str | Path, state: dict[str, Any]) -> None:
        """Raise ValueError unless all of `state` can be loaded; change nothing."""
        if state["version"] != FORMAT:
            raise ValueError(f"{path}: expected format {FORMAT}, got {state['version']}")
        checkpoint.require_same_settings(path, self._settings(), state["config"])
        if type(state["step"]) is not int or state["step"] < 0:
            raise ValueError(f"{path}: expected a number of steps >= 0, got {state['step']!r}")
        checkpoint.require_same_tensors(path, _bare(self.model).state_dict(), state["model"])
        asked = self._optimizer_settings
        checkpoint.require_same_settings(path, asked, state["optimizer_settings"])
        checkpoint.require_optimizer_state(path, self.optimizer, state["optimizer"])
        checkpoint.require_scaler_state(path, self.scaler.state_dict(), state["scaler"])
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if len(state["rng"]) != ranks:
            raise ValueError(
                f"{path}: expected the random states of {ranks} processes, got {len(state['rng'])}"
            )
        for rng in state["rng"]:
            checkpoint.require_rng_state(path, rng["generators"], self.device)

    def _settings(self) -> dict[str, Any]:
        """What two halves of one run must share; `steps` may grow, looking changes nothing."""
        settings = asdict(self.config)
        del settings["steps"], settings["check_every"]
        return settings


class _OwnRandomness:
    """Iterate over what `make()` returns, giving it random generators of its own.

    The global generators of Python, NumPy and torch (CPU) are changed for the data's while a batch
    is made, and changed back for the model's. So how often dropout draws does not move the
    shuffle of the next epoch, and a resumed run sees the same batches: same seed, same draws.
    """

    def __init__(self, make: Callable[[], Iterable], seed: int):
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.MT19937(seed)
        self.torch = torch.Generator().manual_seed(seed).get_state()
        self._exchange()
        try:
            self.iterator = iter(make())
        finally:
            self._exchange()

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        self._exchange()
        try:
            return next(self.iterator)
        finally:
            self._exchange()

    def _exchange(self) -> None:
        mine = self.python, self.numpy, self.torch
        theirs = random.getstate(), np.random.get_bit_generator(), torch.get_rng_state()
        self.python, self.numpy, self.torch = theirs
        random.setstate(mine[0])
        np.random.set_bit_generator(mine[1])
        torch.set_rng_state(mine[2])


def _seed_from_torch() -> int:
    """Return the number that torch's generator would draw next, without drawing it."""
    state = torch.get_rng_state()
    seed = torch.randint(2**32, ()).item()
    torch.set_rng_state(state)
    return seed


def _to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in a batch: a tensor, or tuples, named tuples, lists and dicts of them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # a PackedSequence, a tokenizer's output: it knows best
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch  # text and numbers


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean over all processes, so that all of them decide alike; NaN if one has NaN."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.AVG)
    return value


def _of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _bare(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile: a checkpoint fits with and without them."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # what torch.compile returns
            model = model._orig_mod
        else:
            return model


def _require_trainable(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> None:
    """Raise ValueError when this optimizer cannot train this model, all of it and no more."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    meta = [name for name, p in parameters.items() if p.is_meta]
    if meta:
        raise ValueError(f"on the meta device, without numbers: {_some(meta)}; see to_empty")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = held - {id(p) for p in parameters.values()}
    if foreign:
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's: "
            "build it from model.parameters(), after the model is sharded"
        )
    left_out = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ValueError(
            f"the optimizer lacks {_some(left_out)}: give it all parameters, or freeze the others "
            "with requires_grad_(False)"
        )
    if config.check_every > 1 and not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"check_every={config.check_every} needs an optimizer that can skip an update on the "
            f"device: expected fused=True, got {type(optimizer).__name__} without"
        )


def _require_whole(model: nn.Module, doing: str) -> None:
    """Raise NotImplementedError for a sharded model, whose parameters are DTensors."""
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise NotImplementedError(
            f"this model is sharded, each rank has a part of it: {doing} it with "
            f"helpers.resharding.{doing}_sharded, by torch.distributed.checkpoint"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
