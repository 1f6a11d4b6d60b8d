"""Chapter 06: the Trainer, all of it: AMP, accumulation, clipping, DDP and FSDP, exact resume."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers import checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The numbers of a run. What is an object (model, optimizer, data) is passed as an object.

    steps: optimizer updates in the whole run, resumed parts included.
    micro_batches: batches per update; their losses are averaged, so they must be equal in size.
    clip_norm: largest global gradient norm; None: neither measured nor clipped.
    amp_dtype: bfloat16 or float16 for autocast; None: full precision. float16 adds loss scaling.
    """

    steps: int
    micro_batches: int = 1
    clip_norm: float | None = None
    amp_dtype: torch.dtype | None = None

    def __post_init__(self):
        for name in ("steps", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive or None, got {self.clip_norm}")
        if self.amp_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"amp_dtype must be bfloat16, float16 or None, got {self.amp_dtype}")


class Trainer:
    """A training loop that can be stopped anywhere and resumed to the same bits.

    loss_fn(model, batch) -> scalar mean loss of the batch. lr_at(step) -> learning rate, a pure
    function, so there is no scheduler to save. Build the optimizer after `fully_shard`. Under DDP
    save on rank 0 only; sharded models save through `torch.distributed.checkpoint` (chapter 15).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        config: TrainConfig,
        lr_at: Callable[[int], float] | None = None,
    ):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.config, self.lr_at, self.step = config, lr_at, 0
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=config.amp_dtype is torch.float16
        )

    def fit(
        self,
        batches_from: Callable[[int], Iterator],
        on_step: Iterable[Callable[["Trainer", dict[str, Tensor]], None]] = (),
    ) -> None:
        """Train to `config.steps`; `batches_from(n)` begins at batch number n."""
        on_step = list(on_step)
        batches = batches_from(self.step * self.config.micro_batches)
        self.model.train()
        while self.step < self.config.steps:
            metrics = self.train_step(batches)
            for call in on_step:
                call(self, metrics)

    def train_step(self, batches: Iterator) -> dict[str, Tensor]:
        """Make one update from `micro_batches` batches; return detached metrics.

        Raises FloatingPointError on a non-finite loss, before weights and optimizer are
        touched. (BatchNorm has seen the batch by then: go on from a checkpoint.)
        """
        cfg, n, losses = self.config, self.config.micro_batches, []
        if self.lr_at:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr_at(self.step)
        for i in range(n):
            with self._gradient_sync(last=i == n - 1):
                with self._autocast():
                    loss = self.loss_fn(self.model, self._to_device(next(batches)))
                self.scaler.scale(loss if n == 1 else loss / n).backward()
            losses.append(loss.detach())
        loss = losses[0] if n == 1 else torch.stack(losses).mean()
        metrics = {"loss": self._checked(loss)}
        if cfg.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)  # first: clip the true gradient
            weights = self.model.parameters()
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(weights, cfg.clip_norm)
        self.scaler.step(self.optimizer)  # skipped when float16 overflowed
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return metrics

    def _autocast(self) -> AbstractContextManager:
        if self.config.amp_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.config.amp_dtype)

    def _gradient_sync(self, *, last: bool) -> AbstractContextManager:
        """Let ranks exchange gradients only in the last micro-batch."""
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def _to_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t.to(self.device, non_blocking=True) for t in batch)

    def _checked(self, loss: Tensor) -> Tensor:
        if dist.is_initialized():  # the mean over ranks: all of them stop, or none
            dist.all_reduce(loss, dist.ReduceOp.AVG)
        if not math.isfinite(loss.item()):  # waits for the device: the price of stopping in time
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"loss is {loss.item()} at step {self.step}, expected a finite number; "
                "weights and optimizer are as before this step"
            )
        return loss

    def save(self, path: str | Path) -> None:
        """Write everything that the next step depends on, atomically."""
        state = {
            "config": self._settings(),
            "step": self.step,
            "model": _bare(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": checkpoint.rng_state(self.device),
        }
        checkpoint.save_atomic(state, path)

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint; ValueError, and nothing changed, when it does not fit."""
        model, settings = _bare(self.model), self._settings()
        keys = {"config", "step", "model", "optimizer", "scaler", "rng"}
        state = checkpoint.load(path, expected=keys)
        if state["config"] != settings:
            raise ValueError(f"{path} was trained with {state['config']}, this run has {settings}")
        checkpoint.require_same_shapes(path, model.state_dict(), state["model"])
        self.optimizer.load_state_dict(state["optimizer"])  # validates before it changes anything
        model.load_state_dict(state["model"])
        self.scaler.load_state_dict(state["scaler"])
        checkpoint.set_rng_state(state["rng"], self.device)
        self.step = state["step"]

    def _settings(self) -> dict[str, str]:
        """What must agree between the parts of one run; `steps` may grow."""
        return {k: str(v) for k, v in asdict(self.config).items() if k != "steps"}


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
