"""Chapter 17: the same inputs through eager, compile, AOTInductor, ONNX Runtime and ExecuTorch.

All with their default options, except for "AOTInductor, frozen", whose compiler may fold and
rearrange the weights as ONNX Runtime does when it opens a file. ExecuTorch is measured where it is
installed, beside the others; without it, the rest is. It has one file for each batch size here.
"""

import copy
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnxruntime.quantization as ortq
import torch
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from torch.export import Dim

from helpers import data, environment, export, mnist, models, timing
from helpers.page import records

BATCHES = (1, 64)
BLOCKS = 5
CALLS = 200
UNITS = {"model": "name", "engine": "name", "batch": "samples", "p50": "ms", "p99": "ms"}
UNITS |= {"max_abs": "absolute", "relative": "relative", "exact": "relative", "bytes": "B"}
UNITS |= {"agree": "%", "first": "ms"}

Call = Callable[[Tensor], Tensor]


def measure(device: torch.device) -> records.Record:
    """A row for each model, engine and batch size; one thread, single calls in turns.

    p50, p99: of a block of calls, p20/p50/p80 over the blocks. first: to load the file, or to wrap
    the model, and call it once, in a process that has the libraries (compile compiles then, the
    others have done it before). max_abs, relative: from eager mode (`export.Parity`), over all
    inputs in batches; exact: from the same model in float64. agree: images of the test set that
    get eager mode's class, in whole batches. bytes: of the file. compile is specialized to each
    batch size, the files of AOTInductor and ONNX take any.
    """
    torch.set_num_threads(1)
    provenance = records.provenance(
        environment.versions(device) | _libraries(),
        repeats=BLOCKS * CALLS,
        clock="the host's, single calls",
    )
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, prepare in {"ConvNet": _convnet, "GPT": _gpt}.items():
            model, inputs, shapes, tested = prepare()
            path = Path(folder, name)
            path.mkdir()
            for batch in BATCHES:
                x = inputs[:batch]
                torch._dynamo.reset()  # or the second batch size is compiled as a dynamic one
                with torch.no_grad():
                    engines = list(_engines(model, inputs[:2], shapes, path, x))
                    rows += _rows(name, model, engines, batch, inputs, tested, device)
    return records.Record("export", provenance, UNITS, rows)


def _convnet() -> tuple[nn.Module, Tensor, dict, Tensor | None]:
    """A ConvNet trained for one pass over the digits: its input is 64 test images."""
    digits = data.digits()
    model = mnist.train(digits, mnist.Recipe(epochs=1), seed=0)
    model.to(memory_format=torch.contiguous_format)  # ExecuTorch 1.5 refuses other weights
    images = (digits.test_images.float() / 255 - data.MEAN) / data.STD
    return model, images[: max(BATCHES)], {0: Dim("batch", min=1, max=1024)}, images


def _gpt() -> tuple[nn.Module, Tensor, dict, Tensor | None]:
    """A GPT with random weights: its input is 64 sequences of 32 tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 65, (max(BATCHES), 32))
    gpt = models.GPT(models.GPTConfig(vocabulary=65, context=64))
    return gpt.eval(), tokens, {0: Dim("batch", min=1, max=1024)}, None


def _libraries() -> dict[str, str]:
    """The versions of what is compared."""
    names = ("onnx", "onnxscript", "onnxruntime", "executorch")
    have = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in names if name in have}


def _engines(
    model: nn.Module, example: Tensor, shapes: dict, path: Path, x: Tensor
) -> Iterator[tuple[str, Callable[[], Call], int]]:
    """Name, what loads the function, and bytes of the file of each engine; files are made once."""
    yield "eager", lambda: model, 0
    yield "compile", lambda: torch.compile(model, dynamic=False), 0
    program = export.export_for_inference(model, (example,), (shapes,))

    for name, options in {"AOTInductor": {}, "AOTInductor, frozen": {"freezing": True}}.items():
        package = path / f"{name}.pt2"
        if not package.exists():
            compile_ = torch._inductor.aoti_compile_and_package
            compile_(program, package_path=str(package), inductor_configs=options)
        load = partial(torch._inductor.aoti_load_package, str(package))
        yield name, load, package.stat().st_size

    plain, small = path / "model.onnx", path / "int8.onnx"
    if not plain.exists():
        onnx_program = torch.onnx.export(program, verbose=False)
        onnx_program.save(plain, external_data=False)
        _quantize(plain, small, model)
    for name, file in {"ONNX Runtime": plain, "ONNX Runtime int8": small}.items():
        yield name, partial(_onnx, file), file.stat().st_size

    if importlib.util.find_spec("executorch") is not None:
        yield _executorch(model, x, path)


def _onnx(file: Path) -> Call:
    call = export.onnx_call(export.onnx_session(file))
    return lambda x: call(x)[0]


class _Images(ortq.CalibrationDataReader):
    """256 training images in batches of 64, from which the ranges of the activations are taken."""

    def __init__(self, name: str):
        images = (data.digits().train_images[:256].float() / 255 - data.MEAN) / data.STD
        self.batches = iter([{name: part.numpy()} for part in images.split(64)])

    def get_next(self) -> dict | None:
        return next(self.batches, None)


def _quantize(plain: Path, small: Path, model: nn.Module) -> None:
    """Static int8 for convolutions, whose ranges are calibrated; dynamic for matrix products."""
    ready = plain.with_name("ready.onnx")
    quant_pre_process(plain, ready)
    if isinstance(model, models.ConvNet):
        name = export.onnx_session(plain).get_inputs()[0].name
        ortq.quantize_static(ready, small, _Images(name), per_channel=True)
    else:
        ortq.quantize_dynamic(ready, small, per_channel=True, weight_type=ortq.QuantType.QInt8)


def _executorch(model: nn.Module, x: Tensor, path: Path) -> tuple[str, Callable[[], Call], int]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    _unsafe_reset_threadpool(1)
    file = path / f"{len(x)}.pte"
    program = torch.export.export(model, (x,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    file.write_bytes(lowered.to_executorch().buffer)

    def load() -> Call:
        method = Runtime.get().load_program(str(file)).load_method("forward")
        return lambda x: method.execute([x])[0]

    return "ExecuTorch", load, file.stat().st_size


def _rows(
    name: str,
    model: nn.Module,
    engines: list[tuple[str, Callable[[], Call], int]],
    batch: int,
    inputs: Tensor,
    tested: Tensor | None,
    device: torch.device,
) -> Iterator[dict]:
    x = inputs[:batch]
    loaded, first = {}, {}
    for engine, load, _ in engines:

        def begin(engine: str = engine, load: Callable[[], Call] = load) -> None:
            loaded[engine] = load()
            loaded[engine](x)

        first[engine] = timing.host_ms(begin, device)
    took = export.latency({e: partial(c, x) for e, c in loaded.items()}, device, BLOCKS, CALLS)
    exact = _in_float64(model, inputs)
    for engine, _, size in engines:
        call = partial(_in_batches, loaded[engine], batch=batch)
        apart = export.parity(model, call, [(inputs,)])[0]
        far = export.parity(lambda _: exact, call, [(inputs,)])[0]
        yield {
            "model": name,
            "engine": engine,
            "batch": batch,
            "p50": took[engine].p50,
            "p99": took[engine].p99,
            "max_abs": apart.max_abs,
            "relative": apart.relative,
            "exact": far.relative,
            "bytes": size,
            "agree": None if tested is None else _agreement(model, loaded[engine], tested, batch),
            "first": float(f"{first[engine]:.4g}"),
        }


def _in_batches(call: Call, inputs: Tensor, batch: int) -> Tensor:
    return torch.cat([call(part) for part in inputs.split(batch)])


def _in_float64(model: nn.Module, x: Tensor) -> Tensor:
    """Return the result of the model with all numbers in float64; the model stays as it is."""
    wide = copy.deepcopy(model).double()
    return wide(x.double() if x.is_floating_point() else x)


def _agreement(model: nn.Module, call: Call, images: Tensor, batch: int) -> float:
    """Return the percentage of images with the same most probable class, in batches of `batch`."""
    parts = [part for part in images.split(batch) if len(part) == batch]
    same = [model(part).argmax(1) == call(part).argmax(1) for part in parts]
    return round(100 * torch.cat(same).double().mean().item(), 2)
