"""Chapter 16: size, speed and accuracy of three trained models, quantized in several ways.

A wide MLP and the book's ConvNet read digits (full MNIST where it is found, else the embedded
digits), and a small GPT predicts the next byte of Python's language reference. Each model is
trained here and quantized by torchao (`quantize_`, PT2E), by the old `torch.ao.quantization`, and
by ONNX Runtime. All ways take turns on the same inputs, one thread each. In its turn, a way runs
once untimed, which brings its weights back into the caches, and then `CALLS` times back to back:
the same for all of them. `speedup` compares with PyTorch in float32, eager; `same` with float32 in
the same runtime (eager, compiled, or ONNX Runtime).

Some pairs run the same program twice: "float32" and "float32, again", and for the MLP PT2E's static
and QAT programs, which differ in the values of their weights only. What separates a pair is noise.
(For the ConvNet, the quantizer for QAT also quantizes the result of the last convolution.)

Accuracies are in percent; `margin` is half of the 95 % interval of the difference from float32 over
the same digits (or the same sequences). "float32, more steps" has had the same additional training
as QAT. Sizes are of the file that one would ship.
"""

import copy
import importlib.metadata
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import data, environment, models, timing
from helpers.page import records
from helpers.quantization import file_bytes, paired_change

REPEATS = 21
BATCHES = (1, 64)
CALLS = {1: 20, 64: 3}  # back to back in one reading, for each batch size
MORE_STEPS = 150
UNITS = {
    "model": "name",
    "method": "name",
    "runtime": "name",
    "batch": "count",
    "size": "B",
    "time": "ms",
    "speedup": "float32 eager / this",
    "same": "float32 in the same runtime / this",
    "accuracy": "%",
    "float32": "%",
    "margin": "%",
}


@dataclass
class Task:
    """A trained model with what calibrates and what tests it.

    ways: method -> (runtime, what runs a batch, bytes of the file).
    """

    name: str
    model: nn.Module
    calibration: list[Tensor]
    test: Tensor
    targets: Tensor
    train: Callable[[nn.Module, int], None]  # model, steps: for QAT
    ways: dict[str, tuple] = field(default_factory=dict)

    def correct(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for x, y in zip(self.test.split(64), self.targets.split(64), strict=True):
            right = (run(x).argmax(-1) == y).double()
            parts.append(right if right.ndim == 1 else right.mean(1))  # a sequence is a sample
        return torch.cat(parts)


# ---- the models


def digit_task(name: str, model: nn.Module, flat: bool, steps: int) -> Task:
    digits = data.mnist(download=False)
    train_x, test_x = data.normalize(digits.train_images), data.normalize(digits.test_images)
    if flat:
        train_x, test_x = train_x.flatten(1), test_x.flatten(1)

    def train(model: nn.Module, steps: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if steps > 200 else 1e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
        for _ in range(steps):
            i = torch.randint(len(train_x), (128,))
            loss = F.cross_entropy(model(train_x[i]), digits.train_labels[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    train(model.train(), steps)
    whole = len(test_x) // 64 * 64  # compiled models know one batch size
    calibration = list(train_x[torch.randperm(len(train_x))[:512]].split(64))
    test, labels = test_x[:whole], digits.test_labels[:whole]
    return Task(name, model.eval(), calibration, test, labels, train)


def gpt_task(steps: int) -> Task:
    text = "\n\n".join(topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    context, held_out = 64, 65 * 512
    train_part, test_part = tokens[:-held_out], tokens[-held_out:].view(512, 65)
    config = models.GPTConfig(vocabulary=256, context=context, layers=4, heads=4, width=256)
    model = models.GPT(config)

    def windows(count: int) -> Tensor:
        starts = torch.randint(len(train_part) - context - 1, (count, 1))
        return train_part[starts + torch.arange(context + 1)]

    def train(model: nn.Module, steps: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
        for _ in range(steps):
            chosen = windows(32)
            logits = model(chosen[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    train(model.train(), steps)
    calibration = [windows(64)[:, :-1] for _ in range(4)]
    name = f"GPT, {config.layers} layers, width {config.width}"
    return Task(name, model.eval(), calibration, test_part[:, :-1], test_part[:, 1:], train)


# ---- the ways: each returns {batch: call}, the call that takes any batch of 64, and the bytes


def in_pytorch(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(x).float()

    return run


def compiled(model: nn.Module, examples: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the model compiled; `measure` has its weights made constants, as int8 kernels need it.

    Each batch size gets a program of its own, compiled here, by its first call. A later
    `torch._dynamo.reset()` would drop them all, to be compiled again without constants.
    """
    fast = {}
    with torch.no_grad():
        for batch in BATCHES:
            own = copy.deepcopy(model)
            fast[batch] = torch.compile(own, dynamic=False, isolate_recompiles=True)
            fast[batch](examples[:batch])

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return fast[len(x)](x).float()

    return run


class InBfloat16(nn.Module):
    """A model whose floats are bfloat16, for float32 inputs or tokens."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = copy.deepcopy(model).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.bfloat16() if x.is_floating_point() else x)


def in_int4(model: nn.Module) -> nn.Module:
    """Return a copy with packed 4-bit weights in groups of 32.

    Only of layers with a multiple of 32 inputs and of 16 outputs, as the kernel needs them.
    """
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    quantized = copy.deepcopy(model)
    quantize_(
        quantized,
        PrototypeInt4WeightOnlyConfig(group_size=32),
        lambda module, name: (
            isinstance(module, nn.Linear)
            and module.in_features % 32 == 0
            and module.out_features % 16 == 0
        ),
    )
    return quantized


def by_torchao(model: nn.Module, config: object) -> nn.Module:
    from torchao.quantization import quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, config)
    return quantized


def add_eager(task: Task) -> None:
    size = file_bytes(task.model.state_dict())
    task.ways["float32"] = ("eager", in_pytorch(task.model), size)
    task.ways["float32, again"] = ("eager", in_pytorch(copy.deepcopy(task.model)), size)
    half = InBfloat16(task.model)
    task.ways["bf16"] = ("eager", in_pytorch(half), file_bytes(half.state_dict()))
    for name, quantized in torchao_models(task).items():
        run = in_pytorch(quantized)
        task.ways[f"{name}, torchao"] = ("eager", run, file_bytes(quantized.state_dict()))
    if "ConvNet" not in task.name:  # it has no convolutions
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated: chapter 16 says so
            old = torch.ao.quantization.quantize_dynamic(copy.deepcopy(task.model), {nn.Linear})
        run = in_pytorch(old)
        task.ways["int8 dynamic, torch.ao"] = ("eager", run, file_bytes(old.state_dict()))


def torchao_models(task: Task) -> dict[str, nn.Module]:
    """The models that `quantize_` makes. It leaves convolutions as they are."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    found = {
        "int8 weight-only": by_torchao(task.model, Int8WeightOnlyConfig(set_inductor_config=False))
    }
    if "ConvNet" not in task.name:
        dynamic = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        found["int8 dynamic"] = by_torchao(task.model, dynamic)
    if "MLP" in task.name:  # for the 4096 tokens of a batch of the GPT, its kernel takes seconds
        found["int4 weight-only"] = in_int4(task.model)
    return found


def add_compiled(task: Task) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    def add(name: str, model: nn.Module, size: int) -> None:
        task.ways[name] = ("compiled", compiled(model, task.test), size)

    half = InBfloat16(task.model)
    add("float32, compiled", task.model, file_bytes(task.model.state_dict()))
    add("bf16, compiled", half, file_bytes(half.state_dict()))
    for name, quantized in torchao_models(task).items():
        if "int4" not in name:  # its kernel is the same one
            add(f"{name}, torchao, compiled", quantized, file_bytes(quantized.state_dict()))
    # its kernel for weights alone takes bfloat16 only
    both = by_torchao(half, Int8WeightOnlyConfig(set_inductor_config=False))
    add("int8 weight-only, bf16, torchao, compiled", both, file_bytes(both.state_dict()))

    small = int8_bytes(task.model)
    add("int8 static, PT2E", pt2e(task, dynamic=False), small)
    if "ConvNet" not in task.name:  # the quantizer has no dynamic convolution
        add("int8 dynamic, PT2E", pt2e(task, dynamic=True), small)
    if "GPT" not in task.name:
        add("int8 QAT, PT2E", pt2e(task, dynamic=False, qat_steps=MORE_STEPS), small)
        longer = copy.deepcopy(task.model).train()
        task.train(longer, MORE_STEPS)
        run = in_pytorch(longer.eval())
        size = file_bytes(longer.state_dict())
        task.ways["float32, more steps"] = ("eager", run, size)


def int8_bytes(model: nn.Module) -> int:
    """Return the bytes of a file with int8 weights of linear layers and convolutions.

    The rest stays float32. PT2E's own state dict keeps the float32 weights, too: it is larger.
    """
    state = {}
    seen: set[int] = set()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            kind = isinstance(module, (nn.Linear, nn.Conv2d)) and name == "weight"
            state[str(len(state))] = p.detach().to(torch.int8) if kind else p.detach()
            if kind:
                state[f"{len(state)} scale"] = torch.zeros(len(p))
    return file_bytes(state)


def pt2e(task: Task, *, dynamic: bool, qat_steps: int = 0) -> nn.Module:
    """Return the program with integer products, for any batch size."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(
        x86.get_default_x86_inductor_quantization_config(is_qat=qat_steps > 0, is_dynamic=dynamic)
    )
    shapes = ({0: torch.export.Dim("batch", min=1, max=1024)},)
    source = copy.deepcopy(task.model).train(qat_steps > 0)
    example = (task.calibration[0][:8],)
    program = torch.export.export(source, example, dynamic_shapes=shapes).module()
    if qat_steps:
        prepared = prepare_qat_pt2e(program, quantizer)
        move_exported_model_to_train(prepared)
        task.train(prepared, qat_steps)
        move_exported_model_to_eval(prepared)
    else:
        prepared = prepare_pt2e(program, quantizer)
        with torch.no_grad():
            for x in task.calibration:
                prepared(x)
    quantized = convert_pt2e(prepared)
    move_exported_model_to_eval(quantized)
    return quantized


def add_onnx(task: Task, folder: Path) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Batches(CalibrationDataReader):
        def __init__(self, batches: list[Tensor]):
            self.left = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.left, None)
            return None if batch is None else {"x": batch.numpy()}

    stem = task.name.split()[0].strip(",").lower()
    plain, ready = folder / f"{stem}.onnx", folder / f"{stem}.ready.onnx"
    torch.onnx.export(
        task.model,
        (task.test[:64],),
        plain,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        verbose=False,
    )
    quant_pre_process(plain, ready)
    paths = {"float32, ONNX Runtime": ready}
    dynamic, static, four = (folder / f"{stem}.{way}.onnx" for way in ("dyn", "static", "int4"))
    quantize_dynamic(ready, dynamic, weight_type=QuantType.QInt8, per_channel=True)
    paths["int8 dynamic, ONNX Runtime"] = dynamic
    common = {
        "activation_type": QuantType.QUInt8,  # what its documentation advises for x86 with VNNI
        "weight_type": QuantType.QInt8,
        "per_channel": True,
        "calibrate_method": CalibrationMethod.MinMax,
    }
    quantize_static(ready, static, Batches(task.calibration), **common)
    paths["int8 static, ONNX Runtime"] = static
    if "GPT" in task.name:  # everything else, such as the mask and softmax, stays in float32
        products = folder / f"{stem}.products.onnx"
        only = {"op_types_to_quantize": ["MatMul"]}
        quantize_static(ready, products, Batches(task.calibration), **common, **only)
        paths["int8 static MatMul, ONNX Runtime"] = products
    if "GPT" in task.name:  # it looks for MatMul; layers of [N, in] are exported as Gemm
        import onnx

        quantizer = MatMulNBitsQuantizer(onnx.load(ready), block_size=32, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(four))
        paths["int4 weight-only, ONNX Runtime"] = four
    for name, path in paths.items():
        task.ways[name] = ("ONNX Runtime", in_onnx_runtime(path), path.stat().st_size)


def in_onnx_runtime(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])

    return run


# ---- the table


def in_turns(
    calls: dict[str, Callable], device: torch.device, times: int
) -> dict[str, list[float]]:
    """Return `REPEATS` readings in ms of each call, each after a call that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compiled models are specialized to this batch size by now
        call()
    for _ in range(REPEATS):
        for name, call in calls.items():
            call()
            taken[name].append(timing.host_ms(call, device, times))
    return taken


def rows_of(task: Task, device: torch.device) -> list[dict]:
    base = {"eager": "float32", "compiled": "float32, compiled"}
    base["ONNX Runtime"] = "float32, ONNX Runtime"
    right = {name: task.correct(run) for name, (_, run, _) in task.ways.items()}
    rows = []
    for batch in BATCHES:
        x = task.test[:batch].clone()
        calls = {name: partial(run, x) for name, (_, run, _) in task.ways.items()}
        taken = in_turns(calls, device, CALLS[batch])
        for name, (runtime, _, size) in task.ways.items():
            _, margin = paired_change(right["float32"], right[name])

            def ratio(other: str, this: str = name, taken: dict = taken) -> timing.Quantiles:
                pairs = zip(taken[other], taken[this], strict=True)
                return timing.quantiles([a / b for a, b in pairs])

            rows.append(
                {
                    "model": task.name,
                    "method": name,
                    "runtime": runtime,
                    "batch": batch,
                    "size": size,
                    "time": timing.quantiles(taken[name]),
                    "speedup": ratio("float32"),
                    "same": ratio(base[runtime]),
                    "accuracy": round(100 * right[name].mean().item(), 3),
                    "float32": round(100 * right["float32"].mean().item(), 3),
                    "margin": round(100 * margin, 3),
                }
            )
    return rows


def measure(device: torch.device) -> records.Record:
    if device.type != "cpu":
        raise ValueError(f"these int8 kernels are for a CPU: --device cpu, got {device}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = f"in turns, {CALLS} calls by batch size after an untimed one, one thread"
    here = environment.versions(device) | {
        name: importlib.metadata.version(name) for name in ("torchao", "onnxruntime")
    }
    here["vnni"] = str(torch.cpu.get_capabilities().get("avx512_vnni", False))
    provenance = records.provenance(here, repeats=REPEATS, clock=clock)
    tasks = [
        digit_task("MLP 784-1024-1024-10", models.MLP(784, 1024, 1024, 10), True, steps=1200),
        digit_task("ConvNet, width 16", models.ConvNet(width=16), False, steps=800),
        gpt_task(steps=400),
    ]
    rows = []
    # for the whole run: some programs compile again later, and would do so without constants
    frozen = torch._inductor.config.patch(freezing=True)
    with tempfile.TemporaryDirectory() as folder, frozen:
        for task in tasks:
            for add in (add_eager, add_compiled, lambda t: add_onnx(t, Path(folder))):
                add(task)
            rows += rows_of(task, device)
            for row in rows[-2 * len(task.ways) :]:
                print(row)
    return records.Record("quantization", provenance, UNITS, rows)
