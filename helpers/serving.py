"""Chapter 18: a model behind HTTP: checks, limits, batches, versions, metrics, graceful stop."""

import argparse
import asyncio
import gc
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
import torch.nn.functional as F
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor, nn

from helpers.batching import Batcher, Closed, QueueFull
from helpers.models import MLP

SIDE = 28
RETRY = {"Retry-After": "1"}  # seconds
GONE = 499  # not in HTTP, nobody receives it: how nginx's log marks a client that hung up
SHOWN_PROBLEMS = 3  # an image has 784 pixels: the reader of a message needs the first few
SHOWN_NAME = 30  # characters of a field's name, which a client may have made as long as it likes


# ---- the model, with its preprocessing, in one file


class DigitReader(nn.Module):
    """Pixels float32 [N, 28, 28] in 0..255 -> probabilities [N, 10].

    The normalization is part of the model: what a client sends are pixels, and no two programs
    have to agree about a mean.
    """

    def __init__(self, *sizes: int, mean: float | Tensor, std: float | Tensor):
        super().__init__()
        self.sizes = sizes
        self.register_buffer("mean", torch.as_tensor(mean))
        self.register_buffer("std", torch.as_tensor(std))
        self.layers = MLP(*sizes)

    def logits(self, pixels: Tensor) -> Tensor:
        """Pixels as in `forward` -> logits [N, 10], for training."""
        x = (pixels / 255 - self.mean) / self.std
        return self.layers(x.flatten(1))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.logits(pixels).softmax(1)


def save_model(model: DigitReader, path: str | Path) -> None:
    """Write weights, mean and std as numbers, the sizes as text: safetensors holds no code."""
    save_file(model.state_dict(), path, metadata={"sizes": json.dumps(model.sizes)})


def load_model(path: str | Path) -> DigitReader:
    """Return the model of `save_model`, in evaluation mode. ValueError for another kind of file."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if metadata is None or "sizes" not in metadata:
        raise ValueError(f"{path} was not written by save_model: no sizes in its metadata")

    sizes = json.loads(metadata["sizes"])
    model = DigitReader(*sizes, mean=0.0, std=1.0)  # the file holds the true ones
    model.load_state_dict(load_file(path))
    return model.eval()


def train_reader(
    images: Tensor, labels: Tensor, *, sizes: tuple[int, ...], epochs: int, seed: int = 0
) -> DigitReader:
    """Train on images uint8 [N, 1, 28, 28] and labels int64 [N]; return it in evaluation mode."""
    torch.manual_seed(seed)
    pixels = images[:, 0].float()
    scaled = pixels / 255
    model = DigitReader(*sizes, mean=scaled.mean().item(), std=scaled.std().item())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(pixels)).split(100):
            loss = F.cross_entropy(model.logits(pixels[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


# ---- what a request may be

Pixel = Annotated[float, Field(ge=0, le=255, allow_inf_nan=False)]
Row = Annotated[list[Pixel], Field(min_length=SIDE, max_length=SIDE)]


class Image(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")  # "12" is no number, and no typos
    pixels: Annotated[list[Row], Field(min_length=SIDE, max_length=SIDE)]


class Answer(BaseModel):
    """The body of an answer."""

    digit: int
    probability: float
    probabilities: list[float]
    version: str


class Canary(BaseModel):
    """Which version gets which share of the clients."""

    model_config = ConfigDict(strict=True, extra="forbid")
    current: str
    canary: str | None = None
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0


def problems(errors: list[dict[str, Any]]) -> str:
    """Say in one line what is wrong with a request, and where; none of its values is repeated.

    errors: as pydantic lists them. The default answer of FastAPI repeats each wrong input, up to
    784 of them, and with a NaN among them the answer itself cannot be written as JSON.
    """
    lines = []
    for error in errors[:SHOWN_PROBLEMS]:
        place = ""
        for part in error["loc"]:
            place += f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN_NAME]}"
        lines.append(f"{place.removeprefix('.')}: {error['msg']}")
    if len(errors) > SHOWN_PROBLEMS:
        lines.append(f"and {len(errors) - SHOWN_PROBLEMS} more")
    return "; ".join(lines)


# ---- settings, versions, metrics


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every limit of the server. Times in seconds, `max_body` in bytes."""

    max_batch: int = 32
    max_wait: float = 0.002
    max_queue: int = 256
    timeout: float = 2.0  # for an answer
    read_timeout: float = 10.0  # for the body of a request
    max_body: int = 65536  # 784 numbers of 17 digits are 16 kB
    drain: float = 0.5  # between the signal to stop and the last new request
    freeze: bool = True  # take what was loaded out of the garbage collector's sight
    admin_token: str | None = None  # without one there are no admin routes


@dataclass
class Routing:
    """Which version answers whom."""

    current: str
    canary: str | None = None
    share: float = 0.0

    def choose(self, client: str) -> str:
        """Return the version for a client: the same client always gets the same one."""
        if self.canary is not None and crc32(client.encode()) % 10_000 < self.share * 10_000:
            return self.canary
        return self.current


class Metrics:
    """What Prometheus reads at /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        known = {"registry": self.registry}
        self.requests = Counter(
            "serving_requests", "Requests, by version and status", ["version", "status"], **known
        )
        self.latency = Histogram(
            "serving_latency_seconds",
            "From the checked request to its answer; answers with status 200 only",
            ["version"],
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
            **known,
        )
        self.batch = Histogram(
            "serving_batch_size",
            "Samples in one call of the model",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            **known,
        )
        self.waiting = Gauge("serving_queue_length", "Samples that wait", ["version"], **known)


# ---- the gate: what is checked before anything is parsed


class Gate:
    """ASGI middleware: the type and size of a body, the time it takes, and those who leave.

    A body is read here, up to `max_body` bytes, so that a large one is refused before it is in
    memory and whatever length its headers claim. While the app works on it, the connection is
    watched: nothing else would tell the app that the client has hung up.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, state: Any):
        self.app, self.settings, self.state = app, settings, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        begun = asyncio.Event()

        async def send_and_leave(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.set()
                if self.state.draining:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self.app(scope, receive, send_and_leave)

        body = await self._read(Headers(scope=scope), receive)
        if isinstance(body, JSONResponse):
            await body(scope, receive, send_and_leave)
        elif body is not None:  # else the client has gone
            work = self.app(scope, replay(body, receive), send_and_leave)
            await unless_gone(asyncio.ensure_future(work), receive, begun)
        return None

    async def _read(self, headers: Headers, receive: Receive) -> bytes | JSONResponse | None:
        kind = headers.get("content-type", "nothing")
        if kind.split(";")[0].strip().lower() != "application/json":
            return refuse(415, f"Content-Type: expected application/json, got {kind[:100]}")
        limit = self.settings.max_body
        too_large = f"body: expected at most {limit} bytes"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            return refuse(413, f"{too_large}, got {length}")
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.read_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > limit:
                        return refuse(413, f"{too_large}, got more")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self.settings.read_timeout
            return refuse(408, f"body: not complete after {seconds:g} s")


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that brings a body which has been read already, then what comes later."""
    unread = [body]

    async def again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return again


async def unless_gone(work: asyncio.Future, receive: Receive, begun: asyncio.Event) -> None:
    """Wait for `work`, but cancel it if the client hangs up before its answer has `begun`.

    receive: after the body, it brings only the end: of the connection or of the answer.
    """
    end = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
        if work.done() or begun.is_set():
            await work  # and raise what it raised
    finally:
        end.cancel()
        work.cancel()  # does nothing to what is done
        await asyncio.wait((work, end))


def refuse(status: int, detail: str) -> JSONResponse:
    """Return an answer that says what was wrong and closes a connection whose body is unread."""
    return JSONResponse({"detail": detail}, status, headers={"connection": "close"})


# ---- the app


def create_app(models: Mapping[str, nn.Module], settings: Settings | None = None) -> FastAPI:
    """Return the server: every model under its name, the first one for all clients."""
    if not models:
        raise ValueError("expected at least one model to serve, got none")
    limits = Settings() if settings is None else settings
    metrics = Metrics()
    batchers: dict[str, Batcher] = {}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for name, model in models.items():
            model.eval()
            with torch.inference_mode():
                for size in (1, limits.max_batch):  # the first calls allocate and choose kernels
                    model(torch.zeros(size, SIDE, SIDE))
            batchers[name] = Batcher(
                model,
                max_batch=limits.max_batch,
                max_wait=limits.max_wait,
                max_queue=limits.max_queue,
                on_batch=metrics.batch.observe,
            )
            metrics.waiting.labels(name).set_function(batchers[name].__len__)
            await batchers[name].start()
        if limits.freeze:
            gc.collect()
            gc.freeze()
        app.state.ready = True
        yield
        app.state.ready = False
        for batcher in batchers.values():
            await batcher.stop()
        accepted = sum(b.accepted for b in batchers.values())
        answered = sum(b.answered for b in batchers.values())
        print(f"stopped: accepted {accepted}, answered {answered}", flush=True)

    app = FastAPI(title="Handwritten digits", version="1", lifespan=lifespan)
    app.state.ready = app.state.draining = False
    app.state.routing = Routing(next(iter(models)))
    app.add_middleware(Gate, settings=limits, state=app.state)
    app.add_exception_handler(RequestValidationError, _unprocessable)
    _add_predict(app, batchers, metrics, limits)
    _add_watch(app, metrics, models)
    if limits.admin_token is not None:
        _add_admin(app, models, limits.admin_token)
    return app


async def _unprocessable(request: Request, error: RequestValidationError) -> JSONResponse:
    return JSONResponse({"detail": problems(error.errors())}, 422)


ERRORS = {
    status: {"description": text}
    for status, text in {
        400: "The body is no JSON",
        404: "No such version",
        408: "The body did not arrive in time",
        413: "The body is too large",
        415: "The body is of another type",
        422: "The body is no image of 28 × 28 numbers",
        429: "Too many requests are waiting",
        503: "The server is stopping",
        504: "No answer in time",
    }.items()
}


def _add_predict(
    app: FastAPI, batchers: dict[str, Batcher], metrics: Metrics, limits: Settings
) -> None:
    @app.post("/predict", responses=ERRORS)
    async def predict(
        image: Image,
        version: Annotated[str | None, Query(max_length=100)] = None,
        x_client: Annotated[str | None, Header(max_length=100)] = None,
    ) -> Answer:
        """Read one digit."""
        if version is None:
            client = secrets.token_hex(8) if x_client is None else x_client
            version = app.state.routing.choose(client)
        if version not in batchers:
            raise HTTPException(
                status_code=404,
                detail=f"version: expected one of {list(batchers)}, got {version!r}",
            )
        start = time.perf_counter()
        status = 500
        try:
            row = await _row_or_status(batchers[version], torch.tensor(image.pixels), limits)
            status = 200
            # only of answers: a refusal takes no time, and many would make p99 look better
            metrics.latency.labels(version).observe(time.perf_counter() - start)
        except HTTPException as error:
            status = error.status_code
            raise
        except asyncio.CancelledError:
            status = GONE
            raise
        finally:
            metrics.requests.labels(version, status).inc()
        best = int(row.argmax())
        chances = row.tolist()
        return Answer(digit=best, probability=chances[best], probabilities=chances, version=version)


async def _row_or_status(batcher: Batcher, sample: Tensor, limits: Settings) -> Tensor:
    """Return the model's row, or the HTTP error that says why there is none."""
    try:
        async with asyncio.timeout(limits.timeout):
            row = await batcher.predict(sample)
    except QueueFull as error:
        raise HTTPException(status_code=429, detail=f"{error}; try again", headers=RETRY) from None
    except Closed:
        raise HTTPException(
            status_code=503, detail="the server is stopping", headers=RETRY
        ) from None
    except TimeoutError:
        raise HTTPException(
            status_code=504, detail=f"no answer within {limits.timeout:g} s"
        ) from None
    if not row.isfinite().all():  # an error is better than a wrong answer
        raise HTTPException(
            status_code=500, detail="the model returned a number that is not finite"
        )
    return row


def _add_watch(app: FastAPI, metrics: Metrics, models: Mapping[str, nn.Module]) -> None:
    """Add what people and machines look at: page, health, readiness, metrics, versions."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return drawing_page()

    @app.get("/live", response_class=PlainTextResponse)
    async def live() -> str:
        """Does the process still answer?"""
        return "alive"

    @app.get("/ready", response_class=PlainTextResponse, responses={503: {"description": "No"}})
    async def ready() -> str:
        """Should new requests be sent here?"""
        if not app.state.ready or app.state.draining:
            raise HTTPException(
                status_code=503, detail="not ready: the server is starting or stopping"
            )
        return "ready"

    @app.get("/metrics", response_class=PlainTextResponse)
    async def scrape() -> str:
        """What Prometheus collects."""
        return generate_latest(metrics.registry).decode()

    @app.get("/versions")
    async def versions() -> dict[str, Any]:
        """Say what is loaded, and who gets it."""
        return {"loaded": list(models), **vars(app.state.routing)}


def _add_admin(app: FastAPI, models: Mapping[str, nn.Module], token: str) -> None:
    def authorized(authorization: Annotated[str, Header(max_length=200)] = "") -> None:
        if not secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(status_code=401, detail="Authorization: expected the admin's token")

    @app.put("/admin/versions", dependencies=[Depends(authorized)])
    async def route(wanted: Canary) -> dict[str, Any]:
        """Choose the current version and the canary; takes effect with the next request."""
        for name in (wanted.current, wanted.canary):
            if name is not None and name not in models:
                raise HTTPException(
                    status_code=404, detail=f"version: expected one of {list(models)}, got {name!r}"
                )
        app.state.routing = Routing(wanted.current, wanted.canary, wanted.share)
        return {"loaded": list(models), **vars(app.state.routing)}


def drawing_page() -> str:
    """Return the page to draw a digit on; it centers a drawing as chapter 07 does."""
    files = resources.files("helpers")
    center = files.joinpath("page", "center.js").read_text(encoding="utf-8")
    page = files.joinpath("serving.html").read_text(encoding="utf-8")
    return page.replace("[[center]]", center)


def bare_app(model: nn.Module, *, in_threads: bool = False) -> FastAPI:
    """Return the baseline: one handler that calls the model, and nothing else.

    in_threads: let FastAPI call it in a pool of threads, as it does with every plain `def`.
    """
    app = FastAPI()
    app.state.draining = False

    def answer(image: dict) -> dict[str, Any]:
        pixels = torch.tensor(image["pixels"], dtype=torch.float32)
        with torch.inference_mode():
            row = model(pixels[None])[0]
        return {"digit": int(row.argmax()), "probabilities": row.tolist()}

    async def on_the_loop(image: dict) -> dict[str, Any]:
        return answer(image)

    app.post("/predict")(answer if in_threads else on_the_loop)

    @app.get("/ready")
    async def ready() -> str:
        return "ready"

    return app


# ---- the process


class DrainingServer(uvicorn.Server):
    """uvicorn that, told to stop, says so for a while before it closes its door.

    At the signal /ready turns to 503 and each answer closes its connection, so that a load
    balancer sends new requests elsewhere and no connection is idle when the server closes them:
    a request on its way to a connection that is being closed would be lost.
    """

    def __init__(self, config: uvicorn.Config, state: Any, drain: float):
        super().__init__(config)
        self.state, self.drain = state, drain
        self.leave_at: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to leave; at the second signal, leave."""
        if self.leave_at is not None:
            return super().handle_exit(sig, frame)
        self.state.draining = True
        self.leave_at = time.monotonic() + self.drain
        return None

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: is it time to leave?"""
        if self.leave_at is not None and time.monotonic() >= self.leave_at:
            self.should_exit = True
        return await super().on_tick(counter)


def main(arguments: list[str] | None = None) -> None:
    """Serve the models named on the command line until a signal says stop."""
    parser = argparse.ArgumentParser(description="Serve handwritten digits over HTTP.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", action="append", metavar="NAME=FILE")
    source.add_argument("--train", action="store_true", help="train a small model and serve it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=Settings.max_batch)
    parser.add_argument("--max-wait", type=float, default=Settings.max_wait, help="seconds")
    parser.add_argument("--max-queue", type=int, default=Settings.max_queue)
    parser.add_argument("--timeout", type=float, default=Settings.timeout, help="seconds")
    parser.add_argument("--drain", type=float, default=Settings.drain, help="seconds")
    baselines = {"nargs": "?", "const": "async", "choices": ("async", "def")}
    parser.add_argument("--bare", **baselines, help="the baseline: one handler, of this kind")
    parser.add_argument("--no-freeze", action="store_true", help="leave the collector as it is")
    given = parser.parse_args(arguments)

    torch.set_num_threads(1)
    models = {"v1": _small_model()} if given.train else _load_all(given.model)
    settings = Settings(
        max_batch=given.max_batch,
        max_wait=given.max_wait,
        max_queue=given.max_queue,
        timeout=given.timeout,
        drain=given.drain,
        freeze=not given.no_freeze,
        admin_token=os.environ.get("SERVING_ADMIN_TOKEN"),
    )
    app = create_app(models, settings)
    if given.bare:
        app = bare_app(next(iter(models.values())), in_threads=given.bare == "def")
        if settings.freeze:
            gc.collect()
            gc.freeze()
    elif given.train:
        print(f"draw a digit on http://{given.host}:{given.port}/  (Ctrl+C stops)", flush=True)
    config = uvicorn.Config(app, host=given.host, port=given.port, log_level="warning")
    DrainingServer(config, app.state, settings.drain).run()


def _load_all(pairs: list[str]) -> dict[str, nn.Module]:
    """`NAME=FILE` -> the model of each file under its name."""
    models = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if not name or not path:
            raise ValueError(f"--model: expected NAME=FILE, got {pair!r}")
        models[name] = load_model(path)
    return models


def _small_model() -> DigitReader:
    from helpers import data  # 2 s, which a server with a file need not wait for

    digits = data.digits()
    print(f"training on {len(digits.train_images)} digits", flush=True)
    model = train_reader(digits.train_images, digits.train_labels, sizes=(784, 256, 10), epochs=8)
    with torch.inference_mode():
        best = model(digits.test_images[:, 0].float()).argmax(1)
    right = (best == digits.test_labels).float().mean().item()
    print(f"{right:.1%} of {len(best)} other digits are read correctly", flush=True)
    return model


if __name__ == "__main__":
    main()
