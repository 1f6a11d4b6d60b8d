"""Fingerprints, distances as SciPy computes them, alarms as rare as promised."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from helpers import operations


def test_a_fingerprint_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    assert operations.fingerprint(path) == hashlib.sha256(b"weights").hexdigest()
    path.write_bytes(b"weightz")
    assert operations.fingerprint(path) != hashlib.sha256(b"weights").hexdigest()


# ---- drift


@pytest.mark.parametrize("seed", range(5))
def test_the_distance_is_scipy_s(seed):
    generator = np.random.default_rng(seed)
    a, b = generator.normal(size=57 + seed), generator.normal(0.3, 1.2, size=80)
    if seed > 2:
        a, b = a.round(1), b.round(1)  # with ties, within and between
    want = stats.ks_2samp(a, b).statistic
    got = operations.ks_distance(torch.tensor(a), torch.tensor(b))
    assert got == pytest.approx(want, abs=1e-6)


def test_the_ends_of_the_scale():
    one = torch.tensor([3.0, 1.0, 2.0])
    assert operations.ks_distance(one, one.flip(0)) == 0
    assert operations.ks_distance(one, one + 5) == 1
    assert operations.ks_distance(one, one - 5) == 1


def test_integers_and_small_differences_count():
    large = torch.tensor([2**24, 2**24 + 1])  # equal in float32
    assert operations.ks_distance(large, large + 1) == 0.5


def test_no_samples():
    with pytest.raises(ValueError, match="expected two samples, got 0 and 3"):
        operations.ks_distance(torch.tensor([]), torch.ones(3))


@pytest.mark.parametrize("probability", [0, 1, -0.1, 2])
def test_a_false_alarm_has_a_probability(probability):
    with pytest.raises(ValueError, match=r"expected a probability in 0\.\.1"):
        operations.drift(torch.ones(3), torch.ones(3), false_alarm=probability)


def test_the_limit_is_that_of_the_table():
    """c(0.05) = 1.358 and c(0.001) = 1.949, times sqrt((n + m) / (n m))."""
    values = torch.arange(200.0)
    for alpha, c in ((0.05, 1.358), (0.001, 1.949)):
        found = operations.drift(values[:50], values, false_alarm=alpha)
        assert found.limit == pytest.approx(c * (250 / (50 * 200)) ** 0.5, rel=1e-3)


def test_alarms_are_as_rare_as_promised():
    torch.manual_seed(0)
    alarms = sum(
        operations.drift(torch.randn(300), torch.randn(200), false_alarm=0.05).alarm
        for _ in range(400)
    )
    # expected 20, standard deviation 4.4; the approximation is on the careful side
    assert 4 <= alarms <= 34


def test_a_change_is_noticed():
    torch.manual_seed(0)
    assert operations.drift(torch.randn(300), torch.randn(300) + 1).alarm
    assert not operations.drift(torch.randn(300), torch.randn(300)).alarm


def test_the_alarm_is_above_the_limit():
    assert operations.Drift(0.5, 0.4).alarm
    assert not operations.Drift(0.4, 0.4).alarm
