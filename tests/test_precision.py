"""The formats against PyTorch's casts, the scaler against PyTorch's, the tables against kernels."""

import math
import random
import struct
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import precision
from helpers.precision import DTYPES, FORMATS, LossScaler

STORED = [*DTYPES]


def same(a: float, b: float) -> bool:
    return a == b and math.copysign(1, a) == math.copysign(1, b) or math.isnan(a) and math.isnan(b)


# ---- formats


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_every_pattern_stands_for_the_number_that_torch_reads(name):
    dtype, integer = DTYPES[name]
    number_format = FORMATS[name]
    patterns = torch.arange(2**number_format.bits, dtype=torch.int64)
    numbers = patterns.to(integer).view(dtype).double().tolist()
    for pattern, number in zip(patterns.tolist(), numbers, strict=True):
        assert same(number_format.decode(pattern), number), (name, pattern)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_every_number_is_encoded_as_its_own_pattern(name):
    number_format = FORMATS[name]
    for pattern in range(2**number_format.bits):
        number = number_format.decode(pattern)
        if not math.isnan(number):
            assert number_format.encode(number) == pattern


def hard_values(name: str) -> list[float]:
    """Random bits, and for a format the ties between neighbors and what lies beside them."""
    draw = random.Random(0)
    bits = [draw.getrandbits(32) for _ in range(4000)]
    values = [struct.unpack("<f", struct.pack("<I", b))[0] for b in bits]
    number_format = FORMATS[name]
    count = 2 ** (number_format.bits - 1) - 1
    patterns = [*range(min(count, 300)), *(draw.randrange(count) for _ in range(1000))]
    patterns += [number_format._largest - 1, number_format._largest, number_format._largest + 1]
    for pattern in patterns:
        low, high = number_format.decode(pattern), number_format.decode(min(pattern + 1, count))
        if math.isfinite(low) and math.isfinite(high):
            middle = torch.tensor((low + high) / 2, dtype=torch.float32)
            beside = [torch.nextafter(middle, torch.tensor(end)) for end in (-math.inf, math.inf)]
            values += [middle.item(), -middle.item(), *(t.item() for t in beside)]
    gap = number_format.max - number_format.decode(number_format._largest - 1)
    for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        edge = torch.tensor(number_format.max + share * gap, dtype=torch.float64).float()
        values += [edge.item(), -edge.item()]
    return [*values, 0.0, -0.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_rounding_agrees_with_the_cast_of_torch(name):
    dtype, _ = DTYPES[name]
    values = hard_values(name)
    rounded = torch.tensor(values, dtype=torch.float32).to(dtype).double().tolist()
    for value, expected in zip(values, rounded, strict=True):
        assert same(FORMATS[name].round(value), expected), (name, value)


def test_rounding_to_float32_agrees_with_the_cast_from_float64():
    draw = random.Random(1)
    values = [math.ldexp(draw.uniform(-2, 2), draw.randrange(-155, 130)) for _ in range(4000)]
    rounded = torch.tensor(values, dtype=torch.float64).float().double().tolist()
    for value, expected in zip(values, rounded, strict=True):
        assert same(FORMATS["fp32"].round(value), expected), value


@pytest.mark.parametrize("name", STORED)
def test_the_limits_are_those_of_torch(name):
    info, number_format = torch.finfo(DTYPES[name][0]), FORMATS[name]
    assert number_format.bits == info.bits
    assert number_format.max == info.max
    assert number_format.smallest_normal == info.smallest_normal
    assert number_format.eps == info.eps
    smallest = number_format.decode(1)
    assert number_format.smallest_subnormal == smallest > 0
    assert number_format.round(smallest / 2) == 0.0 < number_format.round(smallest * 0.501)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("value", [0.1, -6.5, 3e-6, 1e30])
def test_the_text_of_the_bits_is_what_torch_stores(name, value):
    value = torch.tensor(value).item()  # float32, as the cast begins with
    expected = FORMATS[name].text(FORMATS[name].encode(value))
    assert precision.bits_of(value, name) == expected
    assert [len(part) for part in expected.split()] == [
        1,
        FORMATS[name].exponent,
        FORMATS[name].mantissa,
    ]


def test_one_and_a_half_by_hand():
    fp16 = FORMATS["fp16"]
    assert fp16.fields(fp16.encode(-1.5)) == (1, 15, 512)
    assert fp16.text(fp16.encode(-1.5)) == "1 01111 1000000000"


def test_tf32_has_the_range_of_fp32_and_the_digits_of_fp16():
    tf32 = FORMATS["tf32"]
    assert tf32.smallest_normal == FORMATS["fp32"].smallest_normal
    assert tf32.eps == FORMATS["fp16"].eps
    assert tf32.round(1 + 2**-10) == 1 + 2**-10 and tf32.round(1 + 2**-11) == 1.0


def test_a_pattern_with_too_many_bits_is_refused():
    with pytest.raises(ValueError, match="e4m3: expected a pattern of 8 bits, got 256"):
        FORMATS["e4m3"].decode(256)
    with pytest.raises(ValueError, match="no tensor has the format 'tf32'"):
        precision.bits_of(1.0, "tf32")


# ---- what falls out


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**40])
def test_shares_are_what_the_cast_does(name, scale):
    torch.manual_seed(0)
    values = torch.randn(5000) * torch.logspace(-12, 3, 5000)
    values = torch.cat([values, torch.zeros(7)])
    stored = (values.double() * scale).float().to(DTYPES[name][0]).double()
    real = values != 0
    found = precision.shares([values[:3], values[3:]], scale, name)
    tiny = torch.finfo(DTYPES[name][0]).smallest_normal
    unrounded = (values.double() * scale).abs()
    lost = stored == 0
    assert found.lost == pytest.approx(lost[real].double().mean().item(), abs=1e-12)
    assert found.overflow == pytest.approx(stored.isinf()[real].double().mean().item(), abs=1e-12)
    small = (unrounded < tiny) & ~lost
    assert found.subnormal == pytest.approx(small[real].double().mean().item(), abs=1e-12)
    total = found.lost + found.subnormal + found.normal + found.overflow
    assert total == pytest.approx(1)


def test_half_of_the_smallest_number_is_lost_and_the_next_is_not():
    half = torch.tensor(2.0**-25)
    assert precision.shares(half).lost == 1
    assert precision.shares(half * 1.0001).subnormal == 1
    assert precision.shares(torch.tensor([65519.0])).normal == 1
    assert precision.shares(torch.tensor([65520.0])).overflow == 1
    assert precision.shares(torch.tensor([math.inf, math.nan])).overflow == 1


def test_there_must_be_something_to_share():
    with pytest.raises(ValueError, match="at least one value that is not zero"):
        precision.shares(torch.zeros(3))
    with pytest.raises(ValueError, match="at least one value that is not zero"):
        precision.shares([])
    with pytest.raises(ValueError, match="unknown format 'float16'; expected one of .*'fp16'"):
        precision.shares(torch.ones(3), name="float16")


def test_powers_of_two_are_counted_from_below():
    values = torch.tensor([1.0, 1.99, -2.0, 3.9, 0.0, 2.0**-149, 0.5])
    expected = {-149: 1 / 6, -1: 1 / 6, 0: 2 / 6, 1: 2 / 6}
    assert precision.powers_of_two(values) == expected
    assert precision.powers_of_two([values, torch.tensor([math.inf, math.nan])]) == expected
    assert precision.powers_of_two([]) == {}


# ---- loss scaling


def pair(**settings):
    """The same weights and optimizers twice: for PyTorch's scaler and for ours."""
    models = [[nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))] for _ in range(2)]
    optimizers = [[torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model] for model in models]
    scalers = torch.amp.GradScaler("cpu", **settings), LossScaler(**settings)
    return models, optimizers, scalers


SETTINGS = [
    {},
    {"init_scale": 2.0**20, "growth_interval": 3},
    {"init_scale": 3.7, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2},
    {"init_scale": 1e38, "growth_interval": 1},
    {"init_scale": 1e-30, "growth_interval": 4},
]


def random_steps(seed: int, count: int = 40):
    """For each step: the gradients of both parameters, and whether to unscale before stepping."""
    draw = random.Random(seed)
    for _ in range(count):
        gradients = [torch.tensor([draw.uniform(-1, 1) for _ in range(n)]) for n in (3, 2)]
        bad = draw.choice([None, None, None, math.inf, -math.inf, math.nan])
        if bad is not None:
            gradients[draw.randrange(2)][0] = bad
        yield gradients, draw.random() < 0.5


def one_update(scaler, model, optimizers, gradients, unscale_first):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = sum((p * g).sum() for p, g in zip(model, gradients, strict=True))
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_the_scaler_agrees_with_pytorch_step_by_step(settings, seed):
    models, optimizers, scalers = pair(**settings)
    for gradients, unscale_first in random_steps(seed):
        for model, both, scaler in zip(models, optimizers, scalers, strict=True):
            one_update(scaler, model, both, gradients, unscale_first)
        theirs, ours = scalers
        assert ours.state_dict() == theirs.state_dict()
        assert ours.get_scale() == theirs.get_scale()
        for a, b in zip(*models, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a.grad.nan_to_num(7.0), b.grad.nan_to_num(7.0))


def test_each_can_load_what_the_other_saved():
    settings = {"init_scale": 2.0**30, "growth_interval": 7}
    theirs, ours = torch.amp.GradScaler("cpu"), LossScaler(**settings)
    ours.good_steps = 5
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    other = LossScaler()
    other.load_state_dict(theirs.state_dict())
    assert other.state_dict() == ours.state_dict()


def test_a_scaler_that_was_off_has_saved_nothing():
    nothing = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    for state, missing in ((nothing, "_growth_tracker.*scale"), ({"scale": 8.0}, "_growth_tr")):
        scaler = LossScaler()
        with pytest.raises(ValueError, match=f"the state of a scaler that is .*{missing}"):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == LossScaler().state_dict()


def one_step(scaler, gradient=1.0):
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale((p * gradient).sum()).backward()
    return p, optimizer


def test_a_skipped_step_moves_nothing_and_halves_the_scale():
    scaler = LossScaler(init_scale=8.0)
    p, optimizer = one_step(scaler, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [1, 1] and scaler.factor == 4 and scaler.good_steps == 0


def test_what_is_called_in_the_wrong_order_says_so():
    scaler = LossScaler()
    with pytest.raises(RuntimeError, match="expected unscale_ or step before update"):
        scaler.update()
    p, optimizer = one_step(scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="gradients are unscaled already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="has made its step already"):
        scaler.step(optimizer)
    scaler.update()
    p.grad = None
    with pytest.raises(RuntimeError, match="expected gradients to unscale, got none"):
        scaler.step(optimizer)


def test_half_precision_gradients_are_refused_by_both():
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    with pytest.raises(ValueError, match="float32 parameters, got float16"):
        LossScaler().unscale_(optimizer)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        theirs.unscale_(optimizer)


# ---- autocast


class Inputs(TorchDispatchMode):
    """The dtypes that the floating-point inputs have when a kernel runs, below autocast."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if func is not torch.ops.aten._to_copy.default:
            self.calls.append({t.dtype for t in tensors})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_table_agrees_with_what_the_kernels_receive(low):
    rows = precision.autocast_table("cpu", low)
    assert [row.name for row in rows] == list(precision.OPERATIONS)
    for row in rows:
        operation, shapes = precision.OPERATIONS[row.name]
        for given in (torch.float32, low):
            inputs = [torch.ones(shape, dtype=given) for shape in shapes]
            with Inputs() as seen, torch.autocast("cpu", low):
                operation(*inputs)
            ran_in = set().union(*seen.calls)
            expected = {"low": low, "float32": torch.float32, "input dtype": given}[row.group]
            assert expected in ran_in, row
            assert ran_in <= {expected, given}, row  # ones_like of a case may be outside


def test_the_groups_on_a_cpu_are_these():
    groups = {row.name: row.group for row in precision.autocast_table()}
    assert groups["matmul"] == groups["F.linear"] == "low"
    assert groups["F.cross_entropy"] == groups["F.mse_loss"] == "float32"
    assert groups["softmax"] == groups["F.layer_norm"] == groups["add"] == "input dtype"


def test_the_source_lists_softmax_for_cuda_in_float32():
    lists = precision.autocast_lists()
    assert lists["softmax"] == lists["layer_norm"] == lists["exp"] == "float32"
    assert lists["matmul"] == lists["linear"] == lists["scaled_dot_product_attention"] == "low"
    assert "relu" not in lists and "addcmul" not in lists
    assert precision.cuda_group("F.cross_entropy") == "float32"
    assert precision.cuda_group("F.relu") == "input dtype"


def test_unknown_operations_and_other_headers_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="unknown operation 'sort'"):
        precision.cuda_group("sort")
    (tmp_path / "include" / "ATen").mkdir(parents=True)
    (tmp_path / "include" / "ATen" / "autocast_mode.h").write_text("nothing", encoding="utf-8")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ValueError, match="expected the macro AT_FORALL_LOWER"):
        precision.autocast_lists()


@pytest.mark.gpu
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_gpu_does_what_the_source_says(low):
    for row in precision.autocast_table("cuda", low):
        assert row.group == precision.cuda_group(row.name), row


def test_no_warning_on_the_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision.autocast_table()
