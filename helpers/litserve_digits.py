"""Chapter 18: the same model on LitServe, a maintained server that collects batches."""

import gc
import os
import sys

import litserve as ls
import torch
from fastapi import HTTPException
from pydantic import ValidationError
from torch import Tensor

from helpers.serving import Image, load_model, problems


class LitDigits(ls.LitAPI):
    """What LitServe asks of a model: how to load it, and five steps from request to answer."""

    def setup(self, device: str) -> None:
        """Load the model; LitServe calls this once in each worker process."""
        torch.set_num_threads(1)
        self.model = load_model(os.environ["DIGITS_MODEL"])
        gc.collect()
        gc.freeze()

    def decode_request(self, request: dict) -> Tensor:
        """Check one request; LitServe looks for an argument of this name, `request`."""
        try:
            return torch.tensor(Image.model_validate(request).pixels)
        except ValidationError as error:
            raise HTTPException(status_code=422, detail=problems(error.errors())) from None

    def batch(self, inputs: list[Tensor]) -> Tensor:
        """Join the samples of a batch."""
        return torch.stack(inputs)

    def predict(self, x: Tensor) -> Tensor:
        """Call the model once for the batch."""
        with torch.inference_mode():
            return self.model(x)

    def unbatch(self, output: Tensor) -> list[Tensor]:
        """Take the batch apart again."""
        return list(output)

    def encode_response(self, output: Tensor) -> dict:
        """Say one answer as JSON."""
        return {"digit": int(output.argmax()), "probabilities": output.tolist()}


def main(port: int, max_batch: int = 32, max_wait: float = 0.002) -> None:
    """Serve the file that DIGITS_MODEL names."""
    api = LitDigits(max_batch_size=max_batch, batch_timeout=max_wait)
    server = ls.LitServer(api, accelerator="cpu", timeout=10)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]))
