"""The one thread that may wait for a disk or a pipe.

Law: handing over a job never blocks and never raises; when the queue is full the job is dropped and counted. Jobs run
in order. After a burst, and never in the middle of one, whatever was written is flushed. The thread begins with the
first job, so an idle sidecar has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_CAPACITY = 10_000


class Writer:
    """Runs jobs in its thread. `failed` is called there with what a job raised."""

    def __init__(self, capacity: int = _CAPACITY, failed: Callable[[Exception], None] | None = None) -> None:
        self._jobs: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._capacity = capacity
        self._failed = failed
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self.flushers: list[Callable[[], None]] = []
        self.dropped = 0

    def put(self, job: Callable[..., None], *arguments: Any) -> bool:
        """Have a job done soon. False when it was dropped."""
        if self._closed or self._jobs.qsize() >= self._capacity:
            self.dropped += 1
            return False
        self._jobs.put((job, arguments))
        if self._thread is None:
            self._start()
        return True

    def _start(self) -> None:
        with self._starting:  # exporters tell of their troubles from threads of their own
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="telemetry-writer", daemon=True)
                self._thread.start()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything handed over so far is done. Not for the event loop."""
        if self._thread is None or not self._thread.is_alive():
            return True
        done = threading.Event()
        for flush in (*self.flushers, done.set):
            self._jobs.put((flush, ()))
        return done.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued, for at most so long. Not for the event loop."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            if self._jobs.empty():
                for flush in self.flushers:
                    self._do(flush, ())
        for flush in self.flushers:
            self._do(flush, ())

    def _do(self, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            job(*arguments)
        except Exception as error:  # a job that fails must not take the thread, and all later jobs, with it
            if self._failed is not None:
                self._failed(error)
