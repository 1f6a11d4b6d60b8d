"""Chapter 16: size, speed and accuracy of three trained models, quantized in several ways.

A wide MLP and the book's ConvNet read digits (full MNIST where it is found, else the embedded
digits), and a small GPT predicts the next byte of Python's language reference. Each model is
trained here and quantized by torchao (`quantize_`, PT2E), and by ONNX Runtime. All ways take turns
on the same inputs, one thread each. `speedup` compares with PyTorch in float32, eager; `same` with
float32 in the same runtime (eager, compiled, or ONNX Runtime).

Accuracies are in percent; `margin` is half of the 95 % interval of the difference from float32 over
the same digits (or the same sequences). Sizes are of the file that one would ship.
"""

import copy
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


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the model compiled with its weights as constants, as the int8 kernels need it."""
    torch._dynamo.reset()
    fast = torch.compile(model, dynamic=False)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad(), torch._inductor.config.patch(freezing=True):
            return fast(x).float()

    return run


def add_eager(task: Task) -> None:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup

    task.ways["float32"] = ("eager", in_pytorch(task.model), file_bytes(task.model.state_dict()))
    half = copy.deepcopy(task.model).bfloat16()

    def in_bf16(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return half(x.bfloat16() if x.is_floating_point() else x).float()

    task.ways["bf16"] = ("eager", in_bf16, file_bytes(half.state_dict()))
    configs = {"int8 weight-only, torchao": Int8WeightOnlyConfig()}
    if "ConvNet" not in task.name:  # `quantize_` leaves its convolutions as they are
        configs |= {
            "int8 dynamic, torchao": Int8DynamicActivationInt8WeightConfig(),
            "int4 weight-only, torchao": IntxWeightOnlyConfig(
                weight_dtype=torch.int4, granularity=PerGroup(16)
            ),
        }
    for name, config in configs.items():
        quantized = copy.deepcopy(task.model)
        quantize_(quantized, config)
        task.ways[name] = ("eager", in_pytorch(quantized), file_bytes(quantized.state_dict()))


def add_compiled(task: Task) -> None:
    task.ways["float32, compiled"] = (
        "compiled",
        per_batch(task, lambda batch: copy.deepcopy(task.model)),
        file_bytes(task.model.state_dict()),
    )
    for name, dynamic in (("int8 static, PT2E", False), ("int8 dynamic, PT2E", True)):
        if dynamic and "ConvNet" in task.name:
            continue  # the quantizer has no dynamic convolution

        def made(batch: int, dynamic: bool = dynamic) -> nn.Module:
            return pt2e(task, batch, dynamic=dynamic)

        task.ways[name] = ("compiled", per_batch(task, made), int8_bytes(task.model))
    if "GPT" not in task.name:
        trained: dict[str, Tensor] = {}

        def made_qat(batch: int) -> nn.Module:
            return pt2e(task, batch, dynamic=False, qat_steps=150, trained=trained)

        task.ways["int8 QAT, PT2E"] = (
            "compiled",
            per_batch(task, made_qat),
            int8_bytes(task.model),
        )


def per_batch(task: Task, make: Callable[[int], nn.Module]) -> Callable[[Tensor], Tensor]:
    """Return what runs the program that was compiled for this batch size, all made beforehand."""
    made = {batch: compiled(make(batch)) for batch in BATCHES}
    for batch in BATCHES:
        made[batch](task.test[:batch])
    return lambda x: made[len(x)](x)


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


def pt2e(
    task: Task,
    batch: int,
    *,
    dynamic: bool,
    qat_steps: int = 0,
    trained: dict[str, Tensor] | None = None,
) -> nn.Module:
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(
        x86.get_default_x86_inductor_quantization_config(is_qat=qat_steps > 0, is_dynamic=dynamic)
    )
    source = task.model
    if qat_steps:
        # trained once with a batch of 128, and its tuned weights taken over for each batch size
        source = copy.deepcopy(task.model)
        if not trained:
            tuned = copy.deepcopy(task.model).train()
            example = torch.cat(task.calibration)[:128]
            program = torch.export.export(tuned, (example,)).module()
            prepared = prepare_qat_pt2e(program, quantizer)
            move_exported_model_to_train(prepared)
            task.train(prepared, qat_steps)
            state = prepared.state_dict()
            trained |= {k: v.detach() for k, v in state.items() if k in source.state_dict()}
        source.load_state_dict(trained)
        source.eval()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=False))
    program = torch.export.export(source, (task.test[:batch],)).module()
    prepared = prepare_pt2e(program, quantizer)
    with torch.no_grad():
        for x in task.calibration:
            for part in x.split(batch)[: 64 // min(batch, 64)]:
                prepared(part)
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
    quantize_dynamic(ready, dynamic, weight_type=QuantType.QInt8)
    paths["int8 dynamic, ONNX Runtime"] = dynamic
    common = {
        "activation_type": QuantType.QInt8,
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


def rows_of(task: Task, device: torch.device) -> list[dict]:
    base = {"eager": "float32", "compiled": "float32, compiled"}
    base["ONNX Runtime"] = "float32, ONNX Runtime"
    right = {name: task.correct(run) for name, (_, run, _) in task.ways.items()}
    rows = []
    for batch in BATCHES:
        x = task.test[:batch].clone()
        calls = {name: partial(run, x) for name, (_, run, _) in task.ways.items()}
        taken = timing.readings(calls, device, REPEATS)
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
    clock = "one call of each way in turns, one thread; compiled and warmed up before"
    provenance = records.provenance(environment.versions(device), repeats=REPEATS, clock=clock)
    tasks = [
        digit_task("MLP 784-1024-1024-10", models.MLP(784, 1024, 1024, 10), True, steps=1200),
        digit_task("ConvNet, width 16", models.ConvNet(width=16), False, steps=800),
        gpt_task(steps=400),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            for add in (add_eager, add_compiled, lambda t: add_onnx(t, Path(folder))):
                add(task)
            rows += rows_of(task, device)
            for row in rows[-2 * len(task.ways) :]:
                print(row)
    return records.Record("quantization", provenance, UNITS, rows)
