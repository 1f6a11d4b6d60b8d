"""Chapter 18: the same model on Ray Serve, whose copies may run on many machines."""

import os
import sys
import time
from typing import Any

import torch
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from helpers.serving import Image, load_model, problems


def build(path: str, *, copies: int = 1, max_batch: int = 32, max_wait: float = 0.002) -> Any:
    """Return the application: `copies` processes, each with the model, each with a batcher."""
    from ray import serve  # not in requirements.txt: 70 MB that only this section needs

    @serve.deployment(num_replicas=copies, max_ongoing_requests=256)
    class Digits:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.model = load_model(path)

        @serve.batch(max_batch_size=max_batch, batch_wait_timeout_s=max_wait)
        async def read(self, samples: list) -> list:
            with torch.inference_mode():
                return list(self.model(torch.stack(samples)))

        async def __call__(self, request: Request) -> Response | dict:
            if request.url.path == "/ready":
                return {"ready": True}
            try:
                image = Image.model_validate_json(await request.body())
            except ValidationError as error:
                return JSONResponse({"detail": problems(error.errors())}, 422)
            row = await self.read(torch.tensor(image.pixels))
            return {"digit": int(row.argmax()), "probabilities": row.tolist()}

    return Digits.bind()


def main(port: int, path: str) -> None:
    """Start Ray on this machine and serve until the process is stopped."""
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(path))
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), os.environ["DIGITS_MODEL"])
