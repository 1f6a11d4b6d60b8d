"""Chapter 18: an asyncio batcher: requests that arrive together share one call of the model."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor


class QueueFull(Exception):
    """As many samples are waiting as may wait; the caller should try again later."""


class Closed(Exception):
    """The batcher is stopping, or was never started, and takes no new sample."""


@dataclass(eq=False)
class _Waiting:
    """One sample that waits, and the future that its caller awaits."""

    sample: Tensor
    future: asyncio.Future
    arrived: float = field(default_factory=lambda: asyncio.get_running_loop().time())


class Batcher:
    """Collect single samples into batches, and give each caller the row that belongs to it.

    model: a function [N, …] -> [N, …], called in a thread of its own, one batch at a time, so
        that the event loop goes on reading requests meanwhile.
    max_batch: the most samples in one call of the model.
    max_wait: seconds that the first sample of a batch waits for others; 0 takes what is there.
    max_queue: the most samples that may wait. More raise `QueueFull` at once.
    on_batch: called with the number of samples of each batch, for the metrics.

    A sample whose batch fails is tried again alone, so that only the sample that is to blame
    gets the error. A caller that was cancelled is left out of the next batch, and of such a trial.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        *,
        max_batch: int = 32,
        max_wait: float = 0.002,
        max_queue: int = 256,
        on_batch: Callable[[int], None] | None = None,
    ):
        if max_batch < 1 or max_queue < 1:
            got = f"max_batch {max_batch}, max_queue {max_queue}"
            raise ValueError(f"expected sizes of at least 1, got {got}")
        if max_wait < 0:
            raise ValueError(f"expected max_wait of at least 0 seconds, got {max_wait}")
        self.model = model
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.on_batch = on_batch
        self.accepted = self.answered = 0
        self._waiting: deque[_Waiting] = deque()
        self._news = asyncio.Event()  # something arrived, or the batcher is to stop
        self._accepting = False
        self._task: asyncio.Task | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """The number of samples that wait, without those in the batch that is computed now."""
        return len(self._waiting)

    async def start(self) -> None:
        """Begin to take samples, also after a stop."""
        self._accepting = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take no new sample, answer all that were accepted, then return."""
        self._accepting = False
        self._news.set()
        if self._task is not None:
            await self._task
        if self._thread is not None:
            self._thread.shutdown()

    async def predict(self, sample: Tensor) -> Tensor:
        """Return the model's row for one sample [...], without the dimension of the batch.

        Raises `QueueFull` or `Closed` at once, and later what the model raises for this sample.
        """
        if not self._accepting:
            raise Closed("the batcher is not running")
        if len(self._waiting) >= self.max_queue:
            raise QueueFull(f"{len(self._waiting)} samples are waiting already")
        waiting = _Waiting(sample, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.accepted += 1
        self._news.set()
        try:
            row = await waiting.future
        except asyncio.CancelledError:
            if waiting in self._waiting:  # nobody waits for it: it must not take a place
                self._waiting.remove(waiting)
            raise
        self.answered += 1  # a row: neither an error nor a caller that has left
        return row

    async def _run(self) -> None:
        while True:
            batch = await self._collect()
            if not batch:
                return
            await self._answer(batch)

    async def _collect(self) -> list[_Waiting]:
        """Wait for the next batch; an empty one says that the batcher has stopped."""
        while True:
            await self._wait_for_sample()
            if not self._waiting:
                return []  # stopped

            await self._wait_for_more()
            count = min(self.max_batch, len(self._waiting))
            if count > 0:  # 0: all were cancelled while we waited
                return [self._waiting.popleft() for _ in range(count)]

    async def _wait_for_sample(self) -> None:
        while not self._waiting and self._accepting:
            self._news.clear()
            await self._news.wait()

    async def _wait_for_more(self) -> None:
        deadline = self._waiting[0].arrived + self.max_wait
        while len(self._waiting) < self.max_batch and self._accepting:
            self._news.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                return

    async def _answer(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.run_in_executor(self._thread, self._call, [w.sample for w in batch])
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    if not waiting.future.done():
                        await self._answer([waiting])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        for waiting, row in zip(batch, rows, strict=True):
            if not waiting.future.done():  # a cancelled caller has left
                waiting.future.set_result(row)

    def _call(self, samples: list[Tensor]) -> Tensor:
        if self.on_batch is not None:
            self.on_batch(len(samples))
        with torch.inference_mode():
            rows = self.model(torch.stack(samples))
        if len(rows) != len(samples):
            raise ValueError(f"expected {len(samples)} rows from the model, got {len(rows)}")
        return rows
