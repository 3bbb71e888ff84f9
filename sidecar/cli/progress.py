"""How far a long piece of work is, on a terminal.

Law: one line on standard error that is drawn over; into a pipe nothing is written, so that scripts read results only.
"""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import TextIO

_BAR = 24
_AT_MOST_EVERY = 0.1


class Progress:
    """`show` as often as wanted, then `end`."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._live = self._stream.isatty()
        self._drawn_at = 0.0
        self._longest = 0

    def show(self, done: int, text: str = "") -> None:
        now = monotonic()
        if not self._live or (now - self._drawn_at < _AT_MOST_EVERY and done < self._total):
            return
        self._drawn_at = now
        share = min(1.0, done / self._total) if self._total else 1.0
        filled = int(share * _BAR)
        line = f"[{'█' * filled}{'·' * (_BAR - filled)}] {done} of {max(done, self._total)} {text}"
        room = max(20, os.get_terminal_size(self._stream.fileno()).columns or 80) - 1
        line = line[:room]
        self._longest = max(self._longest, len(line))
        self._stream.write("\r" + line.ljust(self._longest))
        self._stream.flush()

    def end(self) -> None:
        """The line goes; what is to stay is said by whoever worked."""
        if self._longest:
            self._stream.write("\r" + " " * self._longest + "\r")
            self._stream.flush()
            self._longest = 0
