"""Chapter 18: where batching pays: a model of many small layers, one after another.

The rules are those of `benchmarks/serving.py`. Here each of the 1,000 layers is so small that a
call takes nearly the same time for one image as for 32: most of it goes into starting operations.
Networks that work through a sequence step by step spend their time in the same way.
"""

import serving
import torch

from helpers.page import records

SIZES = (784, *[64] * 1000, 10)
SERVERS = ("bare", "own")
RATES = (20, 30, 40, 50, 75, 100, 125, 150, 175, 200, 225, 250, 300, 350, 400, 450, 500, 600)
LOWER = (15, 10)


def measure(device: torch.device) -> records.Record:
    """Measure both servers. On a CPU, as `benchmarks/serving.py` does."""
    return serving.compare("batching", device, SIZES, SERVERS, RATES, LOWER)
