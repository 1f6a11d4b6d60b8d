"""Answers to the exercises of chapter 18, right and wrong."""

from typing import Annotated

import pytest
import torch
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helpers.exercises.harness import WrongAnswer, find
from helpers.exercises.serving import Images
from helpers.serving import Pixel, Row, problems


def question(strict=True, extra="forbid", shortest=1, longest=500, least=1, most=10, default=1):
    class Question(BaseModel):
        model_config = ConfigDict(strict=strict, extra=extra)
        text: Annotated[str, Field(min_length=shortest, max_length=longest)]
        top: Annotated[int, Field(ge=least, le=most)] = default

    return Question


class Required(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=500)]
    top: Annotated[int, Field(ge=1, le=10)]


class Optional(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=500)]
    top: Annotated[int, Field(ge=1, le=10)] | None = 1


def halves(upper=False):
    def by_halves(model, samples):
        try:
            return model(samples)
        except ValueError:
            if len(samples) == 1:
                return [None]
        middle = (len(samples) + upper) // 2
        return by_halves(model, samples[:middle]) + by_halves(model, samples[middle:])

    return by_halves


def one_by_one(model, samples):
    try:
        return model(samples)
    except ValueError:
        if len(samples) == 1:
            return [None]
    return [one_by_one(model, [sample])[0] for sample in samples]


def all_or_nothing(model, samples):
    try:
        return model(samples)
    except ValueError:
        return [None] * len(samples)


def without_the_bad(model, samples):
    return [row for row in halves()(model, samples) if row is not None]


def never_at_once(model, samples):
    if len(samples) > 1:
        middle = len(samples) // 2
        left, right = samples[:middle], samples[middle:]
        return never_at_once(model, left) + never_at_once(model, right)
    return halves()(model, samples)


def with_empty_halves(model, samples):
    try:
        return model(samples)
    except ValueError:
        middle = len(samples) // 2
        left = with_empty_halves(model, samples[:middle])
        return left + with_empty_halves(model, samples[middle:])


def queue(running=1, partial=False, negative=False, up=False):
    def largest_queue(max_batch, batch_ms, timeout_ms):
        calls = -(-timeout_ms // batch_ms) if up else timeout_ms // batch_ms
        if partial:
            return max(int(max_batch * (timeout_ms / batch_ms - running)), 0)
        free = calls - running
        return (free if negative else max(free, 0)) * max_batch

    return largest_queue


def reading(
    strict=True, extra="forbid", least=1, most=16, rows=28, row=Row, explained=True, one_call=True
):
    """Return an answer; each option makes one of the mistakes."""

    class Images(BaseModel):
        model_config = ConfigDict(strict=strict, extra=extra)
        images: Annotated[
            list[Annotated[list[row], Field(min_length=rows, max_length=28)]],
            Field(min_length=least, max_length=most),
        ]

    def app_for(model):
        app = FastAPI()

        @app.post("/predict")
        async def predict(request: Images):
            pixels = torch.tensor(request.images)
            if one_call:
                return {"digits": model(pixels).argmax(1).tolist()}
            return {"digits": [int(model(each[None]).argmax()) for each in pixels]}

        if explained:

            @app.exception_handler(RequestValidationError)
            async def explain(request, error):
                return JSONResponse({"detail": problems(error.errors())}, 422)

        return app

    return app_for


def with_the_reader_s_words(model):
    """Right as well: a body that is no pydantic type, and an error of one's own."""
    app = FastAPI()

    @app.post("/predict")
    def predict(body: dict):
        try:
            images = Images.model_validate(body).images
        except ValidationError:
            raise HTTPException(422, "no images") from None
        return {"digits": model(torch.tensor(images)).argmax(1).tolist()}

    return app


def unchecked(model):
    app = FastAPI()

    @app.post("/predict")
    def predict(body: dict):
        return {"digits": model(torch.tensor(body["images"])).argmax(1).tolist()}

    return app


def in_double(model):
    app = reading()(lambda pixels: model(pixels.double()))
    return app


def bare_list(model):
    app = FastAPI()

    @app.post("/predict")
    def predict(request: Images):
        return model(torch.tensor(request.images)).argmax(1).tolist()

    return app


def at_another_path(model):
    app = FastAPI()

    @app.post("/read")
    def predict(request: Images):
        return {"digits": model(torch.tensor(request.images)).argmax(1).tolist()}

    return app


def no_app(model):
    return {"digits": [0]}


NumberOfAnySize = Annotated[list[float], Field(min_length=28, max_length=28)]
RowOfAnyLength = list[Pixel]


RIGHT = {
    "question": [question()],
    "app_for": [reading(), with_the_reader_s_words],
    "by_halves": [halves(), halves(upper=True)],
    "largest_queue": [queue()],
}

WRONG = {
    "question": [
        question(strict=False),
        question(extra="ignore"),
        question(shortest=0),
        question(longest=501),
        question(least=0),
        question(most=11),
        question(default=2),
        Required,
        Optional,
    ],
    "by_halves": [
        one_by_one,
        all_or_nothing,
        without_the_bad,
        never_at_once,
        with_empty_halves,
        lambda model, samples: model(samples),
    ],
    "largest_queue": [
        queue(running=0),
        queue(running=2),
        queue(partial=True),
        queue(negative=True),
        queue(up=True),
        lambda max_batch, batch_ms, timeout_ms: max(timeout_ms // batch_ms - 1, 0),
        lambda max_batch, batch_ms, timeout_ms: (
            max((timeout_ms - 1) // batch_ms - 1, 0) * max_batch
        ),
    ],
    "app_for": [
        reading(strict=False),
        reading(extra="ignore"),
        reading(least=0),
        reading(most=17),
        reading(most=15),
        reading(rows=1),
        reading(row=NumberOfAnySize),
        reading(row=RowOfAnyLength),
        reading(explained=False),
        reading(one_call=False),
        unchecked,
        in_double,
        bare_list,
        at_another_path,
        no_app,
    ],
}


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (with_empty_halves, WrongAnswer, "the model was called with an empty batch"),
        (one_by_one, WrongAnswer, "expected at most 11 calls of the model, got 33"),
        (lambda model, samples: model(samples), ValueError, "a bad sample"),
    ],
)
def test_what_is_wrong_with_the_halves(answer, error, words):
    with pytest.raises(error, match=words):
        find("serving.by_halves").through(answer)([None, *range(31)])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reading(one_call=False), "expected one call of the model, got 5"),
        (in_double, "expected pixels of float32 for the model, got torch.float64"),
        (no_app, "expected a FastAPI app, got dict"),
    ],
)
def test_what_is_wrong_with_an_app(answer, words):
    with pytest.raises(WrongAnswer, match=words):
        find("serving.app_for").through(answer)("5 images")


def test_the_default_message_fails_at_a_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        find("serving.app_for").through(reading(explained=False))("a NaN")
