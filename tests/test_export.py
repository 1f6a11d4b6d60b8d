import copy
import math

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.export import Dim

from helpers import export, timing

CPU = torch.device("cpu")


class Net(nn.Module):
    """Batch norm and dropout, so that training mode shows; [N, 3] -> [N, 4]."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.up(x))))


class Two(nn.Module):
    def forward(self, a, b):
        return a + b, (a * b).sum(dim=1)


@pytest.fixture
def net():
    return Net().eval()


def batch(**change):
    return Dim("batch", **{"min": 1, "max": 64} | change)


# ---- exporting


@pytest.mark.parametrize(
    "shapes", [({0: batch()},), {"x": {0: batch()}}, ([batch(), None],), ((Dim.DYNAMIC, None),)]
)
def test_an_export_takes_every_batch_size(net, shapes):
    run = export.export_for_inference(net, (torch.randn(2, 3),), shapes).module()
    for size in (1, 2, 7, 64):
        x = torch.randn(size, 3)
        assert torch.equal(run(x), net(x))


def test_training_mode_is_refused_with_the_layers_named(net):
    shapes = ({0: batch()},)
    net.norm.train()
    with pytest.raises(ValueError, match="evaluation mode, got training mode in: norm$"):
        export.export_for_inference(net, (torch.randn(2, 3),), shapes)
    net.train()
    with pytest.raises(ValueError, match="in: the model itself, up, norm$"):
        export.export_for_inference(net, (torch.randn(2, 3),), shapes)


@pytest.mark.parametrize("fixed", [None, {}, {1: Dim("width")}, {0: None}, {0: 5}, {0: Dim.STATIC}])
def test_a_fixed_batch_is_refused(net, fixed):
    with pytest.raises(ValueError, match="input 0: expected a Dim .* batches of 5 only"):
        export.export_for_inference(net, (torch.randn(5, 3),), (fixed,))
    both = (torch.randn(5, 3), torch.randn(5, 3))
    with pytest.raises(ValueError, match="input 1: expected a Dim"):
        export.export_for_inference(Two().eval(), both, ({0: batch()}, fixed))


def test_no_shapes_at_all_fix_the_batch(net):
    with pytest.raises(ValueError, match="input 0: expected a Dim .* batches of 5 only"):
        export.export_for_inference(net, (torch.randn(5, 3),), None)


def test_a_batch_that_the_model_fixes_is_refused():
    """With `Dim.AUTO` nobody complains: the program is simply for one size."""

    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(2, 3) + 1

    shapes = ({0: Dim.AUTO},)
    assert torch.export.export(Fixed().eval(), (torch.randn(2, 3),), dynamic_shapes=shapes)
    with pytest.raises(ValueError, match="input 0: .* that the model fixes; .* batches of 2 only"):
        export.export_for_inference(Fixed().eval(), (torch.randn(2, 3),), shapes)


def test_a_symbol_by_auto_is_accepted(net):
    run = export.export_for_inference(net, (torch.randn(2, 3),), ({0: Dim.AUTO},)).module()
    x = torch.randn(7, 3)
    assert torch.equal(run(x), net(x))


@pytest.mark.parametrize("size", [0, 1])
def test_an_example_of_one_is_refused(net, size):
    with pytest.raises(ValueError, match=f"input 0: .* dynamic dimension 0, got {size}"):
        export.export_for_inference(net, (torch.randn(size, 3),), ({0: batch()},))


def test_a_static_dimension_may_be_one():
    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    shapes = ({0: batch(), 1: Dim.STATIC},)
    run = export.export_for_inference(Twice().eval(), (torch.ones(2, 1),), shapes).module()
    assert torch.equal(run(torch.ones(5, 1)), torch.full((5, 1), 2.0))


def test_every_input_needs_an_entry(net):
    with pytest.raises(ValueError, match="zip"):
        export.export_for_inference(net, (torch.randn(2, 3),), ())


def test_a_number_needs_no_dimension():
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    shapes = ({0: batch()}, None)
    for factor in (2.0, torch.tensor(2.0)):
        example = (torch.ones(2, 3), factor)
        run = export.export_for_inference(Scaled().eval(), example, shapes).module()
        assert torch.equal(run(torch.ones(5, 3), factor), torch.full((5, 3), 2.0))


class Branch(nn.Module):
    def forward(self, x):
        return 1 - x if x.mean() > 0.5 else x


def test_a_refusal_has_a_type_and_one_line(capsys):
    kind, message = export.refusal(Branch(), (torch.ones(3),)).split("\n")
    assert kind == "GuardOnDataDependentSymNode"
    assert message.startswith("Could not guard on data-dependent expression Eq(u0, 1)")
    assert capsys.readouterr() == ("", "")  # not even the graph so far


def test_what_is_not_refused_is_an_error(net):
    with pytest.raises(ValueError, match="the export succeeded: expected a model that is refused"):
        export.refusal(net, (torch.randn(2, 3),))


# ---- parity

X = torch.tensor([[3.0, 4.0], [0.0, 1e-3]])


def planted(change):
    def candidate(x):
        got = x.clone()
        change(got)
        return got

    return candidate


def test_parity_of_planted_differences():
    """Row lengths 5 and 1e-3: 0.5 is a tenth of the first, 1e-4 a tenth of the second."""

    def first(x):
        x[0, 0] += 0.5

    def second(x):
        x[1, 0] -= 1e-4

    (found,) = export.parity(nn.Identity(), planted(first), [(X,)])
    assert found.max_abs == 0.5 and found.relative == pytest.approx(0.1)
    assert found.output == 0 and found.shape == (2, 2)
    (found,) = export.parity(nn.Identity(), planted(second), [(X,)])
    assert found.max_abs == pytest.approx(1e-4) and found.relative == pytest.approx(0.1)


def test_parity_of_equal_results_and_of_zeros():
    (found,) = export.parity(nn.Identity(), nn.Identity(), [(torch.zeros(3, 2),)])
    assert (found.max_abs, found.relative) == (0.0, 0.0)
    (found,) = export.parity(nn.Identity(), lambda x: x + 1, [(torch.zeros(3, 2),)])
    assert (found.max_abs, found.relative) == (1.0, math.inf)
    (found,) = export.parity(nn.Identity(), nn.Identity(), [(torch.zeros(0, 2),)])
    assert (found.max_abs, found.relative) == (0.0, 0.0)
    (found,) = export.parity(torch.sum, lambda x: x.sum() + 1, [(torch.ones(3),)])
    assert found.shape == () and found.max_abs == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parity_sees_what_is_no_number(value):
    def spoil(x):
        x[0, 1] = value

    spoiled = planted(spoil)
    for pair in ((nn.Identity(), spoiled), (spoiled, nn.Identity())):
        (found,) = export.parity(*pair, [(X,)])
        assert (found.max_abs, found.relative) == (math.inf, math.inf)
    (found,) = export.parity(spoiled, spoiled, [(X,)])
    assert (found.max_abs, found.relative) == (0.0, 0.0)


def test_parity_knows_the_sign_of_infinity():
    (found,) = export.parity(
        lambda x: x * torch.inf, lambda x: x * -torch.inf, [(torch.ones(1, 2),)]
    )
    assert found.relative == math.inf


def test_parity_goes_through_outputs_and_inputs():
    inputs = [(torch.ones(n, 2), torch.ones(n, 2)) for n in (1, 3)]

    def second_wrong(a, b):
        total, product = Two()(a, b)
        return total, product + 1

    found = export.parity(Two(), second_wrong, inputs)
    assert [(one.output, one.shape) for one in found] == [
        (0, (1, 2)),
        (1, (1,)),
        (0, (3, 2)),
        (1, (3,)),
    ]
    assert [one.relative for one in found] == [0.0, 0.5, 0.0, 0.5]


def test_parity_refuses_another_shape():
    with pytest.raises(ValueError, match=r"output 0: expected shape \[2, 2\], got \[1, 2\]"):
        export.parity(nn.Identity(), lambda x: x[:1], [(X,)])
    with pytest.raises(ValueError, match=r"output 0: expected shape \[2, 2\], got \[4\]"):
        export.parity(nn.Identity(), torch.flatten, [(X,)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_parity_refuses_another_dtype(dtype):
    with pytest.raises(ValueError, match="output 0: expected dtype torch.float32, got torch.flo"):
        export.parity(nn.Identity(), lambda x: x.to(dtype), [(X,)])


def test_parity_refuses_another_number_of_results():
    with pytest.raises(ValueError, match="expected 1 outputs, got 2"):
        export.parity(nn.Identity(), lambda x: (x, x), [(X,)])


def test_parity_without_inputs_would_show_nothing():
    with pytest.raises(ValueError, match="at least one tuple of inputs, got none"):
        export.parity(nn.Identity(), nn.Identity(), [])


def test_parity_with_a_float64_reference_and_arrays():
    (found,) = export.parity(torch.Tensor.double, torch.Tensor.numpy, [(X,)])
    assert (found.max_abs, found.relative) == (0.0, 0.0)


# ---- ONNX


@pytest.fixture(scope="module")
def digits_file(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(2 * 6 * 6, 5))
    for _ in range(3):
        model(torch.randn(8, 1, 8, 8) * 2 + 1)  # running statistics that matter
    model.eval()
    shapes = ({0: batch()},)
    program = export.export_for_inference(model, (torch.randn(2, 1, 8, 8),), shapes)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    written = torch.onnx.export(program, dynamic_shapes=shapes, verbose=False)
    written.save(path, external_data=False)
    return model, path


def test_onnx_runtime_agrees_within_rounding(digits_file):
    """Sums of 9 and of 72 products: sqrt(72) roundings of 2**-24 are 5e-7; 1e-5 has room."""
    model, path = digits_file
    call = export.onnx_call(export.onnx_session(path))
    inputs = [(torch.randn(size, 1, 8, 8),) for size in (1, 2, 7, 64)]
    assert max(found.relative for found in export.parity(model, call, inputs)) < 1e-5
    wrong = copy.deepcopy(model)
    wrong[1].eps = 1e-3
    assert min(found.relative for found in export.parity(wrong, call, inputs)) > 1e-5


def test_a_session_has_the_threads_that_were_asked_for(digits_file):
    for threads in (1, 2):
        options = export.onnx_session(digits_file[1], threads).get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (threads, 1)


def test_a_call_needs_every_input(digits_file):
    call = export.onnx_call(export.onnx_session(digits_file[1]))
    with pytest.raises(ValueError, match="zip"):
        call(torch.randn(1, 1, 8, 8), torch.randn(1))


def test_the_nodes_of_a_graph(digits_file):
    nodes = export.graph_nodes(onnx.load(digits_file[1]))
    assert [node.operator for node in nodes] == ["Conv", "Relu", "Reshape", "Gemm"]
    assert list(nodes[0].weights.values()) == [(2, 1, 3, 3), (2,)]
    assert list(nodes[0].outputs.values()) == [("batch", 2, 6, 6)]
    assert list(nodes[3].outputs.values()) == [("batch", 5)]
    assert nodes[1].inputs == tuple(nodes[0].outputs) and nodes[1].weights == {}


def test_what_a_graph_leaves_out():
    """An optional input with an empty name, a result without a shape, one without a size."""
    graph = helper.make_graph(
        [
            helper.make_node("Clip", ["x", "", "top"], ["y"]),
            helper.make_node("Relu", ["y"], ["z"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, 2])],
        [helper.make_tensor("top", TensorProto.FLOAT, [], [1.0])],
    )
    clip, relu = export.graph_nodes(helper.make_model(graph))
    assert (clip.inputs, clip.weights, clip.outputs) == (("x",), {"top": ()}, {"y": ("?",)})
    assert relu.outputs == {"z": ("?", 2)}


# ---- latency


def test_latency_times_single_calls_in_turns(monkeypatch):
    taken = []

    def readings(calls, device, repeats, *, shortest_ms):
        taken.append((list(calls), repeats, shortest_ms))
        block = len(taken)
        return {name: [block] * (repeats - 5) + [100.0 * block] * 5 for name in calls}

    monkeypatch.setattr(timing, "readings", readings)
    found = export.latency({"a": int, "b": int}, CPU, blocks=3, calls_per_block=100)
    assert taken == [(["a", "b"], 100, 0.0)] * 3
    assert found["b"].p50 == timing.quantiles([1, 2, 3])
    assert found["b"].p99 == timing.quantiles([100.0, 200.0, 300.0])


def test_latency_really_calls(one_thread):
    calls = []
    found = export.latency({"a": lambda: calls.append(0)}, CPU, blocks=3, calls_per_block=100)
    assert len(calls) >= 300 and found["a"].p50.median <= found["a"].p99.median


def test_latency_needs_enough_calls():
    with pytest.raises(ValueError, match="at least 100 calls in a block, got 99"):
        export.latency({"a": int}, CPU, calls_per_block=99)
