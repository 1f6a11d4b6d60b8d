"""Chapter 13: each kernel against eager, `torch.compile`, Liger-Kernel and cuDNN's attention.

On a GPU: sizes that matter, and the peers must be installed (liger-kernel). On a CPU the kernels
are interpreted, so times there mean nothing; tiny sizes prove that the harness works.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import environment, timing
from helpers.kernels import INTERPRETED
from helpers.kernels.attention import attention
from helpers.kernels.dropout import dropout
from helpers.kernels.gelu import gelu
from helpers.kernels.linear_cross_entropy import linear_cross_entropy
from helpers.kernels.matmul import matmul
from helpers.kernels.norms import layer_norm, rms_norm
from helpers.kernels.softmax import softmax
from helpers.kernels.vector_add import vector_add
from helpers.page import records

DTYPES = (torch.bfloat16, torch.float32)
HALF = (torch.bfloat16, torch.float16)  # where float32, exact, would take seconds a call
SPEED = ("ours", "eager", "compile", "liger", "cudnn")
UNITS = {"kernel": "name", "pass": "name", "dtype": "name", "shape": "elements"}
UNITS |= {name: "ms" for name in SPEED}
UNITS |= {f"{name}_host": "ms" for name in SPEED}
UNITS |= {f"{name}_peak": "B" for name in SPEED}
UNITS |= {"bytes": "B", "flop": "count"}
GAINS = {"matmul": "4096x4096x4096", "gelu": "8192x8192"}  # sizes that the chapter speaks of
ROWS = [(4096, 256), (4096, 1024), (4096, 5000), (8192, 8192), (4096, 32768)]
LENGTHS = [2**16, 2**20, 2**24, 2**26, 2**28]
SQUARES = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)]
TOKENS = [(4096, 2048, 32_000), (8192, 2048, 32_000), (8192, 4096, 32_000)]
TOKENS += [(8192, 4096, 128_256), (16_384, 4096, 128_256)]
SEQUENCES = [(16, 32, 512, 64), (8, 32, 1024, 128), (4, 32, 2048, 128), (2, 32, 4096, 128)]
SEQUENCES += [(1, 32, 16_384, 128), (4, 32, 4096, 64)]


@dataclass(frozen=True)
class Case:
    """An operation at given shapes: who computes it, and the least that must be moved and done.

    inputs: (*shape, dtype=…, device=…) -> tensors. peers: other libraries' functions, by name.
    passes: (*shape) -> "forward" or "backward" or "both" -> (elements read and written, FLOPs).
    """

    kernel: str
    inputs: Callable[..., list[Tensor]]
    ours: Callable
    eager: Callable
    shapes: list[tuple[int, ...]]
    passes: Callable[..., dict[str, tuple[int, int]]]
    peers: dict[str, Callable]
    dtypes: tuple[torch.dtype, ...] | None = None  # None: DTYPES


def cases(liger: dict[str, Callable]) -> list[Case]:
    """Return all operations at the sizes of a GPU; `liger`: the peers, {} where there are none."""
    return [
        Case(
            kernel="vector_add",
            inputs=two_vectors,
            ours=vector_add,
            eager=torch.add,
            shapes=[(n,) for n in LENGTHS],
            passes=three_vectors_moved,
            peers={},
        ),
        Case(
            kernel="softmax",
            inputs=only_rows,
            ours=softmax,
            eager=partial(torch.softmax, dim=-1),
            shapes=ROWS,
            passes=rows_moved,
            peers=_peer(liger, "softmax"),
        ),
        Case(
            kernel="rms_norm",
            inputs=rows_and_a_vector,
            ours=rms_norm,
            eager=eager_rms_norm,
            shapes=ROWS,
            passes=rows_moved,
            peers=_peer(liger, "rms_norm"),
        ),
        Case(
            kernel="layer_norm",
            inputs=rows_and_two_vectors,
            ours=layer_norm,
            eager=eager_layer_norm,
            shapes=ROWS,
            passes=rows_moved,
            peers=_peer(liger, "layer_norm"),
        ),
        Case(
            kernel="gelu",
            inputs=rows_and_a_vector,
            ours=gelu,
            eager=eager_gelu,
            shapes=ROWS,
            passes=rows_moved,
            peers={},
        ),
        Case(
            kernel="dropout",
            inputs=one_vector,
            ours=partial(dropout, p=0.1, seed=0),
            eager=partial(F.dropout, p=0.1),
            shapes=[(n,) for n in LENGTHS],
            passes=one_vector_moved,
            peers={},
        ),
        Case(
            kernel="matmul",
            inputs=two_matrices,
            ours=matmul,
            eager=torch.matmul,
            shapes=SQUARES,
            passes=product_computed,
            peers={},
        ),
        Case(
            kernel="linear_cross_entropy",
            inputs=tokens,
            ours=linear_cross_entropy,
            eager=eager_loss,
            shapes=TOKENS,
            passes=loss_computed,
            peers=_peer(liger, "linear_cross_entropy"),
            dtypes=HALF,
        ),
        Case(
            kernel="attention",
            inputs=heads,
            ours=partial(attention, causal=True),
            eager=eager_attention,
            shapes=SEQUENCES,
            passes=attention_computed,
            peers={"cudnn": cudnn_attention} if liger else {},
            dtypes=HALF,
        ),
    ]


def _peer(liger: dict[str, Callable], name: str) -> dict[str, Callable]:
    return {"liger": liger[name]} if name in liger else {}


def liger_functions() -> dict[str, Callable]:
    """Import the peers. Raises ModuleNotFoundError without liger-kernel: a record needs them."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    def liger_rms_norm(x: Tensor, w: Tensor) -> Tensor:
        # out of place: in place it would overwrite the gradient that the next run needs
        return LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)

    def liger_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return LigerLayerNormFunction.apply(x, w, b, 1e-5)

    def liger_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]

    return {
        "softmax": LigerSoftmaxFunction.apply,
        "rms_norm": liger_rms_norm,
        "layer_norm": liger_layer_norm,
        "linear_cross_entropy": liger_loss,
    }


def eager_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def eager_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def eager_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def eager_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.T).float(), target)


def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the backend that PyTorch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Timed whatever PyTorch chooses."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return eager_attention(q, k, v)


def one_vector(n: int, **where: Any) -> list[Tensor]:
    return [torch.randn(n, **where)]


def two_vectors(n: int, **where: Any) -> list[Tensor]:
    return [torch.randn(n, **where), torch.randn(n, **where)]


def only_rows(r: int, d: int, **where: Any) -> list[Tensor]:
    return [torch.randn(r, d, **where)]


def rows_and_a_vector(r: int, d: int, **where: Any) -> list[Tensor]:
    return [torch.randn(r, d, **where), torch.randn(d, **where)]


def rows_and_two_vectors(r: int, d: int, **where: Any) -> list[Tensor]:
    return [*rows_and_a_vector(r, d, **where), torch.randn(d, **where)]


def two_matrices(m: int, n: int, k: int, **where: Any) -> list[Tensor]:
    return [torch.randn(m, k, **where), torch.randn(k, n, **where)]


def tokens(n: int, d: int, v: int, **where: Any) -> list[Tensor]:
    x, w = torch.randn(n, d, **where), torch.randn(v, d, **where) / d**0.5
    return [x, w, torch.randint(v, (n,), device=where["device"])]


def heads(b: int, h: int, t: int, d: int, **where: Any) -> list[Tensor]:
    return [torch.randn(b, h, t, d, **where) for _ in range(3)]


def three_vectors_moved(n: int) -> dict[str, tuple[int, int]]:
    return {"forward": (3 * n, 0)}


def one_vector_moved(n: int) -> dict[str, tuple[int, int]]:
    return {"forward": (2 * n, 0), "backward": (2 * n, 0)}


def rows_moved(r: int, d: int) -> dict[str, tuple[int, int]]:
    """Forward x in, y out; backward dy and x or y in, dx out."""
    return {"forward": (2 * r * d, 0), "backward": (3 * r * d, 0)}


def product_computed(m: int, n: int, k: int) -> dict[str, tuple[int, int]]:
    return {"forward": (m * k + k * n + m * n, 2 * m * n * k)}


def loss_computed(n: int, d: int, v: int) -> dict[str, tuple[int, int]]:
    """Three products of n, d and v; x, w and their gradients once each."""
    return {"both": (2 * (n * d + v * d), 6 * n * d * v)}


def attention_computed(b: int, h: int, t: int, d: int) -> dict[str, tuple[int, int]]:
    """Half of 4 b h t^2 d: the causal half; backward: five products instead of two."""
    flop, size = 2 * b * h * t * t * d, b * h * t * d
    return {"forward": (4 * size, flop), "backward": (8 * size, 5 * flop // 2)}


def measure(
    device: torch.device, found: list[Case] | None = None, repeats: int = 30
) -> records.Record:
    """Time every case, its contenders in turn, the L2 cache emptied before each call.

    forward, backward: that pass alone; both: one after the other. A time is the device's, from the
    first kernel to the last; *_host: what the call takes on the host. *_peak: bytes allocated
    beyond the inputs. bytes: what the pass must read and write at least; flop: what it must
    compute. The provenance has this run's own ceilings, the copy bandwidth and the matrix rate, and
    which peers failed at which size.
    """
    torch.manual_seed(0)
    functorch.donated_buffer = False  # each backward pass runs many times
    if found is None:
        found = cases({} if INTERPRETED else liger_functions())
    clock = "time.perf_counter" if device.type == "cpu" else "CUDA events, L2 emptied before each"
    provenance = records.provenance(environment.versions(device), repeats=repeats, clock=clock)
    provenance |= {"triton": triton.__version__, "interpreted": INTERPRETED}
    ceilings = _ceilings(device)
    rows: list[dict] = []
    left_out: list[str] = []
    start = time.perf_counter()
    for case in found:
        for dtype in case.dtypes or DTYPES:
            for shape in case.shapes:
                torch.compiler.reset()
                rows += _rows(case, shape, dtype, device, repeats, left_out)
                print(case.kernel, dtype, shape, f"{time.perf_counter() - start:.0f} s", flush=True)
    provenance |= {"left_out": left_out}
    provenance |= ceilings | {"summary": summary(rows, ceilings, provenance["device"])}
    return records.Record("kernels", provenance, UNITS, rows)


def summary(rows: list[dict], ceilings: dict[str, float], device: str) -> dict[str, Any]:
    """Return what chapter 13 says of these rows, stored in the record so that it need not compute.

    shares: for each kernel and pass, at its largest size in bfloat16, the share of the ceiling
    that each contender reaches, None where it did not run. No pass is faster than its bytes at the
    bandwidth of a copy, or its FLOPs at the rate of a bfloat16 product, both of the same run.
    gains: eager mode's time over ours, for a large product and for a large bias and GELU.
    score: for each contender, in how many of its cases ours is not more than 2 % slower.
    loss_peaks: peak memory of eager and of fused linear cross-entropy, by shape.
    """
    bfloat16 = [row for row in rows if row["dtype"] == "bfloat16"]
    largest: dict[tuple[str, str], dict] = {}
    gains, loss_peaks = {}, {}
    for row in bfloat16:
        key = (row["kernel"], row["pass"])
        if key not in largest or _size(row) > _size(largest[key]):
            largest[key] = row
        if row["pass"] == "forward" and GAINS.get(row["kernel"]) == row["shape"]:
            gains[row["kernel"]] = f"{row['eager'][1] / row['ours'][1]:.2f}×"
        if row["kernel"] == "linear_cross_entropy" and row["ours_peak"]:
            peaks = (row["eager_peak"], row["ours_peak"])
            loss_peaks[row["shape"]] = ", ".join(f"{peak / 1e9:.2f} GB" for peak in peaks)

    score = {"device": device}
    for who in SPEED[1:]:
        met = [row for row in rows if row[who]]
        level = [row for row in met if row["ours"][1] <= 1.02 * row[who][1]]
        score[who] = f"{len(level)}/{len(met)}"
    shares = [_shares(row, ceilings) for row in largest.values()]
    return {"shares": shares, "gains": gains, "score": score, "loss_peaks": loss_peaks}


def _size(row: dict) -> tuple[int, int]:
    return row["bytes"], row["flop"]


def _shares(row: dict, ceilings: dict[str, float]) -> dict[str, Any]:
    moving = row["bytes"] / ceilings["copy_gb_per_s"] / 1e6  # ms
    computing = row["flop"] / ceilings["matmul_tflop_per_s"] / 1e9
    least = max(moving, computing)
    shares = {"kernel": row["kernel"], "pass": row["pass"]}
    for who in SPEED:
        shares[who] = least / row[who][1] if row[who] else None
    return shares


def _ceilings(device: torch.device, size: int = 2**29) -> dict[str, float]:
    """Bandwidth of a copy (bytes read and written) and rate of a bfloat16 product, of this run."""
    if device.type == "cpu":
        size = 2**20
    x = torch.empty(size, dtype=torch.bfloat16, device=device)
    n = 8192 if device.type == "cuda" else 128
    a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    copy = _interleaved({"copy": lambda: y.copy_(x)}, device, 10)["copy"].median
    product = _interleaved({"product": lambda: a @ a}, device, 10)["product"].median
    return {
        "copy_gb_per_s": float(f"{2 * x.nbytes / copy / 1e6:.4g}"),
        "matmul_tflop_per_s": float(f"{2 * n**3 / product / 1e9:.4g}"),
    }


def _rows(
    case: Case,
    shape: tuple,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    left_out: list[str],
) -> list[dict]:
    inputs = case.inputs(*shape, dtype=dtype, device=device)
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    contenders = {"ours": case.ours, "eager": case.eager, "compile": torch.compile(case.eager)}
    contenders |= case.peers
    rows = []
    for name, (elements, flop) in case.passes(*shape).items():
        what = f"{case.kernel}, {name}, {str(dtype).removeprefix('torch.')}, {shape}"
        calls = _usable(name, contenders, inputs, what, left_out)
        times, peaks = _interleaved(calls, device, repeats), _peaks(calls, device)
        row = {"kernel": case.kernel, "pass": name, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"shape": "x".join(map(str, shape))}
        row |= {who: times.get(who) for who in SPEED}
        row |= {f"{who}_host": times.get(f"{who}_host") for who in SPEED}
        row |= {f"{who}_peak": peaks.get(who) for who in SPEED}
        rows.append(row | {"bytes": elements * dtype.itemsize, "flop": flop})
    return rows


def _usable(
    name: str, contenders: dict[str, Callable], inputs: list[Tensor], what: str, left_out: list[str]
) -> dict[str, Callable]:
    """Return a call of each contender; a peer that fails here is left out, and `left_out` says so.

    Ours must not fail.
    """
    calls = {}
    for who, function in contenders.items():
        try:
            calls[who] = _pass(name, function, inputs)
            calls[who]()
        except Exception as error:
            if who == "ours":
                raise
            calls.pop(who, None)
            left_out.append(f"{who}, {what}: {type(error).__name__}: {str(error)[:200]}")
            print("left out:", left_out[-1], flush=True)
    return calls


def _pass(name: str, function: Callable, inputs: list[Tensor]) -> Callable[[], Any]:
    floats = [t for t in inputs if t.requires_grad]
    if name == "forward":
        fixed = [t.detach() for t in inputs]
        return lambda: function(*fixed)
    if name == "both":
        return lambda: torch.autograd.grad(function(*inputs), floats)
    y = function(*inputs)
    upstream = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, floats, upstream, retain_graph=True)


def _peaks(calls: dict[str, Callable], device: torch.device) -> dict[str, int | None]:
    if device.type != "cuda":
        return dict.fromkeys(calls)
    peaks = {}
    for who, call in calls.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks[who] = torch.cuda.max_memory_allocated() - before
    return peaks


def _interleaved(
    calls: dict[str, Callable], device: torch.device, repeats: int
) -> dict[str, timing.Quantiles]:
    """Return p20, median and p80 in ms of each call and its `_host` part, read in turns."""
    for call in calls.values():  # compile, tune, warm up
        for _ in range(3):
            call()
    reading = _reading_on_gpu(device) if device.type == "cuda" else _reading_on_cpu
    times: dict[str, list] = {name: [] for who in calls for name in (who, f"{who}_host")}
    for _ in range(repeats):
        for who, call in calls.items():
            device_ms, host_ms = reading(call)
            times[who].append(device_ms)
            times[f"{who}_host"].append(host_ms)
    return {name: timing.quantiles([float(t()) for t in some]) for name, some in times.items()}


def _reading_on_cpu(call: Callable) -> tuple[Callable, Callable]:
    start = time.perf_counter()
    call()
    took = (time.perf_counter() - start) * 1e3
    return lambda: took, lambda: took


def _reading_on_gpu(device: torch.device) -> Callable:
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)  # several times the L2

    def reading(call: Callable) -> tuple[Callable, Callable]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(2_000_000)  # about 1 ms: the kernels queue up and then run without gaps
        start.record()
        began = time.perf_counter()
        call()
        took = (time.perf_counter() - began) * 1e3
        end.record()
        return lambda: (end.synchronize(), start.elapsed_time(end))[1], lambda: took

    return reading
