"""The five programs of chapter 19 make the same updates, and what they cost is counted right."""

import ast
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from helpers import data, ecosystem
from helpers.ecosystem_job import make_job

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "19_ecosystem.ipynb"
LIBRARIES = [name for name in ecosystem.PROGRAMS if name != "bare"]


@pytest.fixture(scope="module")
def digits():
    found = data.digits()
    few = slice(0, 800)  # 8 batches
    return data.Digits(
        found.train_images[few],
        found.train_labels[few],
        found.test_images,
        found.test_labels,
        found.source,
    )


@pytest.fixture(autouse=True)
def quiet():
    ecosystem.forget_accelerate()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def trained(program, digits, epochs=2):
    model, optimizer, loader = make_job(digits)
    program(model, optimizer, loader, epochs)
    return model


@pytest.fixture(scope="module")
def small(digits):
    return trained(ecosystem.train_bare, digits)


@pytest.fixture(scope="module")
def grown(digits):
    return trained(ecosystem.train_bare_grown, digits)


# ---- the bare loops


def test_the_bare_loop_is_sgd_with_momentum(small, digits):
    """The same updates, written out: v = 0.9 v + g, w = w - 0.05 v."""
    model, _, loader = make_job(digits)
    parameters = list(model.parameters())
    velocities = [torch.zeros_like(p) for p in parameters]
    for _ in range(2):
        for images, labels in loader:
            loss = -model(images).log_softmax(1).gather(1, labels[:, None]).mean()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, v, g in zip(parameters, velocities, gradients, strict=True):
                    v.mul_(0.9).add_(g)
                    p.sub_(0.05 * v)
    for p, q in zip(parameters, small.parameters(), strict=True):
        # 16 updates, each rounded a few times: some hundred units in the last place of values to 1
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_the_grown_loop_averages_clips_and_rounds(grown, digits):
    """Two batches as one of 200 in float32, clipped by hand: as close as bfloat16 allows."""
    model, optimizer, loader = make_job(digits)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        batches = list(loader)
        for (x1, y1), (x2, y2) in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            output = model(torch.cat([x1, x2]))
            nn.functional.cross_entropy(output, torch.cat([y1, y2])).backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
            optimizer.step()
    moved = torch.cat([(p - s).flatten() for p, s in zip(model.parameters(), start, strict=True)])
    other = torch.cat([(p - s).flatten() for p, s in zip(grown.parameters(), start, strict=True)])
    # bfloat16 has 8 bits: a single product is off by up to 0.4 %, and errors of many average out
    assert (moved - other).norm() < 0.05 * moved.norm()


# ---- the same weights, whoever runs the loop


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_small_job_ends_with_the_same_weights(name, digits, small):
    assert ecosystem.same_weights(trained(ecosystem.PROGRAMS[name][0], digits), small)


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_grown_job_ends_with_the_same_weights(name, digits, grown):
    assert ecosystem.same_weights(trained(ecosystem.PROGRAMS[name][1], digits), grown)


def test_the_two_jobs_differ(small, grown):
    assert not ecosystem.same_weights(small, grown)


def test_accelerate_keeps_its_settings_for_the_process(digits):
    trained(ecosystem.train_with_accelerate, digits)
    with pytest.raises(ValueError, match="mixed_precision='bf16'"):
        trained(ecosystem.train_with_accelerate_grown, digits)


def test_a_second_accelerator_changes_the_accumulation_of_the_first():
    """What the chapter shows, and what the docstring of `forget_accelerate` says."""
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert first.gradient_accumulation_steps == 2
    Accelerator(cpu=True)
    assert first.gradient_accumulation_steps == 1


def test_accelerate_forgets(digits, small):
    """Else bfloat16, and two batches for an update, would silently stay."""
    trained(ecosystem.train_with_accelerate_grown, digits)
    ecosystem.forget_accelerate()
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "no"
    assert accelerator.gradient_accumulation_steps == 1
    assert ecosystem.same_weights(trained(ecosystem.train_with_accelerate, digits), small)


def test_lightning_resumes_with_the_order_of_the_next_epoch(digits, small, tmp_path):
    options = ecosystem.QUIET | {"enable_checkpointing": True, "default_root_dir": tmp_path}
    model, optimizer, loader = make_job(digits)
    trainer = L.Trainer(max_epochs=1, **options)
    trainer.fit(ecosystem.Classifier(model, optimizer), loader)

    model, optimizer, loader = make_job(digits)
    saved = trainer.checkpoint_callback.best_model_path
    L.Trainer(max_epochs=2, **options).fit(
        ecosystem.Classifier(model, optimizer), loader, ckpt_path=saved
    )
    assert ecosystem.same_weights(model, small)


def test_accelerate_resumes_with_the_order_of_the_next_epoch(digits, small, tmp_path):
    def one_epoch(accelerator, model, optimizer, loader):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

    accelerator = Accelerator(cpu=True)
    one_epoch(accelerator, *accelerator.prepare(*make_job(digits)))
    accelerator.save_state(tmp_path)

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*make_job(digits))
    accelerator.load_state(tmp_path)
    loader.set_epoch(1)
    one_epoch(accelerator, model, optimizer, loader)
    assert ecosystem.same_weights(model, small)


def test_one_weight_or_name_or_buffer_makes_a_difference():
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    assert ecosystem.same_weights(model, other)
    other.running_mean[2] = 1e-7
    assert not ecosystem.same_weights(model, other)
    assert not ecosystem.same_weights(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))


@pytest.mark.slow  # compiles a C++ extension at its first start
@pytest.mark.parametrize("stage", [0, 2])
def test_deepspeed_ends_with_the_same_weights(stage, tmp_path):
    """The program of the notebook, in a process of its own."""
    pytest.importorskip("deepspeed")
    (tmp_path / "runs" / "ecosystem").mkdir(parents=True)
    program = cell("%%writefile runs/ecosystem/zero.py").split("\n", 1)[1]
    (tmp_path / "zero.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "zero.py", str(stage)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model, optimizer, loader = make_job(data.digits())
    ecosystem.train_bare(model, optimizer, loader, 3)
    state = torch.load(tmp_path / "runs" / "ecosystem" / f"zero{stage}.pt")
    for name, tensor in model.state_dict().items():
        # ZeRO averages and adds in buffers of its own, in another order
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_images_that_fill_a_batch_do_not_count(tmp_path):
    """The program of the notebook: 1,000 images for two processes in batches of 300."""
    folder = tmp_path / "runs" / "ecosystem"
    folder.mkdir(parents=True)
    model, _, _ = make_job(data.digits())
    torch.save(model.state_dict(), folder / "job.pt")
    program = cell("%%writefile runs/ecosystem/evaluate.py").split("\n", 1)[1]
    (tmp_path / "evaluate.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "evaluate.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, _ = done.stdout.splitlines()
    assert (first, second) == ("gather: 1200 images", "gather_for_metrics: 1000 images")


@pytest.mark.slow
def test_accelerate_launch_starts_one_process_on_a_cpu(tmp_path):
    """What the chapter warns of: `--num_processes` has no effect, and nothing says so."""
    program = "from accelerate import Accelerator\nprint(Accelerator(cpu=True).num_processes)\n"
    (tmp_path / "count.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, "count.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1"]


# ---- the programs of the notebook are those that are tested here


def cell(beginning):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(each["source"]) for each in cells if each["cell_type"] == "code"]
    (found,) = [source for source in sources if source.startswith(beginning)]
    return found


def definitions(source):
    """Name -> what a function or class does, without types and docstrings."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
                    inner.body = inner.body[1:]
                if isinstance(inner, ast.FunctionDef):
                    inner.returns = None
                if isinstance(inner, ast.arg):
                    inner.annotation = None
            found[node.name] = ast.unparse(node)
    return found


def test_the_notebook_shows_the_programs_that_are_tested():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    shown = {}
    for each in cells:
        source = "".join(each["source"])
        if each["cell_type"] == "code" and not source.startswith("%%"):
            shown |= definitions(re.sub(r"^%.*$", "", source, flags=re.M))
    tested = {}
    for name in ("ecosystem.py", "ecosystem_job.py"):
        tested |= definitions((ROOT / "helpers" / name).read_text(encoding="utf-8"))
    programs = [name for name in tested if name.startswith("train_")]
    assert len(programs) == 10
    for name in [*programs, "Classifier", "Shuffled", "loss_fn", "repeated"]:
        assert shown[name] == tested[name]


# ---- what is counted


def example(a, b):
    """Words
    that do not count.
    """
    # nor does this

    return (
        a + b  # but this line does
    )


class Example:
    """One line."""

    def method(
        self,
        value: int,
    ) -> int:
        return value


def test_lines_of_code():
    assert ecosystem.code_lines(example) == 4
    assert ecosystem.code_lines(Example) == 3
    assert ecosystem.code_lines(example, Example) == 7


def test_statements():
    assert ecosystem.statements(example) == 2
    assert ecosystem.statements(Example) == 3
    assert ecosystem.statements(example, Example) == 5


def test_a_program_that_is_broken_into_more_lines_has_no_more_statements():
    """The Trainer's three more arguments take five more lines."""
    small, grown, _ = ecosystem.PROGRAMS["Trainer"]
    assert ecosystem.statements(grown) == ecosystem.statements(small) == 3
    assert ecosystem.code_lines(grown) == ecosystem.code_lines(small) + 5 == 8


class Distribution:
    def __init__(self, requires, files=()):
        self.requires, self.files = requires, files


class File:
    def __init__(self, path):
        self.path = path

    def locate(self):
        return self.path


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """torch needs numpy; lib needs torch, tool and, with an extra, more; nothing else is there."""
    for size, name in enumerate(("torch", "numpy", "lib", "tool", "more"), 1):
        (tmp_path / name).write_bytes(b"x" * 10**size)
    requires = {
        "torch": ["NumPy>=1"],
        "numpy": None,
        "lib": [
            "torch>=2",
            "Tool",
            'more; extra == "all"',
            'gone; sys_platform == "nowhere"',
            "lost",
        ],
        "tool": ["numpy", "lib"],  # in a circle
        "more": [],
    }

    def of(kind):
        def find(name):
            if name not in requires:
                raise importlib.metadata.PackageNotFoundError(name)
            if kind == "requires":
                return requires[name]
            return [File(tmp_path / name), File(tmp_path / "removed"), File(tmp_path)]

        return find

    monkeypatch.setattr(importlib.metadata, "requires", of("requires"))
    monkeypatch.setattr(importlib.metadata, "files", of("files"))
    return monkeypatch


def test_what_a_library_needs(installed):
    assert ecosystem.needed("lib") == {"lib", "torch", "numpy", "tool"}
    assert ecosystem.needed("Torch") == {"torch", "numpy"}
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        ecosystem.needed("nothing")


def test_what_a_library_adds(installed):
    assert ecosystem.added_bytes("lib") == 10**3 + 10**4
    assert ecosystem.added_bytes("torch") == 0
    assert ecosystem.added_bytes("torch", beside=[]) == 10 + 10**2


def test_a_library_without_a_list_of_files(installed):
    installed.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ValueError, match="expected a list of its files, got none"):
        ecosystem.added_bytes("lib")


def test_what_is_really_installed():
    assert ecosystem.needed("accelerate") >= {"accelerate", "torch", "numpy"}
    assert ecosystem.added_bytes("accelerate") > 100_000
