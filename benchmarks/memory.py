"""Chapter 09: the peak memory of a training step, predicted and measured, and what savings cost.

Three models, each trained in five ways:

    plain           forward, backward, AdamW
    checkpointing   every block is recomputed in the backward pass
    accumulation    the batch in four parts, one update
    autocast        bfloat16 where autocast allows it
    all three

Bytes, all with the model, its optimizer's state and the batch:

    predicted   `memory.dry_run`: the same step on fake tensors, before anything runs
    tensors     `PeakMemory` while the step runs
    allocator   the most that was handed out at once: `torch.cuda.max_memory_allocated`; on a CPU,
                the allocator's events in the profiler. More than `tensors` by the scratch memory
                of operations, and on CUDA by the rounding up of sizes and by cuBLAS workspaces

Times are of one step, the five ways in turns; `slowdown` is the ratio to plain within each turn.
"""

import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from helpers import environment, memory, models, timing
from helpers.memory_savings import Checkpointed
from helpers.page import records

REPEATS = {"cpu": 15, "cuda": 7}  # a step takes half a second on a GPU, and hardly varies
PARTS = 4  # micro-batches of a batch
WAYS = ("plain", "checkpointing", "accumulation", "autocast", "all three")
SIZES = {
    "cpu": {
        "MLP": {"width": 1024, "blocks": 4, "batch": 512},
        "ConvNet": {"width": 24, "batch": 128},
        "GPT": {"layers": 6, "width": 192, "context": 128, "vocabulary": 512, "batch": 16},
    },
    "cuda": {
        "MLP": {"width": 4096, "blocks": 8, "batch": 16_384},
        "ConvNet": {"width": 96, "batch": 4096},
        "GPT": {"layers": 12, "width": 768, "context": 1024, "vocabulary": 50_304, "batch": 16},
    },
}
UNITS = {"model": "name", "way": "name", "batch": "count", "predicted": "B", "tensors": "B"}
UNITS |= {"allocator": "B", "step": "ms", "slowdown": "way / plain"}


class Job:
    """A model with its optimizer and a batch, and the step of one of the five ways."""

    def __init__(self, name: str, way: str, device: torch.device):
        size = SIZES["cuda" if device.type == "cuda" else "cpu"][name]
        torch.manual_seed(0)
        model, batch = MAKE[name](**size)
        self.model = model.to(device)
        self.batch = tuple(t.to(device) for t in batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if way in ("checkpointing", "all three"):
            Checkpointed(blocks(self.model))
        parts = PARTS if way in ("accumulation", "all three") else 1
        self.step = make_step(parts, way in ("autocast", "all three"), device)

    def __call__(self) -> None:
        self.step(self.model, self.optimizer, self.batch)


def mlp(width: int, blocks: int, batch: int):
    pairs = [nn.Sequential(models.MLP(width, width, width), nn.ReLU()) for _ in range(blocks)]
    model = nn.Sequential(*pairs, nn.Linear(width, 10))
    return model, (torch.randn(batch, width), torch.randint(10, (batch,)))


def convnet(width: int, batch: int):
    model = models.ConvNet(width=width)
    return model, (torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,)))


def gpt(batch: int, **sizes: int):
    config = models.GPTConfig(heads=sizes["width"] // 64, **sizes)
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
    return models.GPT(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


MAKE = {"MLP": mlp, "ConvNet": convnet, "GPT": gpt}


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is recomputed as one piece."""
    if isinstance(model, models.GPT):
        return list(model.blocks)
    return [module for module in model if isinstance(module, nn.Sequential)]


def make_step(parts: int, autocast: bool, device: torch.device) -> Callable:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch) -> None:
        for x, y in zip(*(t.chunk(parts) for t in batch), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) / parts
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peaks(name: str, way: str, device: torch.device) -> dict[str, int]:
    before = 0
    if device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(device)
    job = Job(name, way, device)
    predicted = memory.dry_run(job.step, job.model, job.optimizer, job.batch).peak
    job()  # makes the optimizer's state, and libraries get ready

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        job()
        allocator = torch.cuda.max_memory_allocated(device) - before
    else:
        with profile(profile_memory=True) as profiler:
            job()
        allocator = most_allocated(profiler)

    with memory.PeakMemory(job.model, job.optimizer, job.batch, device=device) as counted:
        job()
    if device.type != "cuda":
        allocator += counted.timeline[0][1]  # what was there before the profiler listened
    return {"predicted": predicted, "tensors": counted.peak, "allocator": allocator}


def most_allocated(profiler: profile) -> int:
    """The most bytes that were allocated at once on the CPU, beyond what was there before."""
    events = profiler.profiler.kineto_results.events()
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def compare(name: str, device: torch.device) -> list[dict]:
    found = {way: peaks(name, way, device) for way in WAYS}
    jobs = {way: Job(name, way, device) for way in WAYS}
    taken = timing.readings(jobs, device, REPEATS[device.type])
    batch = len(jobs["plain"].batch[0])

    rows = []
    for way in WAYS:
        pairs = zip(taken[way], taken["plain"], strict=True)
        times = {
            "step": timing.quantiles(taken[way]),
            "slowdown": timing.quantiles([ms / plain for ms, plain in pairs]),
        }
        rows.append({"model": name, "way": way, "batch": batch, **found[way], **times})
    return rows


def measure(device: torch.device) -> records.Record:
    if device.type not in SIZES:
        raise RuntimeError(f"memory is recorded on cpu and cuda, got {device.type}")
    clock = "cuda events" if device.type == "cuda" else "perf_counter"
    clock += ", the ways in turns"
    provenance = records.provenance(
        environment.versions(device), repeats=REPEATS[device.type], clock=clock
    )
    rows = [row for name in MAKE for row in compare(name, device)]
    return records.Record("memory", provenance, UNITS, rows)
