"""Runs an exchange without a task of its own for as long as it waits for nothing but its upstream's bytes.

Law: an exchange is one coroutine, read from top to bottom. The connection that brings its request starts it, the
connection that brings its answer resumes it, both inside the event loop's own callback: no task, no future and no
turn of the loop lie between the bytes and the code. What needs the loop (dialling, backoff, queues) is awaited
after `become_task`, from where on the same coroutine is driven by an ordinary task.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

_NEEDS_TASK = object()
_ENDED = object()


class Driven:
    """Base of what is run this way. `_ended` is called once, when the coroutine has ended by whatever door."""

    __slots__ = ("_coroutine", "_ended", "_future", "_loop", "_parked", "_steps", "_task")

    _coroutine: Coroutine[Any, Any, None]
    _ended: Callable[[], None]
    _future: asyncio.Future[None] | None
    _loop: asyncio.AbstractEventLoop
    _parked: bool
    _steps: Generator[Any, Any, None]
    """The coroutine as an iterator: its end is then a value, which is cheaper than an exception."""
    _task: asyncio.Task[None] | None

    def start(self, coroutine: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        """Run until the first wait."""
        self._coroutine = coroutine
        self._steps = coroutine.__await__()
        self._ended = ended
        self._future = None
        self._task = None
        self._parked = False
        self._step()

    def wake(self) -> None:
        """What `parked` waits for is there. Without effect while the coroutine waits for something else."""
        if self._parked:
            self._parked = False
            self._step()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)

    def cancel(self) -> None:
        """The app is gone: everything stops at once."""
        if self._task is not None:
            self._task.cancel()
        elif self._parked:
            self._parked = False
            try:
                self._coroutine.throw(asyncio.CancelledError())
            except (StopIteration, asyncio.CancelledError):
                self._ended()
            except Exception as error:
                self._broke(error)
                self._ended()
            else:
                self._go_on_as_task()  # it has something to keep before it ends

    def _step(self) -> None:
        try:
            wanted = next(self._steps, _ENDED)
        except asyncio.CancelledError:
            wanted = _ENDED
        except Exception as error:
            self._broke(error)
            wanted = _ENDED
        if wanted is _ENDED:
            self._ended()
        elif wanted is _NEEDS_TASK:
            self._go_on_as_task()

    def _go_on_as_task(self) -> None:
        self._task = task = self._loop.create_task(self._coroutine)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._broke(error)
        self._task = None  # a cancelled one holds the frames it was cancelled in, and they hold us
        self._ended()

    def _broke(self, error: BaseException) -> None:
        """The coroutine failed where it must not: in its own cleaning up."""
        raise NotImplementedError

    @types.coroutine
    def parked(self) -> Generator[Any, None, None]:
        """Wait for `wake`."""
        if self._task is None:
            self._parked = True
            yield None
        else:
            self._future = self._loop.create_future()
            try:
                yield from self._future
            finally:
                self._future = None

    @types.coroutine
    def become_task(self) -> Generator[Any, None, None]:
        """From here on anything asyncio offers may be awaited."""
        if self._task is None:
            yield _NEEDS_TASK
