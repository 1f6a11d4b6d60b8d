"""Chapter 19: what surrounds a model in use: its fingerprint, and a watch for drift."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of a file: two files with the same one hold the same bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# ---- drift


@dataclass(frozen=True)
class Drift:
    """distance: the largest gap between two cumulative distributions, 0..1. limit: see `drift`."""

    distance: float
    limit: float

    @property
    def alarm(self) -> bool:
        """Whether chance alone hardly explains the distance."""
        return self.distance > self.limit


def ks_distance(first: Tensor, second: Tensor) -> float:
    """Return the largest gap between the cumulative distributions of two samples, each [N].

    The statistic of the Kolmogorov–Smirnov test: 0 for equal samples, 1 where all values of one lie
    below all of the other.
    """
    if len(first) == 0 or len(second) == 0:
        raise ValueError(f"expected two samples, got {len(first)} and {len(second)} values")
    values = torch.cat([first, second]).double().unique()
    below_first = torch.searchsorted(first.double().sort().values, values, right=True)
    below_second = torch.searchsorted(second.double().sort().values, values, right=True)
    gaps = below_first / len(first) - below_second / len(second)
    return gaps.abs().max().item()


def drift(reference: Tensor, window: Tensor, *, false_alarm: float = 0.001) -> Drift:
    """Compare a window of values with the reference: has the distribution changed?

    Without a change the distance exceeds the limit with the probability `false_alarm`, by the
    approximation of Smirnov for large samples.
    """
    if not 0 < false_alarm < 1:
        raise ValueError(f"expected a probability in 0..1, got {false_alarm}")
    n, m = len(reference), len(window)
    distance = ks_distance(reference, window)
    factor = (-torch.tensor(false_alarm / 2, dtype=torch.float64).log() / 2).sqrt().item()
    return Drift(distance, factor * ((n + m) / (n * m)) ** 0.5)
