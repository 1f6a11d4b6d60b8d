import pytest
import torch
from torch.export import Dim

from helpers.exercises import check
from helpers.exercises.export import Scaled
from helpers.exercises.harness import WrongAnswer, find


def shapes(low=1, batches=32, lengths=128, mask=True, axes=(0, 1)):
    """The right answer, or one of its mistakes."""

    def choose():
        found = {0: Dim("batch", min=low, max=batches), 1: Dim("length", min=low, max=lengths)}
        found = {axis: found[axis] for axis in axes}
        return found, found if mask else None

    return choose


def separate():
    return (
        {0: Dim("batch", min=1, max=32), 1: Dim("length", min=1, max=128)},
        {0: Dim("rows", min=1, max=32), 1: Dim("columns", min=1, max=128)},
    )


def swapped():
    batch, length = Dim("batch", min=1, max=32), Dim("length", min=1, max=128)
    return {1: batch, 0: length}, {1: batch, 0: length}


def with_cond(x):
    def divide(x):
        return x / x.norm()

    def keep(x):
        return x.clone()

    return torch.cond(x.norm() > 1, divide, keep, (x,))


def with_if(x):
    return x / x.norm() if x.norm() > 1 else x


def baked(x):
    return x.clone()  # the branch that the example takes


def norms(tolerance_of=None, shape=True, dtype=True, whole=False, signed=False):
    def compare(expected, got, tolerance):
        if shape and expected.shape != got.shape:
            return False
        if dtype and expected.dtype != got.dtype:
            return False
        a, b = expected.double(), got.double()
        if whole:
            return bool((a - b).norm() <= tolerance * a.norm())
        if signed:
            return bool(((b - a).sum(dim=1) <= tolerance * a.norm(dim=1)).all())
        return bool(((a - b).norm(dim=1) <= tolerance * a.norm(dim=1)).all())

    return compare


def not_above(expected, got, tolerance):
    """With NaN, no comparison is true: nothing seems to be too large."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    difference = (expected.double() - got.double()).norm(dim=1)
    return not bool((difference > tolerance * expected.double().norm(dim=1)).any())


def by_ratio(expected, got, tolerance):
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    a, b = expected.double(), got.double()
    return bool(((a - b).norm(dim=1) / a.norm(dim=1) <= tolerance).all())


class Frozen(Scaled):
    """The branch of the example, which has numbers from 0 to 1."""

    def forward(self, x):
        return self.dropout(self.layer(x.reshape(x.shape[0], 6)))


class AlwaysDivided(Scaled):
    def forward(self, x):
        return self.dropout(self.layer(x.reshape(x.shape[0], 6) / 255))


class ForFour(Scaled):
    def forward(self, x):
        x = torch.where(x.max() > 1, x / 255, x)
        return self.dropout(self.layer(x.reshape(4, 6)))


class EachSample(Scaled):
    def forward(self, x):
        x = x.reshape(x.shape[0], 6)
        x = torch.where(x.amax(dim=1, keepdim=True) > 1, x / 255, x)
        return self.dropout(self.layer(x))


class Branch(Scaled):
    """The `if` stays."""

    def forward(self, x):
        if x.max() > 1:
            x = x / 255
        return self.dropout(self.layer(x.reshape(x.shape[0], 6)))


class Chosen(Scaled):
    def forward(self, x):
        x = torch.cond(x.max() > 1, lambda v: v / 255, lambda v: v.clone(), (x,))
        return self.dropout(self.layer(x.flatten(1)))


def file_of(kind, training=False, shapes=True, load=True, save=True, draft=False):
    """Write `kind` to a file: right, or with one of the mistakes."""

    def write(weights, path):
        model = kind().train(training)
        if load:
            model.load_state_dict(weights)
        dims = ({0: Dim("batch", min=1, max=64)},) if shapes else None
        how = torch.export.draft_export if draft else torch.export.export
        program = how(model, (torch.rand(4, 2, 3),), dynamic_shapes=dims)
        written = torch.onnx.export(program, verbose=False)
        if save:
            written.save(path)

    return write


RIGHT = {
    "choose_shapes": [
        shapes(),
        lambda: tuple([{0: Dim("b", min=1, max=32), 1: Dim("t", min=1, max=128)}] * 2),
    ],
    "shrink": [
        with_cond,
        lambda x: x / x.norm().clamp(min=1),
    ],
    "same_results": [
        norms(),
        lambda a, b, t: (
            a.shape == b.shape
            and a.dtype == b.dtype
            and all(
                (p.double() - q.double()).norm().item() <= t * p.double().norm().item()
                for p, q in zip(a, b, strict=True)
            )
        ),
    ],
    "write_onnx": [file_of(Scaled), file_of(Chosen)],
}

WRONG = {
    "choose_shapes": [
        shapes(low=3),
        shapes(batches=64),
        shapes(batches=31),
        shapes(lengths=256),
        shapes(mask=False),
        shapes(axes=(0,)),
        shapes(axes=(1,)),
        separate,
        swapped,
        lambda: None,
        lambda: ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}),
    ],
    "shrink": [
        with_if,
        baked,
        lambda x: x / x.norm(),
        lambda x: torch.where(x.norm() > 1, x, x / x.norm()),
        lambda x: x / x.abs().max().clamp(min=1),
        lambda x: x / x.norm().clamp(max=1),
        lambda x: x / x.norm().item() if x.norm().item() > 1 else x,
    ],
    "same_results": [
        lambda a, b, t: torch.equal(a, b),
        lambda a, b, t: torch.allclose(a, b, rtol=t) if a.shape == b.shape else False,
        lambda a, b, t: bool(((a - b).abs() <= t * a.abs()).all()) and a.dtype == b.dtype,
        norms(shape=False),
        norms(dtype=False),
        norms(whole=True),
        norms(signed=True),
        not_above,
        by_ratio,
        lambda a, b, t: True,
        lambda a, b, t: bool((a.argmax(1) == b.argmax(1)).all()),
    ],
    "write_onnx": [
        file_of(Scaled, training=True),
        file_of(Scaled, shapes=False),
        file_of(Scaled, load=False),
        file_of(Scaled, save=False),
        file_of(Frozen),
        file_of(AlwaysDivided),
        file_of(ForFour, shapes=False),
        file_of(EachSample),
        file_of(Branch),
        file_of(Branch, draft=True),
        lambda weights, path: Scaled(),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("choose_shapes", shapes(lengths=256), "expected AssertionError"),
        ("choose_shapes", shapes(axes=(0,)), "got "),
        ("shrink", with_if, "expected a result, got GuardOnDataDependentSymNode"),
        ("shrink", baked, "case 2 of 5"),
        ("same_results", norms(whole=True), "value is not right: True"),
        ("write_onnx", file_of(Scaled, save=False), "expected a file at the path, got none"),
        ("write_onnx", file_of(Scaled, shapes=False), "Got: 1 Expected: 4"),
        ("write_onnx", file_of(Branch), "expected a result, got GuardOnDataDependentSymNode"),
        ("write_onnx", file_of(Frozen), "case 2 of 6, f(float32[4, 2, 3]): value: "),
    ],
)
def test_the_message_says_what_is_wrong(capsys, name, answer, words):
    check(f"export.{name}", answer)
    assert words in capsys.readouterr().out


def test_an_answer_that_writes_no_file():
    exercise = find("export.write_onnx")
    with pytest.raises(WrongAnswer, match="expected a file at the path, got none"):
        exercise.through(file_of(Scaled, save=False))(*exercise.cases()[0])
