"""Rows in columns that fit the terminal.

Law: what identifies a row is never cut in the middle. When room is short, columns that have a shorter way to say the
same take it, then the least important ones are left out until the flexible ones fit at a few letters, and these share
what is left. Of a request the method and the end of its path stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sidecar.cli.terminal import Terminal, printable
from sidecar.cli.whenever import distance

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
    narrow: int = 0
    """Of a flexible one: it is left out, or others are, before it becomes narrower than this."""
    brief: str = ""
    """The title above cells that are said briefly."""
    request: bool = False
    """Holds a method and a url, which are cut as such."""


class Cell(NamedTuple):
    """What stands in a row. `brief` says the same in fewer letters, for where room is short, `amply` in more, for where
    there is plenty."""

    text: str
    colour: str | None = None
    brief: str | None = None
    amply: str | None = None


class Table:
    """Measured once, by its first rows. A `growing` one leaves room for others, that are shown later."""

    def __init__(
        self, terminal: Terminal, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, growing: bool = False
    ) -> None:
        self._terminal = terminal
        self._columns = columns
        self._briefly: set[int] = set()
        self._amply = False
        self._widths: list[int | None] = [
            max(len(column.title), column.least * growing, *(len(printable(row[index].text)) for row in rows))
            for index, column in enumerate(columns)
        ]
        if terminal.width is not None:
            self._fit(terminal.width, rows, growing=growing)

    def head(self) -> None:
        self._line([Cell(column.title, "dim", column.brief or column.title) for column in self._columns])

    def show(self, rows: Sequence[Sequence[Cell]]) -> None:
        for row in rows:
            self._line(row)

    def _line(self, row: Sequence[Cell]) -> None:
        parts, pending = [], ""
        for index, (cell, column, width) in enumerate(zip(row, self._columns, self._widths, strict=True)):
            if width is None:
                continue
            text = printable(self._said(index, cell))
            if column.flexible and self._terminal.width is not None:
                text = request_shortened(text, width) if column.request else _shortened(text, width)
            room = " " * max(0, width - len(text))
            painted = self._terminal.paint(text, cell.colour)
            parts.append(pending + (room + painted if column.right else painted))
            pending = ("" if column.right else room) + " " * _GAP
        self._terminal.line("".join(parts).rstrip())

    def _said(self, index: int, cell: Cell) -> str:
        if self._amply and cell.amply is not None:
            return cell.amply
        return cell.brief if index in self._briefly and cell.brief is not None else cell.text

    def _fit(self, room: int, rows: Sequence[Sequence[Cell]], *, growing: bool) -> None:
        """Say briefly what can be, leave out what cannot be fitted even at its narrowest, then take the excess from
        the widest."""
        if self._fits_amply(room, rows, growing=growing):
            return
        if self._total(self._width) > room:
            for index, column in enumerate(self._columns):
                if column.brief:
                    self._briefly.add(index)
                    said = (len(printable(self._said(index, row[index]))) for row in rows)
                    self._widths[index] = max(len(column.brief), column.least * growing, *said)
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

    def _fits_amply(self, room: int, rows: Sequence[Sequence[Cell]], *, growing: bool) -> bool:
        """What is said amply is true now, and not of a table that goes on for hours."""
        widths, self._amply = self._widths, not growing
        self._widths = [
            max(width or 0, *(len(printable(self._said(index, row[index]))) for row in rows), 0)
            for index, width in enumerate(widths)
        ]
        if growing or self._total(self._width) > room:
            self._widths, self._amply = widths, False
        return self._amply

    def _width(self, index: int) -> int:
        return self._widths[index] or 0

    def _narrowest(self, index: int) -> int:
        column, width = self._columns[index], self._width(index)
        return min(width, max(_LEAST, len(column.title), column.narrow)) if column.flexible else width

    def _total(self, width: Callable[[int], int]) -> int:
        shown = [index for index, known in enumerate(self._widths) if known is not None]
        return sum(map(width, shown)) + _GAP * (len(shown) - 1)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def request_shortened(text: str, width: int) -> str:
    """`POST https://a.test/v1/charges?x=1` in fewer letters: without the host, without the query, then the end of the
    path only, which is what tells requests apart."""
    method, space, url = text.partition(" ")
    path = url.partition("://")[2].partition("/")[2] if "://" in url else url.removeprefix("/")
    bare, query, _ = path.partition("?")
    for shorter in (url, f"/{path}", f"/{bare}?…" if query else f"/{bare}"):
        if len(method) + len(space) + len(shorter) <= width:
            return f"{method}{space}{shorter}"
    room = width - len(method) - len(space) - 1
    return f"{method}{space}…{bare[-room:]}" if room > 3 else _shortened(text, width)


def when(timestamp: str | None) -> Cell:
    """A time: the day and the clock, briefly the clock alone if it was today, amply with how long ago it is."""
    if timestamp is None:
        return Cell("-", "dim", "-")
    day, clock = timestamp[5:10], timestamp[11:19]
    today = timestamp[:10] == datetime.now(UTC).date().isoformat()
    told = f"{day} {clock}"
    return Cell(told, "dim", clock if today else f"{day} {clock[:5]}", f"{told}, {distance(timestamp)}")
