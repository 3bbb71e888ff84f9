"""Rows in columns that fit the terminal.

Law: what identifies a row is never shortened. When room is short the least important columns are left out until the
flexible ones fit at a few letters, and these share what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sidecar.cli.terminal import Terminal, printable

_GAP = 2
_LEAST = 8


class Column(NamedTuple):
    """One column. `flexible` ones may be shortened; of those with an `importance` of 1 or more, the lowest are left
    out first, those with 0 never."""

    title: str
    flexible: bool = False
    importance: int = 0
    right: bool = False
    least: int = 0
    """Of a growing table: at least so wide, for the rows that come later."""


class Cell(NamedTuple):
    """What stands in a row."""

    text: str
    colour: str | None = None


class Table:
    """Measured once, by its first rows. A `growing` one leaves room for others, that are shown later."""

    def __init__(
        self, terminal: Terminal, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, growing: bool = False
    ) -> None:
        self._terminal = terminal
        self._columns = columns
        self._widths: list[int | None] = [
            max(len(column.title), column.least * growing, *(len(printable(row[index].text)) for row in rows))
            for index, column in enumerate(columns)
        ]
        if terminal.width is not None:
            self._fit(terminal.width)

    def head(self) -> None:
        self._line([Cell(column.title, "dim") for column in self._columns])

    def show(self, rows: Sequence[Sequence[Cell]]) -> None:
        for row in rows:
            self._line(row)

    def _line(self, row: Sequence[Cell]) -> None:
        parts, pending = [], ""
        for cell, column, width in zip(row, self._columns, self._widths, strict=True):
            if width is None:
                continue
            text = printable(cell.text)
            if column.flexible and self._terminal.width is not None:
                text = _shortened(text, width)
            room = " " * max(0, width - len(text))
            painted = self._terminal.paint(text, cell.colour)
            parts.append(pending + (room + painted if column.right else painted))
            pending = ("" if column.right else room) + " " * _GAP
        self._terminal.line("".join(parts).rstrip())

    def _fit(self, room: int) -> None:
        """Leave out what cannot be fitted even at its narrowest, then take the excess from the widest."""
        while self._total(self._narrowest) > room:
            optional = [
                (column.importance, index)
                for index, column in enumerate(self._columns)
                if column.importance and self._widths[index] is not None
            ]
            if not optional:
                break
            self._widths[min(optional)[1]] = None
        while self._total(self._width) > room:
            flexible = [index for index in range(len(self._columns)) if self._width(index) > self._narrowest(index)]
            if not flexible:
                return
            widest = max(flexible, key=self._width)
            self._widths[widest] = self._width(widest) - 1

    def _width(self, index: int) -> int:
        return self._widths[index] or 0

    def _narrowest(self, index: int) -> int:
        column, width = self._columns[index], self._width(index)
        return min(width, max(_LEAST, len(column.title))) if column.flexible else width

    def _total(self, width: Callable[[int], int]) -> int:
        shown = [index for index, known in enumerate(self._widths) if known is not None]
        return sum(map(width, shown)) + _GAP * (len(shown) - 1)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
