"""Chapter 18, exercises: a type, an app, the longest queue, bad samples."""

import json
import math
import random
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.testclient import TestClient
from torch import Tensor

from helpers.exercises.harness import Exercise, WrongAnswer
from helpers.serving import SIDE, Row, problems

# ---- 1: a type for a request


class Question(BaseModel):
    """A text and the number of answers that are wanted."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=500)]
    top: Annotated[int, Field(ge=1, le=10)] = 1


def _checked_by(answer: type[BaseModel]) -> Callable[[dict], Any]:
    """Turn a type into a function of a body: what the type makes of it, or that it is refused."""

    def check_body(body: dict) -> Any:
        if not (isinstance(answer, type) and issubclass(answer, BaseModel)):
            return answer(body)  # a function says so itself, or fails in the reader's words
        if not answer.model_fields:
            return ...  # not answered yet
        try:
            return answer.model_validate(body).model_dump()
        except ValidationError:
            return "refused"

    return check_body


def _bodies() -> list[tuple[dict]]:
    good = [{"text": "a"}, {"text": "x" * 500, "top": 10}, {"text": "很好", "top": 1}]
    texts = ["", "x" * 501, 5, None, ["a"]]
    tops = [0, 11, -1, "3", True, 2.0, None]
    bad = [{"text": text} for text in texts] + [{"text": "a", "top": top} for top in tops]
    bad += [{}, {"top": 3}, {"text": "a", "tops": 3}, {"text": "a", "top": 3, "lang": "en"}]
    return [(body,) for body in good + bad]


# ---- 2: several images in one request


OneImage = Annotated[list[Row], Field(min_length=SIDE, max_length=SIDE)]


class Images(BaseModel):
    """Images that one client sends together."""

    model_config = ConfigDict(strict=True, extra="forbid")
    images: Annotated[list[OneImage], Field(min_length=1, max_length=16)]


def app_for(model: Callable[[Tensor], Tensor]) -> FastAPI:
    """Return an app that reads several images by one call of `model`."""
    app = FastAPI()

    @app.post("/predict")
    def predict(request: Images) -> dict[str, list[int]]:
        with torch.inference_mode():
            rows = model(torch.tensor(request.images))
        return {"digits": rows.argmax(1).tolist()}

    @app.exception_handler(RequestValidationError)
    async def explain(request: Any, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": problems(error.errors())}, 422)

    return app


def _image(digit: float) -> list[list[float]]:
    return [[digit] * SIDE for _ in range(SIDE)]


def _body(kind: str) -> Any:
    """A body that an app must accept or refuse; the stand-in's digit is the value of a pixel."""
    if kind.endswith(" images"):
        return {"images": [_image(number * 3 % 10) for number in range(int(kind.split()[0]))]}
    good = _image(7)
    wrong = {
        "one image": [good],
        "an image of 27 rows": [good[1:]],
        "a row of 27 pixels": [[good[0][1:], *good[1:]]],
        "a pixel of 256": [_image(256)],
        "a pixel of -1": [_image(-1)],
        "a NaN": [good, [[math.nan] * SIDE, *good[1:]]],
        "a string as pixel": [[["7"] * SIDE, *good[1:]]],
        "one image without a list around it": good,
    }
    if kind in wrong:
        return {"images": wrong[kind]}
    if kind == "a field too many":
        return {"images": [good], "top": 3}
    return {"pixels": good}  # of the chapter's other servers


def _client_of(answer: Callable) -> Callable[[str], Any]:
    """Send a body to the app of an answer, with a model that writes down how it is called."""

    def on(kind: str) -> Any:
        shapes = []

        def model(pixels: Tensor) -> Tensor:
            if pixels.dtype != torch.float32:
                raise WrongAnswer(f"expected pixels of float32 for the model, got {pixels.dtype}")
            shapes.append(tuple(pixels.shape))
            return F.one_hot(pixels[:, 0, 0].long(), 10).float()

        app = answer(model)
        if app is ...:
            return app
        if not isinstance(app, FastAPI):
            raise WrongAnswer(f"expected a FastAPI app, got {type(app).__name__}")
        body = _body(kind)
        headers = {"Content-Type": "application/json"}
        reply = TestClient(app).post("/predict", content=json.dumps(body), headers=headers)
        if reply.status_code != 200:
            return reply.status_code
        if len(shapes) > 1:
            raise WrongAnswer(f"expected one call of the model, got {len(shapes)}")
        return reply.json()

    return on


def _kinds() -> list[tuple[str]]:
    good = ["one image", "2 images", "5 images", "16 images"]
    bad = ["0 images", "17 images", "an image of 27 rows", "a row of 27 pixels", "a pixel of 256"]
    bad += ["a pixel of -1", "a NaN", "a string as pixel", "one image without a list around it"]
    bad += ["a field too many", "the field pixels"]
    return [(kind,) for kind in good + bad]


# ---- 3: how long the queue may be


def largest_queue(max_batch: int, batch_ms: int, timeout_ms: int) -> int:
    """Count the places of the batches that end in time, without the one that runs already."""
    return max(timeout_ms // batch_ms - 1, 0) * max_batch


def _limits() -> list[tuple[int, int, int]]:
    fixed = [
        (32, 100, 1000),
        (32, 100, 1050),  # half a batch more does not help
        (1, 10, 25),
        (8, 50, 100),  # exactly in time
        (8, 50, 99),
        (8, 50, 20),  # not even the batch that runs ends in time
        (4, 300, 300),
    ]
    drawn = []
    for _ in range(6):
        drawn.append((random.randint(1, 64), random.randint(1, 90), random.randint(1, 3000)))
    return fixed + drawn


# ---- 4: a batch with bad samples, in halves


def by_halves(model: Callable[[list], list], samples: list) -> list:
    """Return the answers of `model`, and None for each sample for which it raises alone."""
    try:
        return model(samples)
    except ValueError:
        if len(samples) == 1:
            return [None]
    half = len(samples) // 2
    return by_halves(model, samples[:half]) + by_halves(model, samples[half:])


def _counted(answer: Callable) -> Callable[[list[int | None]], Any]:
    """Call an answer with a model that counts its calls: too many of them are a wrong answer."""

    def on(samples: list[int | None]) -> Any:
        calls = 0

        def model(batch: list[int | None]) -> list[int]:
            nonlocal calls
            if not batch:
                raise WrongAnswer("the model was called with an empty batch")
            calls += 1
            if None in batch:
                raise ValueError("a bad sample")
            return [10 * sample for sample in batch]

        found = answer(model, samples)
        # halving ends after log2(n) levels, and on each a bad sample spoils one of two halves
        levels = math.ceil(math.log2(len(samples)))
        most = 1 + 2 * levels * samples.count(None)
        if found is not ... and calls > most:
            raise WrongAnswer(f"expected at most {most} calls of the model, got {calls}")
        return found

    return on


def _batches() -> list[tuple[list[int | None]]]:
    found = [[1, 2, 3], [7], [None], [1, None], [None, None, None], [None, *range(31)]]
    found += [[*range(16), None, *range(15)], [*range(9), None]]
    for _ in range(4):
        count = random.randint(5, 40)
        bad = set(random.sample(range(count), random.randint(1, 2)))
        found.append([None if at in bad else at for at in range(count)])
    return [(batch,) for batch in found]


EXERCISES = {
    "question": Exercise(reference=Question, cases=_bodies, through=_checked_by),
    "app_for": Exercise(reference=app_for, cases=_kinds, through=_client_of),
    "largest_queue": Exercise(reference=largest_queue, cases=_limits),
    "by_halves": Exercise(reference=by_halves, cases=_batches, through=_counted),
}
