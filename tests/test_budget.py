import contextlib
import random
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from helpers import budget
from helpers.memory import PeakMemory, SavedTensors
from helpers.models import GPT, GPTConfig, count_parameters

GPT2 = {  # Radford et al. 2019, table 2: layers, heads, width
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
    "XL": (48, 25, 1600),
}
SMALL = {"vocabulary": 50, "context": 8, "layers": 2, "heads": 2, "width": 16, "micro_batch": 3}
SIZES = ("vocabulary", "context", "layers", "heads", "width")


pytestmark = pytest.mark.usefixtures("one_thread")


def random_setting(seed):
    """Sizes small enough to run; every choice of `step_bytes`."""
    draw = random.Random(seed)
    heads = draw.choice([4, 8])
    return {
        "vocabulary": int(10 ** draw.uniform(1.3, 3.5)),
        "context": draw.randint(4, 100),
        "layers": draw.randint(1, 5),
        "heads": heads,
        "width": heads * draw.choice([4, 8, 16, 32]),
        "micro_batch": draw.randint(1, 4),
        "precision": draw.choice(["fp32", "amp", "bf16"]),
        "optimizer": draw.choice(["none", "sgd", "momentum", "adam", "fused adam"]),
        "attention": draw.choice(["fused", "matrix"]),
        "checkpointing": draw.choice(["none", "blocks"]),
        "accumulation": draw.choice([1, 1, 3]),
    }


class Run:
    """The training that a setting describes, with the book's GPT."""

    def __init__(self, setting):
        self.setting = s = {**SETTINGS, **setting}
        torch.set_default_dtype(torch.bfloat16 if s["precision"] == "bf16" else torch.float32)
        self.model = GPT(GPTConfig(**{name: s[name] for name in SIZES}))
        torch.set_default_dtype(torch.float32)
        if s["checkpointing"] == "blocks":
            for block in self.model.blocks:
                block.forward = self.recomputed(block.forward)
        weights = self.model.parameters()
        self.optimizer = {
            "none": lambda: None,
            "sgd": lambda: torch.optim.SGD(weights, foreach=True),
            "momentum": lambda: torch.optim.SGD(weights, momentum=0.9, foreach=True),
            "adam": lambda: torch.optim.AdamW(weights, foreach=True),
            "fused adam": lambda: torch.optim.AdamW(weights, fused=True),
        }[s["optimizer"]]()
        shape = (s["micro_batch"], s["context"])
        self.x, self.y = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))

    @staticmethod
    def recomputed(forward):
        return lambda x: checkpoint(forward, x, use_reentrant=False)

    def loss(self):
        with contextlib.ExitStack() as stack:
            if self.setting["precision"] == "amp":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if self.setting["attention"] == "matrix":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            return F.cross_entropy(self.model(self.x).flatten(0, 1), self.y.flatten())

    def step(self):
        for _ in range(self.setting["accumulation"]):
            loss = self.loss()
            with sdpa_kernel(SDPBackend.MATH) if self.matrix else contextlib.nullcontext():
                loss.backward()  # a recomputed block attends once more
            del loss
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    @property
    def matrix(self):
        return self.setting["attention"] == "matrix"

    @property
    def counters(self):
        """Bytes of Adam's step counters: on a GPU they stay on the CPU."""
        state = {} if self.optimizer is None else self.optimizer.state
        return sum(4 for s in state.values() if "step" in s)

    def peak(self):
        """Bytes at the peak of the second step."""
        existing = [self.model, self.x, self.y]
        self.step()
        if self.optimizer is not None:
            existing.append(self.optimizer)
        with PeakMemory(*existing) as memory:
            self.step()
        return memory.peak - self.counters


SETTINGS = {
    "precision": "fp32",
    "optimizer": "adam",
    "attention": "fused",
    "checkpointing": "none",
    "accumulation": 1,
}


def saved_bytes(setting):
    """What the formula says is saved for backward, weights' copies included."""
    loss = budget.step_bytes(**setting)["loss"]
    return loss["activations"] + loss["copies"] + loss["loss"] // 3


@pytest.mark.parametrize("seed", range(40))
def test_saved_bytes_are_exact(seed):
    setting = random_setting(seed)
    run = Run(setting)
    with SavedTensors(exclude=run.model.parameters()) as saved:
        loss = run.loss()
    assert saved.bytes == saved_bytes(setting), setting
    del loss


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_saved_bytes_are_exact_where_attention_sees_one_sequence_or_one_head(heads, precision):
    setting = SMALL | {"heads": heads, "precision": precision, "attention": "matrix"}
    for micro_batch in (1, 2):
        run = Run(setting | {"micro_batch": micro_batch})
        with SavedTensors(exclude=run.model.parameters()) as saved:
            loss = run.loss()
        assert saved.bytes == saved_bytes(setting | {"micro_batch": micro_batch})
        del loss


@pytest.mark.parametrize("seed", range(50))
def test_peak_of_a_step_is_within_one_percent(seed):
    setting = random_setting(seed)
    measured = Run(setting).peak()
    assert budget.peak_bytes(**setting) == pytest.approx(measured, rel=0.01), setting


@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_peak_of_gpt2_is_exact_to_the_kilobyte(precision, checkpointing):
    layers, heads, width = GPT2["small"]
    setting = {
        "vocabulary": 50257,
        "context": 1024,
        "layers": layers,
        "heads": heads,
        "width": width,
        "micro_batch": 4,
        "precision": precision,
        "checkpointing": checkpointing,
    }
    with FakeTensorMode():
        measured = Run(setting).peak()
    assert abs(budget.peak_bytes(**setting) - measured) < 1024


@pytest.mark.parametrize("name", GPT2)
def test_parameters_are_those_of_the_model(name):
    layers, heads, width = GPT2[name]
    sizes = {"vocabulary": 50257, "context": 1024, "layers": layers, "heads": heads, "width": width}
    with FakeTensorMode():
        expected = count_parameters(GPT(GPTConfig(**sizes)))
    for precision, bytes_each in (("fp32", 4), ("amp", 4), ("bf16", 2)):
        parts = budget.step_bytes(**sizes, micro_batch=1, precision=precision)["update"]
        assert parts["parameters"] == parts["gradients"] == bytes_each * expected


@pytest.mark.parametrize("optimizer", ["none", "sgd", "momentum", "adam", "fused adam"])
def test_optimizer_state_is_that_of_the_optimizer(optimizer):
    run = Run(SMALL | {"optimizer": optimizer})
    run.step()
    state = {} if run.optimizer is None else run.optimizer.state
    held = [t for s in state.values() for t in s.values() if torch.is_tensor(t) and t.ndim]
    expected = budget.step_bytes(**SMALL, optimizer=optimizer)["update"]["optimizer"]
    assert sum(t.nbytes for t in held) == expected


def test_ddp_holds_every_gradient_a_second_time(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        run = Run(SMALL | {"optimizer": "none"})
        with PeakMemory(run.model) as memory:
            wrapped = DistributedDataParallel(run.model)
            before = memory.live
            F.cross_entropy(wrapped(run.x).flatten(0, 1), run.y.flatten()).backward()
            held = memory.by_category(at=len(memory.timeline) - 1)
    finally:
        torch.distributed.destroy_process_group()
    parts = budget.step_bytes(**SMALL, gpus=8)["update"]
    assert parts["buckets"] == parts["gradients"] == held["gradients"]
    assert before - held["parameters"] >= parts["buckets"]


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_a_mode_does_not_hide_what_autograd_does_by_itself(precision):
    """The sum of the two gradients of a shared matrix, seen by the allocator of the CPU."""
    setting = SMALL | {"vocabulary": 5000, "width": 64, "micro_batch": 1}
    setting |= {"precision": precision, "optimizer": "none"}
    run = Run(setting)
    run.step()
    held = 4 * count_parameters(run.model) + run.x.nbytes + run.y.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run.step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = held
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert budget.peak_bytes(**setting) == pytest.approx(peak, rel=0.01)


def test_the_peak_is_the_largest_sum():
    moments = budget.step_bytes(**SMALL)
    assert list(moments) == [
        "forward",
        "loss",
        "head",
        "last block",
        "first block",
        "embeddings",
        "update",
    ]
    assert len({tuple(parts) for parts in moments.values()}) == 1
    assert all(value >= 0 for parts in moments.values() for value in parts.values())
    assert budget.peak_bytes(**SMALL) == max(sum(p.values()) for p in moments.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 17}, "width 17 cannot be split into 2 heads"),
        ({"layers": 0}, "every size must be at least 1"),
        ({"gpus": 0}, "every size must be at least 1"),
        ({"precision": "float32"}, r"must be one of \['fp32', 'amp', 'bf16'\], got 'float32'"),
        ({"optimizer": "adamw"}, "optimizer must be one of .*'adam', 'fused adam'.*, got 'adamw'"),
        ({"attention": "math"}, r"attention must be one of \['fused', 'matrix'\], got 'math'"),
        ({"checkpointing": True}, "checkpointing must be one of .*, got True"),
    ],
)
def test_what_is_no_training_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        budget.step_bytes(**SMALL | wrong)
    with pytest.raises(ValueError, match=message):
        budget.peak_bytes(**SMALL | wrong)


def test_a_block_knows_the_same_words():
    sizes = {"micro_batch": 3, "context": 8, "heads": 2, "width": 16, "attention": "fused"}
    with pytest.raises(ValueError, match="precision must be one of .*, got 'fp16'"):
        budget.block_bytes(**sizes, precision="fp16")
    with pytest.raises(TypeError, match="precison"):  # a misspelt name: Python's own error
        budget.block_bytes(**sizes, precison="fp32")


def test_every_known_word_is_one_that_the_formula_knows():
    """The words of the signature and the tables inside of the formula are written separately."""
    for name, hint in get_type_hints(budget.step_bytes).items():
        for word in get_args(hint) if get_origin(hint) is Literal else ():
            assert budget.peak_bytes(**SMALL | {name: word}) > 0
