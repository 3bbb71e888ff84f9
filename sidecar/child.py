"""The app that `sidecar run -- CMD` starts: it gets our signals and our standard input, and its exit code is ours.

Law: what the app would have noticed about its parent stays as it was: process group, terminal, file mode mask, the
number of files it may open. A signal
that a terminal sends to the whole group is not sent a second time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.descriptors import Inherited

NOT_FOUND, NOT_EXECUTABLE = 127, 126
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FROM_THE_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT})


class CannotRun(Exception):
    """Why not; `code` is what a shell would exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """Use `start`, then `ended`."""

    def __init__(self, command: Sequence[str], inherited: Inherited) -> None:
        self._command = list(command)
        self._inherited = inherited
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environ: Mapping[str, str], loop: asyncio.AbstractEventLoop) -> None:
        name = self._command[0]
        try:
            with self._inherited.passed_on():
                self._process = subprocess.Popen(self._command, env=dict(environ), umask=self._inherited.umask)
        except FileNotFoundError as error:
            raise CannotRun(f"{name}: not found; give a program in PATH, or its whole path", NOT_FOUND) from error
        except OSError as error:
            raise CannotRun(f"{name}: cannot be run: {error.strerror}", NOT_EXECUTABLE) from error
        for number in PASSED_ON:
            loop.add_signal_handler(number, self._pass_on, number)

    async def ended(self) -> int:
        """As a shell tells it: the code, or 128 and the signal."""
        process = self._process
        assert process is not None
        code = await asyncio.get_running_loop().run_in_executor(None, process.wait)
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: signal.Signals) -> None:
        assert self._process is not None
        if number in _FROM_THE_KEYBOARD and _in_the_foreground():
            return  # the app has got it as well
        self._process.send_signal(number)


def _in_the_foreground() -> bool:
    """Whether the terminal, if there is one, sends its signals to our group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
