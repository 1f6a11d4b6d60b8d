import os
import random
import re

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from helpers import environment
from helpers.exercises import check
from helpers.exercises.environment import EXERCISES, start, walk


def verdict(capsys, name, answer):
    check(name, answer)
    return capsys.readouterr().out


# ---- cuda_of

SHOWN = {
    "NVIDIA-SMI 535.113.01  Driver Version: 535.113.01  CUDA Version: 12.2     |": "12.2",
    "| NVIDIA-SMI 610.43  KMD Version: 610.43  CUDA UMD Version: 13.3    |": "13.3",
    "NVIDIA-SMI 418.87  Driver Version: 418.87  CUDA Version: 10.1|": "10.1",
}


def cuda_by(pattern, group=1):
    def answer(header):
        found = re.search(pattern, header)
        return found[group] if found else None

    return answer


def cuda_by_split(header):
    for word in ("CUDA Version:", "CUDA UMD Version:"):
        if word in header:
            version = header.split(word)[1].split()[0].strip("|")
            return None if version == "N/A" else version
    return None


def cuda_to_the_bar(header):
    text = header.partition("CUDA")[2].partition("Version:")[2].partition("|")[0].strip()
    return text if text[:1].isdigit() else None


@pytest.mark.parametrize(
    "answer",
    [
        SHOWN.get,
        lambda h: "12.2",
        cuda_by(r"CUDA (?:UMD )?Version: (\d\d\.\d)"),
        cuda_by(r"CUDA (?:UMD )?Version: (\d+\.\d)"),
        cuda_by(r"CUDA (?:UMD )?Version: (\d\d\.\d+)"),
        cuda_by(r"CUDA Version: (\d+\.\d+)"),
        cuda_by(r"CUDA (?:UMD )?Version: (\S+)"),
        cuda_by(r"Version: (\d+\.\d+)"),
        cuda_by(r"(\d+\.\d+)\s*\|"),
        lambda h: cuda_by(r"CUDA (?:UMD )?Version: (\d+\.\d+)")(h) or "",
        lambda h: float(cuda_by(r"CUDA (?:UMD )?Version: (\d+\.\d+)")(h) or "nan"),
        lambda h: h.split("CUDA Version: ")[1].split()[0],
    ],
)
def test_wrong_cuda_of(capsys, answer):
    out = verdict(capsys, "environment.cuda_of", answer)
    assert out.startswith("✗ case") and ("NVIDIA-SMI" in out or "f('')" in out)


@pytest.mark.parametrize(
    "answer",
    [
        cuda_by(r"CUDA\s+(UMD\s+)?Version:\s*(\d+\.\d+)", 2),
        cuda_by_split,
        cuda_to_the_bar,
    ],
)
def test_right_cuda_of(capsys, answer):
    assert verdict(capsys, "environment.cuda_of", answer) == "✓ correct on 11 cases\n"


# ---- wheel


def version(tag):
    return int(tag[2:-1]), int(tag[-1])


def known(driver, tags):
    """The tags that start."""
    found = []
    for tag in tags:
        if driver is not None and tag != "cpu" and version(tag)[0] in environment.OLDEST_DRIVER:
            if environment.driver_starts(driver, "{}.{}".format(*version(tag))):
                found.append(tag)
    return found


def wheel_by_first(driver, tags):
    return next(iter(known(driver, tags)), "cpu")


def wheel_by_string_of_all(driver, tags):
    if driver is None:
        return "cpu"
    major = int(driver.split(".")[0])
    names = [
        t for t in tags if t != "cpu" and environment.TOOLKIT_DRIVER.get(dotted(t), 0) <= major
    ]
    return max(names, default="cpu")


def dotted(tag):
    return f"{tag[2:-1]}.{tag[-1]}"


def wheel_without_minor_compatibility(driver, tags):
    found = []
    for tag in tags:
        if driver is not None and tag != "cpu" and dotted(tag) in environment.TOOLKIT_DRIVER:
            if environment.TOOLKIT_DRIVER[dotted(tag)] <= int(driver.split(".")[0]):
                found.append(tag)
    return max(found, key=version, default="cpu")


def wheel_with_drivers_as_strings(driver, tags):
    found = []
    for tag in tags:
        if driver is not None and tag != "cpu" and version(tag)[0] in environment.OLDEST_DRIVER:
            if driver >= str(environment.OLDEST_DRIVER[version(tag)[0]]):
                found.append(tag)
    return max(found, key=version, default="cpu")


def wheel_after_the_oldest(driver, tags):
    found = []
    for tag in tags:
        if driver is not None and tag != "cpu" and version(tag)[0] in environment.OLDEST_DRIVER:
            if int(driver.split(".")[0]) > environment.OLDEST_DRIVER[version(tag)[0]]:
                found.append(tag)
    return max(found, key=version, default="cpu")


def wheel_knowing_no_nine(driver, tags):
    found = [t for t in tags if t != "cpu" and driver]
    found = [t for t in found if environment.driver_starts(driver, dotted(t))]
    return max(found, key=version, default="cpu")


@pytest.mark.parametrize(
    "answer",
    [
        lambda driver, tags: "cpu",
        lambda driver, tags: tags[-1],
        wheel_by_first,
        wheel_by_string_of_all,
        wheel_without_minor_compatibility,
        wheel_with_drivers_as_strings,
        wheel_after_the_oldest,
        wheel_knowing_no_nine,
        lambda driver, tags: max(known(driver, tags), key=version),  # fails where none starts
        lambda driver, tags: max(known(driver or "999", tags), key=version, default="cpu"),
        lambda driver, tags: max(known(driver, tags), key=version, default=None),
        lambda driver, tags: min(known(driver, tags), key=version, default="cpu"),
        lambda driver, tags: dotted(max(known(driver, tags), key=version, default="cpu")),
    ],
)
def test_wrong_wheel(capsys, answer):
    assert verdict(capsys, "environment.wheel", answer).startswith("✗ case ")


def test_a_wrong_wheel_is_told_driver_and_tags(capsys):
    out = verdict(capsys, "environment.wheel", lambda driver, tags: "cpu")
    assert "f('595.58.03', ('cpu', 'cu126', 'cu130', 'cu132')): value is not right: 'cpu'" in out


@pytest.mark.parametrize(
    "answer",
    [
        lambda driver, tags: max(known(driver, tags), key=version, default="cpu"),
        lambda driver, tags: max(["cpu", *known(driver, tags)]),  # two digits in all majors known
        lambda driver, tags: (
            sorted(known(driver, tags), key=lambda t: float(dotted(t)))[-1:]
            and sorted(known(driver, tags), key=lambda t: float(dotted(t)))[-1]
            or "cpu"
        ),
    ],
)
def test_right_wheel(capsys, answer):
    assert verdict(capsys, "environment.wheel", answer) == "✓ correct on 66 cases\n"


# ---- reseed


def reseed_with(make):
    def answer(dataset):
        dataset.rng = make()

    return answer


def reseed_and_torch(dataset):
    dataset.rng = np.random.default_rng(torch.initial_seed())
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (lambda dataset: None, "'another seed gives other noise': False"),
        (reseed_with(lambda: np.random.default_rng(0)), "other noise': False"),
        (reseed_with(np.random.default_rng), "repeats the noise': False"),
        (reseed_with(lambda: np.random.default_rng(os.getpid())), "other noise': False"),
        (
            reseed_with(lambda: np.random.default_rng(torch.initial_seed() % 1000)),
            "other noise': False",
        ),
        (
            reseed_with(lambda: np.random.default_rng(get_worker_info().id)),
            "other noise': False",
        ),
        (
            reseed_with(lambda: np.random.RandomState(torch.initial_seed() % 2**32)),
            "NumPy Generator': False",
        ),
        (reseed_with(lambda: random.Random(torch.initial_seed())), "AttributeError"),
        (reseed_with(lambda: torch.Generator()), "AttributeError"),
        (reseed_with(lambda: None), "NumPy Generator': False"),
        (reseed_and_torch, "'another seed gives other torch numbers': False"),
    ],
)
def test_wrong_reseed(capsys, answer, fact):
    out = verdict(capsys, "environment.reseed", answer)
    assert out.startswith("✗ case ") and fact in out


@pytest.mark.parametrize(
    "answer",
    [
        reseed_with(lambda: np.random.default_rng(get_worker_info().seed)),
        reseed_with(lambda: np.random.default_rng(torch.randint(2**62, ()).item())),
        reseed_with(lambda: np.random.default_rng(random.getrandbits(64))),
        reseed_with(lambda: np.random.default_rng([torch.initial_seed(), 1])),
        reseed_with(lambda: np.random.Generator(np.random.PCG64(torch.initial_seed()))),
        lambda dataset: environment.seed_worker(0),
    ],
)
def test_right_reseed(capsys, answer):
    assert verdict(capsys, "environment.reseed", answer) == "✓ correct on 4 cases\n"


# ---- resume


def pause_with(save):
    def pause(seed, stop):
        w, coin, dice = start(seed)
        return save(walk(w, coin, dice, stop), coin, dice)

    return pause


def go_on(saved, steps):
    w, coin_state, dice_state = saved
    coin, dice = torch.Generator(), random.Random()
    coin.set_state(coin_state)
    dice.setstate(dice_state)
    return walk(w, coin, dice, steps)


def only_weights(saved, steps):
    return walk(saved, torch.Generator().manual_seed(0), random.Random(0), steps)


def seeded_again(saved, steps):
    w, seed = saved
    return walk(w, *start(seed)[1:], steps)


def without_dice(saved, steps):
    return walk(saved[0], torch.Generator().set_state(saved[1]), random.Random(0), steps)


def without_coin(saved, steps):
    dice = random.Random()
    dice.setstate(saved[1])
    return walk(saved[0], torch.Generator().manual_seed(0), dice, steps)


def from_the_start(saved, steps):
    seed, stop = saved
    return walk(*start(seed), stop + steps)


def paused_early(seed, stop):  # states of before the walk, weights of after it
    w, coin, dice = start(seed)
    states = coin.get_state(), dice.getstate()
    return walk(w, coin, dice, stop), *states


def global_state(w, coin, dice):
    return w, torch.get_rng_state(), random.getstate()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((pause_with(lambda w, coin, dice: w), only_weights), "elements differ"),
        ((lambda seed, n: (walk(*start(seed), n), seed), seeded_again), "elements differ"),
        ((pause_with(lambda w, coin, dice: (w, coin.get_state())), without_dice), "differ"),
        ((pause_with(lambda w, coin, dice: (w, dice.getstate())), without_coin), "differ"),
        ((lambda seed, n: (seed, n), from_the_start), "resume took 5 steps, expected 2"),
        ((paused_early, go_on), "differ"),
        ((pause_with(global_state), go_on), "differ"),
        (
            (
                pause_with(lambda w, coin, dice: (w.half(), coin.get_state(), dice.getstate())),
                go_on,
            ),
            "3 of 3 elements differ, by up to",
        ),
        ((pause_with(lambda w, coin, dice: lambda: w), go_on), "expected a result, got"),
        ((pause_with(lambda *all: (all[0].tolist(), *all[1:])), lambda s, n: s[0]), "got list"),
    ],
)
def test_wrong_resume(capsys, answer, words):
    out = verdict(capsys, "environment.resume", answer)
    assert out.startswith("✗ case ") and words in out


def test_walking_the_first_part_again_is_an_error():
    walked = EXERCISES["resume"].through((lambda seed, stop: (seed, stop), from_the_start))
    with pytest.raises(RuntimeError, match="resume took 7 steps, expected 3"):
        walked(seed=0, stop=4, steps=3)


@pytest.mark.parametrize(
    "answer",
    [
        (pause_with(lambda w, coin, dice: [w, coin.get_state(), dice.getstate()]), go_on),
        (
            pause_with(lambda w, coin, dice: {"w": w.numpy(), "c": coin.get_state(), "d": dice}),
            lambda s, n: walk(
                torch.from_numpy(s["w"]), torch.Generator().set_state(s["c"]), s["d"], n
            ),
        ),
    ],
)
def test_right_resume(capsys, answer):
    assert verdict(capsys, "environment.resume", answer) == "✓ correct on 5 cases\n"


# ---- stubs


@pytest.mark.parametrize("name", ["cuda_of", "wheel", "reseed"])
def test_a_stub_is_not_answered_yet(capsys, name):
    assert "not answered yet" in verdict(capsys, f"environment.{name}", lambda *_: ...)


@pytest.mark.parametrize("paused", [lambda *_: ..., pause_with(lambda w, coin, dice: w)])
def test_stubs_of_pause_and_resume(capsys, paused):
    assert "not answered yet" in verdict(
        capsys, "environment.resume", (paused, lambda saved, steps: ...)
    )
