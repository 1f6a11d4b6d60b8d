"""Oracles: PyTorch's fake-quantize operations, float64 products, brute force over all integers."""

import copy

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest, multinomial
from torch import nn

from helpers import quantization as q

SYMMETRIC = [True, False]


def nearest(x, grid):
    """Of all numbers on a grid with one scale, the nearest to each x, by trying them all."""
    integers = torch.arange(grid.low, grid.high + 1)
    numbers = (integers - grid.zero_point) * grid.scale
    return numbers[(x.flatten()[:, None] - numbers).abs().argmin(1)].reshape(x.shape)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", SYMMETRIC)
def test_each_number_becomes_the_nearest_one_of_the_grid(bits, symmetric):
    torch.manual_seed(bits)
    x = torch.randn(7, 11, dtype=torch.float64) + 0.3
    grid = q.grid_of(x, bits, symmetric)
    assert torch.equal(grid.round_trip(x), nearest(x, grid))
    error = (grid.round_trip(x) - x).abs().max()
    # also where the zero point is rounded and the ends of the range are no longer on the grid
    assert error <= grid.scale * 0.5 * (1 + 1e-12)


@pytest.mark.parametrize("symmetric", SYMMETRIC)
def test_zero_stays_zero(symmetric):
    x = torch.tensor([0.0, 3.0, 5.0])
    grid = q.grid_of(x, 4, symmetric)
    assert grid.round_trip(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    x = torch.tensor([-5.0, -3.0])
    assert q.grid_of(x, 4, symmetric).round_trip(torch.zeros(1)).item() == 0
    above = torch.tensor([2.0, 6.0])  # the range has to be extended down to 0, and still hold 6
    assert q.grid_of(above, 8, symmetric).round_trip(above)[1].item() == pytest.approx(6)


def test_integers_agree_with_pytorch():
    torch.manual_seed(0)
    x = torch.randn(6, 10)
    grid = q.grid_of(x, symmetric=False)
    scale, zero = grid.scale.item(), int(grid.zero_point)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)
    torch.testing.assert_close(grid.round_trip(x), theirs, rtol=2**-22, atol=0)
    rows = q.grid_of(x, channel=0)
    theirs = torch.fake_quantize_per_channel_affine(
        x, rows.scale.flatten(), rows.zero_point.flatten(), 0, -127, 127
    )
    torch.testing.assert_close(rows.round_trip(x), theirs, rtol=2**-22, atol=0)


def test_a_channel_and_a_group_have_scales_of_their_own():
    x = torch.tensor([[1.0, 2.0, 30.0, 40.0], [5.0, 6.0, 0.7, 0.8]])
    assert q.grid_of(x).scale.item() == pytest.approx(40 / 127)
    rows = q.grid_of(x, channel=0)
    assert rows.scale.flatten().tolist() == pytest.approx([40 / 127, 6 / 127])
    assert q.grid_of(x, channel=-1).scale.shape == (1, 4)
    groups = q.grid_of(x, group=2)
    assert groups.scale.flatten().tolist() == pytest.approx([2 / 127, 40 / 127, 6 / 127, 0.8 / 127])
    one_by_one = torch.cat([q.grid_of(part).round_trip(part) for part in x.view(4, 2)])
    assert torch.equal(groups.round_trip(x).flatten(), one_by_one)
    assert groups.quantize(x).shape == x.shape and groups.quantize(x).dtype == torch.int8


def test_the_integer_types_and_ranges():
    assert q.integer_range(8) == (-127, 127) and q.integer_range(8, False) == (0, 255)
    assert q.integer_range(2) == (-1, 1) and q.integer_range(4, False) == (0, 15)
    x = torch.tensor([-1.0, 2.0])
    assert q.grid_of(x, symmetric=False).quantize(x).dtype == torch.uint8
    assert q.grid_of(x, symmetric=False).quantize(torch.tensor([-9.0, 9.0])).tolist() == [0, 255]
    for bits in (1, 9):
        with pytest.raises(ValueError, match=f"expected 2 to 8 bits, got {bits}"):
            q.integer_range(bits)


def test_a_constant_tensor_and_impossible_ranges():
    assert q.grid_of(torch.zeros(3)).round_trip(torch.zeros(3)).tolist() == [0, 0, 0]
    assert q.grid_of(torch.zeros(2, 3), channel=0).scale.flatten().tolist() == [1.0, 1.0]
    for low, high in [(1.0, -1.0), (0.0, float("inf")), (float("nan"), 1.0)]:
        with pytest.raises(ValueError, match="expected finite ranges with lowest <= highest"):
            q.make_grid(torch.tensor(low), torch.tensor(high))


def test_groups_that_do_not_fit():
    with pytest.raises(ValueError, match="groups of 3 do not divide a dimension of 4"):
        q.grid_of(torch.ones(2, 4), group=3)
    with pytest.raises(ValueError, match="expected a channel or a group, got both"):
        q.grid_of(torch.ones(2, 4), channel=0, group=2)


def test_relative_error():
    x = torch.tensor([3.0, 4.0])
    assert q.relative_error(x, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)


# ---- calibration


def test_a_clipped_range_leaves_both_ends_out():
    x = torch.arange(1000.0)[torch.randperm(1000)]
    assert [v.item() for v in q.clipped_range(x, 0.0)] == [0, 999]
    assert [v.item() for v in q.clipped_range(x, 0.02)] == [10, 989]
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="expected a share in"):
            q.clipped_range(x, share)


@pytest.mark.parametrize("symmetric", SYMMETRIC)
def test_the_best_range_beats_the_full_one_where_there_is_an_outlier(symmetric):
    torch.manual_seed(0)
    x = torch.cat([torch.randn(5000, dtype=torch.float64), torch.tensor([9.0]).double()])

    def error(low, high):
        return (q.make_grid(low, high, 4, symmetric).round_trip(x) - x).square().mean()

    best = q.best_range(x, 4, symmetric)
    assert error(*best) < 0.7 * error(x.min(), x.max())
    percents = torch.arange(2, 101, 2).double() / 100
    least = min(error(x.min() * p, x.max() * p) for p in percents).item()
    assert error(*best).item() == pytest.approx(least, rel=1e-9)  # x * p / 100, x * (p / 100)
    exact = torch.tensor([-7.0, 0.0, 7.0])
    assert [v.item() for v in q.best_range(exact, 4)] == [-7, 7]


def test_inputs_are_recorded_and_the_hooks_are_gone():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    batches = torch.randn(5, 2, 3)
    seen = q.record_inputs(model, batches)
    assert set(seen) == {"0", "2"}
    assert torch.equal(seen["0"], batches.flatten(0, 1))
    torch.testing.assert_close(seen["2"], torch.relu(model[0](batches.flatten(0, 1))))
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError):
        q.record_inputs(model, [torch.randn(2, 99)])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_in_training_mode_is_refused():
    model = nn.Sequential(nn.Linear(3, 4))
    for function in (lambda: q.record_inputs(model, []), lambda: q.quantize_linears(model)):
        with pytest.raises(ValueError, match="expected a model in evaluation mode"):
            function()


# ---- products


@pytest.mark.parametrize("symmetric", SYMMETRIC)
@pytest.mark.parametrize("rows", [None, 0])
def test_the_integer_product_is_that_of_the_rounded_numbers(symmetric, rows):
    torch.manual_seed(0)
    x, w = torch.randn(5, 300) + 0.5, torch.randn(7, 300)
    bias = torch.randn(7)
    x_grid, w_grid = q.grid_of(x, symmetric=symmetric, channel=rows), q.grid_of(w, channel=0)
    got = q.integer_linear(x_grid.quantize(x), x_grid, w_grid.quantize(w), w_grid, bias)
    steps = x_grid.quantize(x).double() - x_grid.zero_point
    exact = steps * x_grid.scale.double() @ (w_grid.quantize(w) * w_grid.scale.double()).T + bias
    # the sums are exact; five float32 roundings follow: int32 to float, two scales, product, bias
    bound = 5 * 2**-24 * ((exact - bias).abs() + bias.abs() + exact.abs())
    assert bool(((got - exact).abs() <= bound).all())


def test_the_largest_sums_fit():
    n = 60_000
    x, w = torch.full((1, n), 255, dtype=torch.uint8), torch.full((1, n), 127, dtype=torch.int8)
    one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    x_grid, w_grid = q.Grid(one, zero, 0, 255), q.Grid(one, zero, -127, 127)
    got = q.integer_linear(x, x_grid, w, w_grid).item()
    assert got == pytest.approx(n * 255 * 127, rel=2**-23)  # as a float32, rounded at most twice


def test_weight_grids_that_cannot_be_taken_out_are_refused():
    w = torch.randn(4, 8)
    x_grid = q.grid_of(w)
    for grid in (q.grid_of(w, group=4), q.grid_of(w + 1, symmetric=False)):
        with pytest.raises(ValueError, match="expected a symmetric weight grid without groups"):
            q.integer_linear(x_grid.quantize(w), x_grid, grid.quantize(w), grid)


@pytest.mark.parametrize("how", [None, "dynamic", "static"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_layer_is_near_the_layer(how, bias):
    torch.manual_seed(0)
    linear = nn.Linear(64, 10, bias=bias)
    x = torch.randn(2, 3, 64)
    activations = q.grid_of(x, symmetric=False) if how == "static" else how
    layer = q.QuantizedLinear(linear, activations)
    w_step = q.grid_of(linear.weight, channel=0).scale.flatten()
    # each weight moves by half a step, each input by half of its own (one, with a zero point)
    x_step = x.abs().max() / 127 if how == "dynamic" else (x.max() - x.min()) / 255
    bound = x.abs().sum(-1, keepdim=True) * w_step / 2
    if how is not None:
        bound = bound + x_step * (linear.weight.abs().sum(1) + 64 * w_step)
    assert bool(((layer(x) - linear(x)).abs() <= bound + 1e-5).all())
    assert layer(x).shape == (2, 3, 10) and layer.weight.dtype == torch.int8


@pytest.mark.parametrize("how", [None, "dynamic", "static"])
def test_a_saved_layer_has_all_it_needs(how):
    """Loaded into a layer of other numbers, the state gives the same outputs."""
    torch.manual_seed(0)
    x = torch.randn(3, 16)

    def make(factor):
        grid = q.grid_of(factor * x, symmetric=False) if how == "static" else how
        return q.QuantizedLinear(nn.Linear(16, 4), grid)

    saved, other = make(1.0), make(3.0)
    assert not torch.equal(saved(x), other(x))
    other.load_state_dict(saved.state_dict())
    assert torch.equal(saved(x), other(x))


def test_dynamic_scales_belong_to_rows():
    linear = nn.Linear(8, 4)
    layer = q.QuantizedLinear(linear, "dynamic")
    small, large = torch.randn(1, 8), 1000 * torch.randn(1, 8)
    torch.testing.assert_close(layer(torch.cat([small, large]))[:1], layer(small))


def test_a_model_is_copied_and_its_layers_replaced():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 2))).eval()
    x = torch.randn(9, 6)
    before = copy.deepcopy(model.state_dict())
    grids = {n: q.grid_of(v, symmetric=False) for n, v in q.record_inputs(model, [x]).items()}
    for how in (None, "dynamic", grids):
        done = q.quantize_linears(model, how)
        kinds = [type(m) for m in done.modules() if list(m.children()) == []]
        assert kinds == [q.QuantizedLinear, nn.ReLU, q.QuantizedLinear]
        assert q.relative_error(model(x), done(x)) < 0.05
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="no grid for the input of '2.0'"):
        q.quantize_linears(model, {"0": grids["0"]})
    with pytest.raises(ValueError, match="expected None, 'dynamic' or a Grid, got 'static'"):
        q.quantize_linears(model, "static")


# ---- training


@pytest.mark.parametrize("symmetric", SYMMETRIC)
def test_fake_quantization_has_the_value_of_the_grid_and_the_gradient_of_clamp(symmetric):
    torch.manual_seed(0)
    x = torch.randn(40, dtype=torch.float64)
    low, high = torch.tensor(-0.8).double(), torch.tensor(1.0).double()
    grid = q.make_grid(low, high, 4, symmetric)
    x.requires_grad_()
    y = q.fake_quantize(x, grid)
    # the same number but for one addition and one subtraction of numbers of at most 1
    torch.testing.assert_close(y, grid.round_trip(x.detach()), rtol=0, atol=2**-51)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    ends = [(end - grid.zero_point) * grid.scale for end in (grid.low, grid.high)]
    assert torch.equal(gradient, ((x > ends[0]) & (x < ends[1])).double())


def test_fake_quantization_of_groups():
    w = torch.randn(4, 8, requires_grad=True)
    grid = q.grid_of(w.detach(), 4, group=4)
    torch.testing.assert_close(q.fake_quantize(w, grid), grid.round_trip(w.detach()))


def test_training_with_fake_quantization_finds_weights_of_the_grid():
    torch.manual_seed(0)
    truth = torch.tensor([[1.0, -1.0, 0.0, 1.0]])
    x = torch.randn(200, 4)
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    prepared = q.prepare_qat(model, bits=2)
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.02)
    for _ in range(300):
        loss = F.mse_loss(prepared(x), x @ truth.T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weight = prepared[0].linear.weight.detach()
    assert q.grid_of(weight, 2, channel=0).quantize(weight).tolist() == [[1, -1, 0, 1]]
    assert type(model[0]) is nn.Linear and not torch.equal(model[0].weight, weight)
    with pytest.raises(ValueError, match="expected 2 to 8 bits"):
        q.prepare_qat(model, bits=1)


# ---- four bits


def test_packing_keeps_all_pairs_of_numbers():
    numbers = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    packed = q.pack_int4(numbers)
    assert packed.dtype == torch.uint8 and packed.shape == (256, 1)
    assert len(packed.unique()) == 256
    assert torch.equal(q.unpack_int4(packed), numbers)
    assert q.pack_int4(torch.tensor([1, -1], dtype=torch.int8)).tolist() == [0xF1]
    with pytest.raises(ValueError, match="expected an even last dimension"):
        q.pack_int4(numbers[:, :1])
    with pytest.raises(ValueError, match=r"expected integers in -8..7, got 8..8"):
        q.pack_int4(torch.full((2,), 8, dtype=torch.int8))


# ---- smoothing


def test_smoothing_changes_no_product_and_levels_the_inputs():
    torch.manual_seed(0)
    x = torch.randn(50, 6, dtype=torch.float64)
    x[:, 2] *= 100
    linear = nn.Linear(6, 4).double()
    expected = linear(x)
    weight = linear.weight.detach().clone()
    factors = q.smooth(linear, x.abs().amax(0))
    torch.testing.assert_close(linear(x / factors), expected)
    # with alpha = 1/2, inputs and weights end at the same largest value: sqrt(of x * of w)
    level = (x.abs().amax(0) * weight.abs().amax(0)).sqrt()
    torch.testing.assert_close((x / factors).abs().amax(0), level)
    torch.testing.assert_close(linear.weight.detach().abs().amax(0), level)


def test_smoothing_leaves_dead_inputs_alone():
    linear = nn.Linear(3, 2)
    factors = q.smooth(linear, torch.tensor([0.0, 1.0, 1.0]))
    assert factors[0] == 1 and bool(factors.isfinite().all())
    with pytest.raises(ValueError, match="expected one largest value for each of 3"):
        q.smooth(linear, torch.ones(4))


# ---- figures


def graph_file(path, *nodes):
    """An ONNX file with these nodes, x -> y, and the scale 0.5 for `s`, 2.0 for `big`."""
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    constants = {"s": 0.5, "big": 2.0}
    stored = [numpy_helper.from_array(np.array(v, np.float32), k) for k, v in constants.items()]
    stored.append(numpy_helper.from_array(np.array(0, np.uint8), "z"))
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:], stored)
    onnx.save(helper.make_model(graph), path)
    return path


def test_the_scales_of_a_file_come_with_the_nodes_around_them(tmp_path):
    node = onnx.helper.make_node
    path = graph_file(
        tmp_path / "m.onnx",
        node("QuantizeLinear", ["x", "s", "z"], ["xq"], "q0"),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "d0"),
        node("Relu", ["xd"], ["a"], "relu"),
        node("QuantizeLinear", ["a", "big", "z"], ["aq"], "q1"),
        node("DequantizeLinear", ["aq", "big", "z"], ["ad"], "d1"),
        node("Exp", ["ad"], ["e"], "exp"),
        node("Mul", ["e", "ad"], ["y"], "mul"),
    )
    assert q.activation_scales(path) == [
        q.ActivationScale("x", 0.5, "", ("relu",)),
        q.ActivationScale("a", 2.0, "relu", ("exp", "mul")),
    ]


def test_a_file_that_was_not_quantized_is_refused(tmp_path):
    path = graph_file(tmp_path / "m.onnx", onnx.helper.make_node("Relu", ["x"], ["y"], "relu"))
    with pytest.raises(ValueError, match="expected an ONNX file with QuantizeLinear, got "):
        q.activation_scales(path)


def test_file_bytes_grow_with_the_weights():
    small, large = torch.zeros(1000), torch.zeros(2000)
    grown = q.file_bytes({"w": large}) - q.file_bytes({"w": small})
    assert 4000 <= grown < 4128  # the archive aligns its parts to 64 bytes


def test_a_paired_change_has_the_interval_of_the_differences():
    before = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]).repeat(10)
    after = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]).repeat(10)
    mean, margin = q.paired_change(before, after)
    assert mean == 0 and margin == pytest.approx(1.96 * (20 / 49) ** 0.5 / 50**0.5)
    assert q.paired_change(before, torch.ones(50))[0] == pytest.approx(0.4)


def test_no_change_is_no_certainty():
    """As sure as the exact interval of a proportion that was never seen."""
    for count in (50, 1000, 10_000):
        right = torch.ones(count)
        exact = binomtest(0, count).proportion_ci(0.95).high
        assert q.paired_change(right, right) == (0.0, pytest.approx(exact, rel=0.05))
    assert q.paired_change(torch.ones(2), torch.ones(2)) == (0.0, 1.0)


@pytest.mark.parametrize("better, worse", [(0.0, 0.0), (0.002, 0.0), (0.005, 0.005), (0.0, 0.03)])
def test_the_interval_covers_the_true_change_nineteen_times_in_twenty(better, worse):
    """Summed over all results of 300 samples of which this share improves and that one worsens."""
    count, covered = 300, 0.0
    law = multinomial(count, [better, worse, 1 - better - worse])
    for up in range(30):
        for down in range(30):
            chance = law.pmf([up, down, count - up - down])
            if chance > 1e-9:
                difference = torch.zeros(count)
                difference[:up], difference[up : up + down] = 1.0, -1.0
                mean, margin = q.paired_change(torch.zeros(count), difference)
                covered += chance * (abs(mean - (better - worse)) <= margin)
    assert covered >= 0.93  # the normal approximation, from `FEW` on, reaches 93 to 95 percent


def test_a_paired_change_needs_pairs():
    before = torch.zeros(5)
    for wrong in (before[:4], before[:, None]):
        with pytest.raises(ValueError, match="expected two vectors of one length"):
            q.paired_change(before, wrong)
