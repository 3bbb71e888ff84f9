"""What a terminal can show: how wide it is, and whether in colour.

Law: colours only on a terminal and never against NO_COLOR; text of others (urls, messages) is shown so that it cannot
command the terminal. Into a pipe nothing is shortened or coloured, unless COLUMNS says how wide it is.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
_NARROWEST = 20


class Terminal:
    """Where a command writes. `width` is None when nothing need be fitted."""

    def __init__(self, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream or sys.stdout
        terminal = self._stream.isatty()
        self.colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        columns = environ.get("COLUMNS", "")
        self.width: int | None = None
        if columns.isascii() and columns.isdigit() and int(columns) > 0:
            self.width = max(_NARROWEST, int(columns))
        elif terminal:
            self.width = max(_NARROWEST, os.get_terminal_size(self._stream.fileno()).columns or 80)

    def line(self, text: str = "") -> None:
        print(text, file=self._stream)

    def flush(self) -> None:
        self._stream.flush()

    def paint(self, text: str, colour: str | None) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colour and colour is not None and text else text

    def wrapped(self, text: str, indent: int) -> list[str]:
        """A line as lines that fit, all but the first indented; what cannot be broken stays whole."""
        if self.width is None or len(text) <= self.width or self.width <= indent + _NARROWEST:
            return [text]
        return textwrap.wrap(
            text,
            self.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )


def printable(text: object) -> str:
    """No line breaks, no escape sequences."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))
