"""Ray Serve, really started where it is installed: the model's answers and a bad request."""

import importlib.util
import sys

import pytest
import torch

from helpers import serving, serving_load
from helpers.server_process import free_port, running
from tests.test_litserve_digits import post


@pytest.mark.slow
def test_ray_serves_the_model(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'ray[serve]'")
    torch.manual_seed(0)
    model = serving.DigitReader(784, 32, 10, mean=0.13, std=0.31).eval()
    serving.save_model(model, tmp_path / "v1.safetensors")
    images = torch.randint(256, (16, 28, 28))
    with torch.inference_mode():
        right = model(images.float()).argmax(1).tolist()
    port = free_port()
    command = [sys.executable, "-m", "helpers.ray_digits", str(port)]
    environment = {"DIGITS_MODEL": str(tmp_path / "v1.safetensors"), "OMP_NUM_THREADS": "1"}
    with running(command, port=port, environment=environment) as server:
        replies = serving_load.load_test(
            f"{server.url}/predict", images.tolist(), rate=50, seconds=2
        )
        bad = post(f"{server.url}/predict", {"pixels": [[0]]})
    assert [(r.status, r.digit) for r in replies] == [(200, right[r.image]) for r in replies]
    assert bad[0] == 422 and "List should have at least 28" in bad[1]["detail"]


def test_without_ray_the_module_still_imports():
    from helpers import ray_digits

    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ModuleNotFoundError, match="ray"):
            ray_digits.build("model.safetensors")
