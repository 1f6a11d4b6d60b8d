"""Chapter 17, exercises: which dimensions vary, a branch, a check of parity, a file in the end."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from helpers import export
from helpers.exercises.harness import Exercise, WrongAnswer

# ---- 1: which dimensions vary


class MaskedMean(nn.Module):
    """Mean of the tokens' vectors where the mask is 1: [B, T], [B, T] -> [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        vectors = torch.arange(40.0).reshape(10, 4)
        self.vectors = nn.Embedding.from_pretrained(vectors)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        weights = mask / mask.sum(dim=1, keepdim=True)
        return (self.vectors(tokens) * weights[:, :, None]).sum(dim=1)


def choose_shapes() -> tuple[dict[int, Any], ...]:
    """Return the dynamic shapes: up to 32 sequences of up to 128 tokens, the mask as large."""
    batch, length = Dim("batch", min=1, max=32), Dim("length", min=1, max=128)
    return {0: batch, 1: length}, {0: batch, 1: length}


def _exported(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return the exported model's answer for tokens and a mask, whose sizes may be refused."""
    programs: list[Any] = []

    def run(tokens: Tensor, mask: Tensor) -> Any:
        if not programs:
            shapes = answer()
            if shapes is ...:
                return ...
            example = (torch.zeros(3, 5, dtype=torch.int64), torch.ones(3, 5))
            program = torch.export.export(MaskedMean(), example, dynamic_shapes=shapes)
            programs.append(program.module())
        return programs[0](tokens, mask)

    return run


def _sequences() -> list[tuple]:
    sizes = [(3, 5), (1, 1), (32, 128), (1, 128), (8, 3), (33, 5), (3, 129)]
    return [(torch.randint(0, 10, size), torch.ones(size)) for size in sizes]


# ---- 2: a branch in the graph


def shrink(x: Tensor) -> Tensor:
    """Return x divided by its length if that is above 1, and x otherwise."""
    length = x.norm()
    return torch.where(length > 1, x / length, x)


def _in_a_program(answer: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Export the function with a short vector as the example, and return the program."""
    programs: list[Any] = []

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return answer(x)

    def run(x: Tensor) -> Any:
        example = torch.full((4,), 0.1)
        if answer(example) is ...:
            return ...
        if not programs:
            programs.append(torch.export.export(Model(), (example,)).module())
        return programs[0](x)

    return run


def _vectors() -> list[tuple[Tensor]]:
    short = torch.tensor([0.1, -0.2, 0.3, 0.0])
    return [(short,), (10 * short,), (torch.randn(4) * 100,), (torch.ones(4) / 2,), (short * 0,)]


# ---- 3: does the exported model compute the same?


def same_results(expected: Tensor, got: Tensor, tolerance: float) -> bool:
    """Compare [samples, numbers]: each sample's difference against the length of its result."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    difference = (expected.double() - got.double()).norm(dim=1)
    return bool((difference <= tolerance * expected.double().norm(dim=1)).all())


def _results() -> list[tuple[Tensor, Tensor, float]]:
    x = torch.randn(6, 10)
    noise = x * (1 + 1e-6 * torch.randn(6, 10))
    one_wrong = x.clone()
    one_wrong[3, 7] += 0.01
    near_zero = x.clone()
    near_zero[2, 4] = 1e-9
    moved = near_zero.clone()
    moved[2, 4] = 3e-9  # three times as much, and nothing against the rest of the row
    rows = x * torch.tensor([1e3, 1e3, 1e-3, 1.0, 1.0, 1.0])[:, None]
    hidden = rows.clone()
    hidden[2] *= 1.01  # small beside the longest row, large for its own
    broken = x.clone()
    broken[0, 0] = torch.nan
    below = x.clone()
    below[1] -= 0.1  # a signed difference would pass a test of the maximum
    return [
        (x, x.clone(), 1e-5),
        (x, noise, 1e-5),
        (x, one_wrong, 1e-5),
        (near_zero, moved, 1e-5),
        (rows, hidden, 1e-5),
        (x, broken, 1e-5),
        (x, below, 1e-5),
        (torch.ones(6, 10), torch.ones(1, 10), 1e-5),  # equal once it is broadcast
        (x[:, :1], x[:, 0], 1e-5),
        (x, x.double(), 1e-5),
        (x, x * 1.001, 1e-2),
        (x * 0, x * 0, 1e-5),
    ]


# ---- 4: from a faulty model to a file


class Scaled(nn.Module):
    """The faulty model of the notebook, repaired: [N, 2, 3] -> [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x.max() > 1, x / 255, x)
        return self.dropout(self.layer(x.reshape(x.shape[0], 6)))


def _scaled() -> Scaled:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Scaled().eval()


def _in_a_file(answer: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """Return what ONNX Runtime computes with the file that the answer writes.

    The specification is the repaired model itself, without a file.
    """
    model = _scaled()
    if answer is Scaled:
        return torch.no_grad()(model)
    calls: list[Callable[..., list[Tensor]]] = []

    def run(x: Tensor) -> Any:
        if not calls:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.onnx")
                if answer(model.state_dict(), path) is ...:
                    return ...
                if not path.exists():
                    raise WrongAnswer("expected a file at the path, got none")
                calls.append(export.onnx_call(export.onnx_session(path)))
        return calls[0](x)[0]

    return run


def _measured() -> list[tuple[Tensor]]:
    """Values from 0 to 1 and from 0 to 255, in several batch sizes."""
    sizes_and_tops = ((4, 1), (4, 255), (1, 255), (7, 1), (64, 255))
    cases = [(torch.rand(size, 2, 3) * top,) for size, top in sizes_and_tops]
    dark = torch.rand(5, 2, 3) * 255
    dark[3] /= 255  # at most 1, and still to be divided: the largest value counts for all
    return [*cases, (dark,)]


EXERCISES = {
    "choose_shapes": Exercise(reference=choose_shapes, cases=_sequences, through=_exported),
    "shrink": Exercise(reference=shrink, cases=_vectors, through=_in_a_program),
    "same_results": Exercise(reference=same_results, cases=_results),
    "write_onnx": Exercise(reference=Scaled, cases=_measured, through=_in_a_file),
}
