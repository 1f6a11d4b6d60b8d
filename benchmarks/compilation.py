"""Chapter 12: eager against script and compile in all modes, with what the first call costs.

Each row runs in processes of its own: `cold` is the first call of one whose Inductor and Triton
caches are empty, `warm` the first call of a second one that finds what the first left there. The
second also times steady calls, eager and compiled in turn, so that a slow moment hits both.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers import environment, models, timing
from helpers.page import records

PAIRS = 40
COMPILED = ("default", "reduce-overhead", "max-autotune")
MODES = {"tiny": ("default",)} | dict.fromkeys(
    ["chain", "mlp", "cnn", "transformer"], ("script", *COMPILED)
)
# on a GPU without TorchScript, which is there for comparison with the past
GPU_MODES = {"tiny": ("default",), "chain": COMPILED[:2], "mlp": COMPILED}
GPU_MODES |= {"cnn": COMPILED[:2], "transformer": COMPILED}
UNITS = {
    "workload": "name", "mode": "name", "cold": "s", "warm": "s",
    "eager": "ms", "compiled": "ms", "ratio": "eager / compiled", "difference": "max abs",
}  # fmt: skip


def chain(x: Tensor) -> Tensor:
    """GELU by its tanh formula: eight element-wise operations."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def tiny(x: Tensor) -> Tensor:
    return x * 2 + 1


def transformer() -> nn.Module:
    # norm_first and no dropout; in training mode, since evaluation takes a fused path of its own
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def cnn() -> nn.Module:
    # its layers alone: TorchScript cannot read the `super().forward` of ConvNet
    return nn.Sequential(*models.ConvNet()).eval()


def job(workload: str, device: torch.device) -> tuple[Callable, Tensor]:
    torch.manual_seed(0)
    if workload == "tiny":
        function, x = tiny, torch.randn(16)
    elif workload == "chain":
        function, x = chain, torch.randn(1024, 1024)
    elif workload == "mlp":
        function, x = models.MLP(784, 512, 512, 10), torch.randn(256, 784)
    elif workload == "cnn":
        function, x = cnn(), torch.randn(64, 1, 28, 28)
    else:
        function, x = transformer(), torch.randn(4, 128, 256)
    if isinstance(function, nn.Module):
        function = function.to(device)
    return function, x.to(device)


def prepare(function: Callable, x: Tensor, mode: str) -> Callable:
    """Return `function`, compiled on its first call, or scripted, which optimizes on its second."""
    if mode != "script":
        return torch.compile(function, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated: chapter 12 shows the warning itself
        scripted = torch.jit.script(function)
    scripted(x)
    return scripted


@torch.no_grad()
def child(workload: str, mode: str, place: str, steady: bool) -> dict[str, Any]:
    """Run in a process of its own: the seconds of the first call and, if `steady`, of later ones.

    The eager function runs first: loading the device's libraries is not what a compile costs.
    """
    device = torch.device(place)
    function, x = job(workload, device)
    expected = function(x)
    before = held(device)
    prepared = {}

    def first_call() -> None:
        prepared["call"] = prepare(function, x, mode)
        prepared["got"] = prepared["call"](x)

    seconds = timing.host_ms(first_call, device) / 1e3
    result: dict[str, Any] = {"first": float(f"{seconds:.4g}")}
    if not steady:
        return result

    compiled = prepared["call"]
    result["difference"] = float(f"{(prepared['got'] - expected).abs().max():.2g}")
    result |= steady_calls(function, compiled, x)
    if device.type == "cuda":
        result["held"] = float(f"{(held(device) - before) / 2**20:.4g}")
    return result


def steady_calls(eager: Callable, compiled: Callable, x: Tensor) -> dict[str, timing.Quantiles]:
    """Return p20, p50 and p80 of one call each, in ms, and of their ratio turn by turn.

    By the host's clock and back to back, also on a GPU: launches are what a CUDA graph saves.
    """
    calls = {"eager": lambda: eager(x), "compiled": lambda: compiled(x)}
    taken = timing.readings(calls, x.device, PAIRS, by_host=True, shortest_ms=5)
    ratios = [e / c for e, c in zip(taken["eager"], taken["compiled"], strict=True)]
    return {
        "eager": timing.quantiles(taken["eager"]),
        "compiled": timing.quantiles(taken["compiled"]),
        "ratio": timing.quantiles(ratios),
    }


def held(device: torch.device) -> int:
    """Return the bytes that the allocator cannot give back to a GPU now; 0 elsewhere.

    Reserved, not allocated: the pool of a CUDA graph belongs to the graph even between calls.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def run(workload: str, mode: str, device: torch.device, cache: str, steady: bool) -> dict[str, Any]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    command = [sys.executable, __file__, workload, mode, str(device), str(int(steady))]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{workload}, {mode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row(workload: str, mode: str, device: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        cold = run(workload, mode, device, cache, steady=False)["first"]
        warm = run(workload, mode, device, cache, steady=True)
    print(workload, mode, cold, warm, flush=True)
    return {"workload": workload, "mode": mode, "cold": cold, "warm": warm.pop("first")} | warm


def measure(device: torch.device, modes: dict[str, tuple] | None = None) -> records.Record:
    if modes is None:
        modes = GPU_MODES if device.type == "cuda" else MODES
    clock = f"perf_counter on the host, {PAIRS} readings, alternating, each a process"
    provenance = records.provenance(environment.versions(device), repeats=PAIRS, clock=clock)
    memory = {"held": "MiB"} if device.type == "cuda" else {}
    rows = [row(name, mode, device) for name, wanted in modes.items() for mode in wanted]
    return records.Record("compilation", provenance, UNITS | memory, rows)


if __name__ == "__main__":
    name, mode, place, steady = sys.argv[1:]
    print(json.dumps(child(name, mode, place, steady == "1")))
