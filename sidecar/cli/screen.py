"""The whole screen of a terminal, for as long as a command shows something live.

Law: plain ANSI, which every terminal and ssh know. However the command ends, by a key, a signal or a fault, the
terminal is left as it was found: its modes, its cursor, and what stood on it before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # another page, no cursor, no wrapping, empty
_LEAVE = b"\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = b"\x1b[H", b"\x1b[K", b"\x1b[J"


class Screen:
    """Use `whole_screen`."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._modes = termios.tcgetattr(self._in)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)

    def enter(self) -> None:
        tty.setcbreak(self._in)
        self._write(_ENTER)

    def leave(self) -> None:
        self._write(_LEAVE)
        termios.tcsetattr(self._in, termios.TCSADRAIN, self._modes)

    def wake(self) -> None:
        """Let `key` return; from a signal or from another thread."""
        with contextlib.suppress(BlockingIOError):  # it is awake as it is
            os.write(self._wake, b"\0")

    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        found = os.get_terminal_size(self._out)
        return max(20, found.columns or 80), max(4, found.lines or 24)

    def show(self, lines: list[str]) -> None:
        """In one write, so that nothing flickers."""
        # Emptied before it is written: behind a line as wide as the screen the cursor still stands on its last letter.
        body = b"\r\n".join(_END_OF_LINE + line.encode() for line in lines)
        self._write(_HOME + body + (b"\r\n" + _BELOW if len(lines) < self.size()[1] else b""))

    def key(self, within: float) -> str:
        """What was typed; empty when nothing was within the time, or when somebody woke us; `q` at the end of input."""
        ready, _, _ = select.select([self._in, self._woken], [], [], within)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._in not in ready:
            return ""
        return os.read(self._in, 64).decode(errors="replace") or "q"

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]


@contextlib.contextmanager
def whole_screen() -> Iterator[Screen]:
    screen = Screen()

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def resized(number: int, frame: FrameType | None) -> None:
        screen.wake()

    def paused(number: int, frame: FrameType | None) -> None:
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()
        screen.wake()

    meant = {
        signal.SIGTERM: ended,
        signal.SIGHUP: ended,
        signal.SIGWINCH: resized,
        signal.SIGTSTP: paused,
    }
    before = {number: signal.signal(number, handler) for number, handler in meant.items()}
    screen.enter()
    try:
        yield screen
    finally:
        screen.leave()
        for number, handler in before.items():
            signal.signal(number, handler)
