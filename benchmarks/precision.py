"""Chapter 10: a training step in fp32, tf32, fp16 and bf16: memory and time of the same models.

The four precisions take turns on the same model and the same batch, so that a slow moment of the
machine hits all. fp32 and tf32 differ by a switch for matrix products and convolutions; fp16 and
bf16 are `autocast`, fp16 with a `GradScaler`. A record needs a GPU: on a CPU, tf32 does nothing and
the sizes would take minutes a step, so tiny ones only prove that the harness works.

Peaks are `torch.cuda.max_memory_allocated` during a step, with nothing but this model on the GPU.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import environment, timing
from helpers.models import GPT, ConvNet, GPTConfig
from helpers.page import records

REPEATS = 30
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
UNITS = {"model": "name", "precision": "name", "step": "ms", "speedup": "fp32 / this"}
UNITS |= {"peak": "B", "parameters": "B"}


def models(device: torch.device) -> dict[str, tuple[nn.Module, Callable[..., Tensor], tuple]]:
    """Name -> (model, loss function, batch)."""
    small = device.type != "cuda"
    batch = 8 if small else 16
    length = 16 if small else 1024
    config = GPTConfig(
        vocabulary=100 if small else 50_304,
        context=length,
        layers=1 if small else 12,
        heads=2 if small else 12,
        width=32 if small else 768,
    )
    tokens = torch.randint(config.vocabulary, (batch, length), device=device)
    width = 8 if small else 96
    images = torch.randn(16 if small else 4096, 1, 28, 28, device=device)
    labels = torch.randint(10, (len(images),), device=device)
    return {
        f"GPT {config.layers} layers, width {config.width}, batch {batch} x {length}": (
            GPT(config),
            _next_token_loss,
            (tokens,),
        ),
        f"ConvNet width {width}, batch {len(images)}": (
            ConvNet(width=width, dropout=0),
            _class_loss,
            (images, labels),
        ),
    }


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _class_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def train_step(
    precision: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loss_fn: Callable[..., Tensor],
    batch: tuple,
    device: torch.device,
) -> None:
    """Make one update in `precision`."""
    switch = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = switch
    torch.backends.cudnn.conv.fp32_precision = switch
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device.type, dtype=low, enabled=low is not None):
        loss = loss_fn(model, *batch)
    if precision == "fp16":
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return the largest number of bytes allocated during one step; 0 where there is no GPU."""
    if device.type != "cuda":
        return 0
    step()  # the optimizer's state and the workspaces exist from here on
    timing.wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    timing.wait_for(device)
    return torch.cuda.max_memory_allocated(device)


def compare(
    name: str, model: nn.Module, loss_fn: Callable[..., Tensor], batch: tuple, device: torch.device
) -> list[dict]:
    """Measure the four precisions on one model, in turns."""
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler(device.type)
    steps = {
        precision: partial(train_step, precision, model, optimizer, scaler, loss_fn, batch, device)
        for precision in PRECISIONS
    }
    peaks = {precision: peak_bytes(step, device) for precision, step in steps.items()}
    readings = timing.readings(steps, device, repeats=REPEATS, by_host=True)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    model.to("cpu")  # the next model has the GPU for itself
    rows = []
    for precision in PRECISIONS:
        pairs = zip(readings["fp32"], readings[precision], strict=True)
        rows.append(
            {
                "model": name,
                "precision": precision,
                "step": timing.quantiles(readings[precision]),
                "speedup": timing.quantiles([base / this for base, this in pairs]),
                "peak": peaks[precision],
                "parameters": parameters,
            }
        )
    return rows


def measure(device: torch.device) -> records.Record:
    if device.type != "cuda":
        print("no GPU: tiny models, to prove that the harness works; keep no record of this")
    torch.manual_seed(0)
    clock = "one step of each precision in turns; the device waited for"
    provenance = records.provenance(environment.versions(device), repeats=REPEATS, clock=clock)
    rows = []
    for name, (model, loss_fn, batch) in models(device).items():
        rows += compare(name, model, loss_fn, batch, device)
    return records.Record("precision", provenance, UNITS, rows)
