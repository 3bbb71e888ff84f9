"""Asking the system's resolver, which cannot be hurried and cannot be interrupted.

Law: `getaddrinfo` runs in threads of its own that nobody waits for: not the loop's, which others need, and not at the
end of the process. One question takes one thread for as long as the system takes; so many of them at most, and a part
is kept for names that are known to have an answer, so that names without one never take the last. What finds no thread
waits in line, known names first, and is turned away when nobody can be waiting for it any more.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from sidecar import clock

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]

MOST_THREADS = 64
FOR_KNOWN_NAMES = 16
MOST_WAITING = 256


class _Question(NamedTuple):
    host: str
    port: int
    answer: asyncio.Future[list[AddressInfo]]
    given_up_at: float


class SystemLookup:
    """See the module's law. `is_known` tells which names have had an answer, or are configured."""

    def __init__(
        self,
        is_known: Callable[[str], bool],
        patience: float,
        now: Callable[[], float] = clock.monotonic,
        getaddrinfo: Callable[..., list[Any]] | None = None,
    ) -> None:
        self._is_known = is_known
        self._patience = patience
        self._now = now
        self._getaddrinfo = getaddrinfo or socket.getaddrinfo
        self._waiting: dict[bool, deque[_Question]] = {True: deque(), False: deque()}
        self.threads = 0
        """That are running; some of them maybe for nobody any more."""

    async def __call__(self, host: str, port: int) -> list[AddressInfo]:
        """The addresses of a name. Raises OSError, and UnicodeError for what is no name."""
        loop = asyncio.get_running_loop()
        question = _Question(host, port, loop.create_future(), self._now() + self._patience)
        known = self._is_known(host)
        if self._has_thread(known=known):
            self._start(question, loop)
        elif len(self._waiting[known]) < MOST_WAITING:
            self._waiting[known].append(question)
        else:
            raise _crowded()
        return await question.answer

    def _has_thread(self, *, known: bool) -> bool:
        return self.threads < (MOST_THREADS if known else MOST_THREADS - FOR_KNOWN_NAMES)

    def _start(self, question: _Question, loop: asyncio.AbstractEventLoop) -> None:
        thread = threading.Thread(target=self._ask, args=(question, loop), name="resolver", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine, or the container, has no more of them
            question.answer.set_exception(OSError(errno.EAGAIN, "no thread could be started to ask for it"))
        else:
            self.threads += 1

    def _ask(self, question: _Question, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread."""
        found: list[Any] | Exception
        try:
            found = self._getaddrinfo(question.host, question.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except Exception as error:  # whatever it is belongs to whoever asked
            found = error
        try:
            loop.call_soon_threadsafe(self._ended, question, found, loop)
        except RuntimeError:
            pass  # the loop has ended meanwhile

    def _ended(self, question: _Question, found: list[Any] | Exception, loop: asyncio.AbstractEventLoop) -> None:
        self.threads -= 1
        if not question.answer.done():
            if isinstance(found, Exception):
                question.answer.set_exception(found)
            else:
                question.answer.set_result([_plain(info) for info in found])
        for known in (True, False):
            waiting = self._waiting[known]
            while waiting and self._has_thread(known=known):
                self._take_up(waiting.popleft(), loop)

    def _take_up(self, question: _Question, loop: asyncio.AbstractEventLoop) -> None:
        if question.answer.done():
            return
        if self._now() >= question.given_up_at:
            question.answer.set_exception(_crowded())
        else:
            self._start(question, loop)


def _crowded() -> OSError:
    return OSError(errno.EAGAIN, "too many other names wait for an answer of the name server")


def _plain(info: Any) -> AddressInfo:
    family, kind, proto, name, address = info
    return (int(family), int(kind), proto, name, tuple(address))
