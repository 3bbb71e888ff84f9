"""A bounded queue and the thread that carries it to a collector, batch by batch.

Law: handing over never blocks; a full queue loses its oldest, counted. A dead or slow collector costs this thread its
time and the queue its oldest entries, never a request. The work of putting things into the collector's words happens
here too, so that what is dropped was never worked on. OpenTelemetry's own batch processor queues finished spans, drops
them uncounted and blocks whoever asks it to flush; this is why it is not used.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Courier(Generic[Item]):
    """`deliver` takes a batch and returns whether it arrived; `lost` hears of what a full queue lost."""

    def __init__(
        self,
        name: str,
        capacity: int,
        batch: int,
        delay: float,
        deliver: Callable[[list[Item]], None],
        lost: Callable[[Item], None],
    ) -> None:
        self._queue: deque[Item] = deque()
        self._batch = batch
        self._delay = delay
        self._deliver = deliver
        self._lost = lost
        self._wake = threading.Event()
        self._stopping = False
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = False
        self.capacity = capacity

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: Item) -> None:
        """From the event loop's thread only."""
        queue = self._queue
        if len(queue) >= self.capacity:
            try:
                self._lost(queue.popleft())
            except IndexError:
                pass  # the thread took the last one in between
        queue.append(item)
        if not self._begun:
            self._begun = True
            self._thread.start()
        if len(queue) >= self._batch and not self._wake.is_set():
            self._wake.set()

    def close(self, timeout: float) -> None:
        """Deliver what is queued, for at most so long; what is left then is lost. Not for the event loop."""
        self._deadline = time.monotonic() + timeout
        self._stopping = True
        self._wake.set()
        if self._begun:
            self._thread.join(timeout)
        while self._queue:
            self._lost(self._queue.popleft())

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._delay)
            self._wake.clear()
            self._carry()
        self._carry()

    def _carry(self) -> None:
        """Everything that is queued now, in batches."""
        queue = self._queue
        while queue and time.monotonic() < self._deadline:
            taken: list[Item] = []
            while queue and len(taken) < self._batch:
                try:
                    taken.append(queue.popleft())
                except IndexError:
                    break  # the loop's thread dropped the last one in between
            if taken:
                self._deliver(taken)
