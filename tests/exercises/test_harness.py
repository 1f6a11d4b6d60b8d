import random
import sys
import types

import numpy as np
import pytest
import torch

from helpers.exercises import harness
from helpers.exercises.harness import Exercise, WrongAnswer, check


def compare(answer, reference, inputs, **options):
    """Print what `check` would say of an exercise of this reference and these cases."""
    exercise = Exercise(reference=reference, cases=lambda: inputs, **options)
    print(harness._verdict(answer, exercise, "demo.answer"))


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("answer", "reference", "options", "message"),
    [
        (lambda x: ..., torch.neg, {}, "✗ not answered yet: replace the dots"),
        (lambda x: -x, torch.neg, {}, "✓ correct on 1 case"),
        (lambda x: x + 1, torch.neg, {}, "value: 6 of 6 elements differ, by up to 11"),
        (lambda x: -x[0], torch.neg, {}, "shape: expected [2, 3], got [3]"),
        (lambda x: -x.double(), torch.neg, {}, "dtype: expected torch.float32, got torch.float64"),
        (lambda x: x.neg_(), torch.neg, {}, "argument 1 was changed in place"),
        (lambda x: [-x], torch.neg, {}, "expected Tensor, got list"),
        (lambda x: None, torch.neg, {}, "expected Tensor, got NoneType"),
        (lambda x: x.nothing, torch.neg, {}, "expected a result, got AttributeError"),
        (lambda x: x.mT.clone(), torch.t, {"view": True}, "but a copy: expected a view"),
        (lambda x: x.mT, torch.t, {"view": True}, "✓"),
        (lambda x: x.detach() * 2, lambda x: x + x, {"gradient": True}, "is cut off from"),
        (
            lambda x: x * x.detach(),
            torch.square,
            {"gradient": True},
            "gradient of argument 1: value: 5 of 6",
        ),
        (lambda x: x * x, torch.square, {"gradient": True}, "✓"),
        (lambda x: x.unbind(0), lambda x: x.unbind(1), {}, "expected 3 results, got 2"),
        (
            lambda x: (x[0], -x[1]),
            lambda x: x.unbind(0),
            {},
            "result 2: value: 3 of 3 elements differ",
        ),
        (lambda x: x.numel() + 1, torch.numel, {}, "value is not right: 7"),
        (torch.neg, torch.neg, {}, "this is the reference itself"),
    ],
)
def test_verdicts(answer, reference, options, message, capsys):
    compare(answer, reference, [(X,)], **options)
    out = capsys.readouterr().out
    assert message in out and out.startswith("✓") == message.startswith("✓")
    assert torch.equal(X, torch.arange(6.0).view(2, 3))


def test_all_cases_count_and_the_first_wrong_one_is_named(capsys):
    compare(lambda x: x.abs(), lambda x: x, [(X,), (X + 1,), (-X,)])
    assert capsys.readouterr().out.startswith(
        "✗ case 3 of 3, f(tensor([[-0.0, -1.0, -2.0], [-3.0, -4.0, -5.0]])): value"
    )


def test_the_reference_may_raise(capsys):
    cases = [((2, 3), (3,)), ((2,), (3,))]
    compare(lambda a, b: torch.broadcast_shapes(a, b), torch.broadcast_shapes, cases)
    assert capsys.readouterr().out == "✓ correct on 2 cases\n"
    compare(lambda a, b: torch.Size((2, 3)), torch.broadcast_shapes, cases)
    assert "case 2 of 2, f((2,), (3,)): expected RuntimeError" in capsys.readouterr().out


def test_nan_agrees_with_nan_and_does_not_look_changed(capsys):
    compare(lambda x: x * 1, torch.clone, [(torch.tensor([float("nan"), 1.0]),)])
    assert capsys.readouterr().out.startswith("✓")


def test_integer_arguments_need_no_gradient(capsys):
    cases = [(torch.randn(3, 2), torch.tensor([0, 2]))]
    compare(lambda x, i: x[i], lambda x, i: x.index_select(0, i), cases, gradient=True)
    assert capsys.readouterr().out.startswith("✓")


def test_never_prints_the_expected_values(capsys):
    compare(lambda x: x * 0, lambda x: x + 12345.678, [(X,)])
    assert "12345.678" not in capsys.readouterr().out.replace("by up to 1.23e+04", "")


def test_gradients_of_an_empty_result(capsys):
    compare(lambda x: x * x, torch.square, [(torch.ones(0, 3),)], gradient=True)
    assert capsys.readouterr().out.startswith("✓")
    compare(lambda x: x.detach() * x.detach(), torch.square, [(torch.ones(0, 3),)], gradient=True)
    assert "is cut off from" in capsys.readouterr().out


# ---- exercises by name


@pytest.fixture
def chapter(monkeypatch):
    """A chapter of exercises, as `helpers/exercises/NAME.py` holds them."""
    exercises = {
        "double": Exercise(reference=lambda x: 2 * x, cases=lambda: [(X,), (X.double(),)]),
        "noise": Exercise(reference=torch.rand_like, cases=lambda: [(torch.rand(3),)]),
        "layer": Exercise(
            reference=torch.nn.Identity,
            cases=lambda: [(X,)],
            through=lambda layer: layer().forward,
        ),
    }
    module = types.ModuleType("helpers.exercises.demo")
    module.EXERCISES = exercises
    monkeypatch.setitem(sys.modules, "helpers.exercises.demo", module)


def test_an_exercise_is_found_by_its_name(chapter, capsys):
    check("demo.double", lambda x: x + x)
    assert capsys.readouterr().out == "✓ correct on 2 cases\n"
    check("demo.double", ...)
    assert "not answered yet" in capsys.readouterr().out


def test_an_answer_may_be_a_class(chapter, capsys):
    check("demo.layer", torch.nn.Tanh)
    assert "value: 5 of 6 elements differ" in capsys.readouterr().out
    check("demo.layer", torch.nn.Flatten)
    assert capsys.readouterr().out.startswith("✓")


def test_the_machinery_of_an_exercise_may_speak_itself():
    def through(answer):
        def call(x):
            if answer is None:
                raise WrongAnswer("expected something")
            return answer(x)

        return call

    spec = Exercise(reference=torch.neg, cases=lambda: [(X,)], through=through)
    assert harness._verdict(None, spec, "demo").endswith("4.0, 5.0]])): expected something")
    assert harness._verdict(lambda x: -x, spec, "demo").startswith("✓")


def test_unknown_names_are_refused(chapter):
    with pytest.raises(ValueError, match="no chapter 'nothing' has exercises; got the name"):
        check("nothing.double", torch.neg)
    with pytest.raises(ValueError, match="unknown exercise 'demo.triple'; demo has"):
        check("demo.triple", torch.neg)


def test_random_answers_draw_what_the_reference_draws_and_the_notebook_keeps_its_numbers(
    chapter, capsys
):
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    check("demo.noise", lambda x: torch.rand(x.shape))
    assert capsys.readouterr().out.startswith("✓")
    assert torch.equal(torch.rand(2), wanted)


# ---- how far an answer may be off


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_an_answer_may_be_off_by_roundings_and_no_more(dtype, capsys):
    x = torch.linspace(1, 4, 8).to(dtype)
    unit = torch.finfo(dtype).eps
    compare(lambda x: x * (1 + 2 * unit), lambda x: x.clone(), [(x,)])
    assert capsys.readouterr().out.startswith("✓")
    compare(lambda x: x * (1 + 20_000 * unit), lambda x: x.clone(), [(x,)])
    assert "value: 8 of 8 elements differ" in capsys.readouterr().out


def test_small_numbers_count_where_the_exercise_says_so():
    tiny = Exercise(reference=lambda x: 1e-7 * x, cases=lambda: [(X,)], scale=1e-7)
    assert harness._verdict(lambda x: 1.001e-7 * x, tiny, "tiny").startswith("✗")
    assert harness._verdict(lambda x: x / 1e7, tiny, "tiny").startswith("✓")


@pytest.mark.parametrize(
    ("answer", "want", "passes"),
    [
        ([1, 2.0], (1, 2.0), True),
        ((1, 2.0), [1, 2.0], True),
        (np.float64(0.1) + 0.2, 0.3, True),
        (np.int64(3), 3, True),
        (np.bool_(True), True, True),
        (3.0001, 3.0, False),
        (True, 1, False),
        (4, 3, False),
        ("a", "b", False),
        (float("nan"), float("nan"), True),
        (None, 3.0, False),
    ],
)
def test_numbers_and_sequences(answer, want, passes, capsys):
    compare(lambda x: answer, lambda x: want, [(X,)])
    assert capsys.readouterr().out.startswith("✓") == passes


def test_another_exception_is_not_the_right_one(capsys):
    def refuses(x):
        raise ValueError("expected something else")

    def breaks(x):
        raise KeyError("x")

    compare(breaks, refuses, [(X,)])
    assert "expected ValueError, got KeyError('x')" in capsys.readouterr().out


def test_the_gradient_of_every_argument_counts(capsys):
    compare(lambda a, b: a * b.detach(), torch.mul, [(X, X + 1)], gradient=True)
    assert "gradient of argument 2: value" in capsys.readouterr().out


def test_an_overflow_is_named(capsys):
    compare(lambda x: x * torch.inf, lambda x: x + 1, [(X + 1,)])
    assert "and some of yours are inf or nan" in capsys.readouterr().out


def test_cases_keep_their_strides(capsys):
    seen = []
    expanded = torch.arange(3.0).expand(2, 3)
    compare(lambda x: (seen.append(x.stride()), x + 1)[1], lambda x: 1 + x, [(X.mT,), (expanded,)])
    assert capsys.readouterr().out.startswith("✓")
    assert seen == [(1, 3), (0, 1)]


def test_a_long_argument_is_described(capsys):
    compare(lambda x: x, lambda x: -x, [(torch.ones(3, 4),)])
    assert "case 1 of 1, f(float32[3, 4]): value" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.cumsum(0),
        lambda x: torch.cumsum(x, dim=0),
        lambda x: torch.Tensor.cumsum(x, 0),
    ],
)
def test_some_functions_are_forbidden(answer):
    spec = Exercise(reference=torch.clone, cases=lambda: [(X,)], forbid=("cumsum",))
    out = harness._verdict(answer, spec, "answer")
    assert "RuntimeError('this exercise is to be solved without cumsum')" in out
    assert harness._verdict(lambda x: x * 1, spec, "answer").startswith("✓")
    with pytest.raises(RuntimeError, match="this exercise is to be solved without cumsum"):
        harness._without(answer, ("cumsum",))(X)
    free = Exercise(reference=lambda x: x.cumsum(0), cases=lambda: [(X,)])
    assert harness._verdict(answer, free, "answer").startswith("✓")


def test_functions_among_the_arguments_are_shown_by_their_names():
    spec = Exercise(reference=lambda f: 2, cases=lambda: [(test_verdicts,)])
    assert "case 1 of 1, f(test_verdicts): value" in harness._verdict(lambda f: 1, spec, "answer")


def test_a_list_is_fresh_for_each_side_and_may_not_be_changed(capsys):
    numbers = [3, 1, 2]
    compare(lambda x: (x.sort(), x)[1], sorted, [(numbers,)])
    assert "argument 1 was changed in place" in capsys.readouterr().out and numbers == [3, 1, 2]
    compare(lambda rows: rows[0].pop("a"), lambda rows: rows[0]["a"], [([{"a": 1}],)])
    assert "argument 1 was changed in place" in capsys.readouterr().out
    compare(lambda x: sorted(x), sorted, [(numbers,)])
    assert capsys.readouterr().out.startswith("✓")


def test_long_errors_and_functions_are_shown_in_one_line(capsys):
    def long(function):
        raise RuntimeError("a page\n" * 200)

    compare(long, lambda function: 1, [(long,)])
    out = capsys.readouterr().out
    assert "f(long): expected a result, got RuntimeError('a page" in out
    assert out.count("\n") == 1 and len(out) < 300


def test_cases_are_the_same_whatever_the_notebook_has_drawn():
    drawn = []

    def cases():
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return [(X,)]

    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        harness._verdict(torch.neg, Exercise(reference=lambda x: -x, cases=cases), "demo.answer")
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
