"""What a terminal shows: width, colours, and columns that give way in the right order."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

import pytest

from sidecar import clock
from sidecar.cli.table import Cell, Column, Table, request_shortened, when
from sidecar.cli.terminal import Terminal, printable
from telemetry.timestamps import rfc3339

COLUMNS = (
    Column("ID"),
    Column("WHAT", flexible=True),
    Column("WHY", flexible=True, importance=1),
    Column("N", importance=2, right=True),
)
ROWS = [
    [Cell("id-1"), Cell("w" * 30, "red"), Cell("y" * 20), Cell("7")],
    [Cell("id-2"), Cell("w"), Cell(""), Cell("11")],
]


def shown(
    width: int | None, *, growing: bool = False, rows: list[list[Cell]] = ROWS, columns: tuple[Column, ...] = COLUMNS
) -> list[str]:
    stream = io.StringIO()
    terminal = Terminal(stream, {} if width is None else {"COLUMNS": str(width)})
    table = Table(terminal, columns, rows, growing=growing)
    table.head()
    table.show(rows)
    return stream.getvalue().splitlines()


@pytest.fixture
def screen() -> Iterator[TextIO]:
    """A terminal of 64 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 64, 0, 0))
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def test_into_a_pipe_nothing_is_shortened_coloured_or_padded_at_the_end() -> None:
    assert [
        f"ID    WHAT{' ' * 28}WHY{' ' * 20}N",
        f"id-1  {'w' * 30}  {'y' * 20}   7",
        f"id-2  w{' ' * 31}{' ' * 20}  11",
    ] == shown(None)


def test_flexible_columns_give_way_the_widest_first() -> None:
    assert [f"id-1  {'w' * 15}…  {'y' * 16}…   7"] == shown(45)[1:2]
    assert 45 == len(shown(45)[1])


def test_then_the_least_important_columns_are_left_out() -> None:
    assert ["ID", "WHAT", "N"] == shown(24)[0].split()
    assert 24 >= max(map(len, shown(24)))
    rows = [[Cell("i" * 10), Cell("w" * 30), Cell("why"), Cell("1")]]
    assert ["ID", "WHAT"] == shown(22, rows=rows)[0].split()
    assert f"{'i' * 10}  {'w' * 9}…" == shown(22, rows=rows)[1]


def test_what_identifies_a_row_is_shown_even_where_it_does_not_fit() -> None:
    rows = [[Cell("i" * 40), Cell("what"), Cell("why"), Cell("1")]]
    assert "i" * 40 in shown(20, rows=rows)[1]


def test_a_growing_table_leaves_room_for_what_comes() -> None:
    stream = io.StringIO()
    table = Table(Terminal(stream, {}), [Column("A", least=6), Column("B")], [], growing=True)
    table.head()
    table.show([[Cell("abcdef"), Cell("x")]])
    assert ["A       B", "abcdef  x"] == stream.getvalue().splitlines()


def test_a_terminal_has_a_width_and_colours(screen: TextIO) -> None:
    terminal = Terminal(screen, {"TERM": "xterm"})
    assert (64, True) == (terminal.width, terminal.colour)
    assert ("\x1b[31mno\x1b[0m", "plain", "") == (
        terminal.paint("no", "red"),
        terminal.paint("plain", None),
        terminal.paint("", "red"),
    )


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_refused(screen: TextIO, environ: dict[str, str]) -> None:
    terminal = Terminal(screen, environ)
    assert (False, "no") == (terminal.colour, terminal.paint("no", "red"))


@pytest.mark.parametrize(("columns", "width"), [("100", 100), ("5", 20), ("0", 64), ("x", 64), ("", 64)])
def test_columns_says_how_wide_when_it_makes_sense(screen: TextIO, columns: str, width: int) -> None:
    assert width == Terminal(screen, {"COLUMNS": columns}).width


def test_a_pipe_has_no_width_and_no_colours() -> None:
    terminal = Terminal(io.StringIO(), {"TERM": "xterm"})
    assert (None, False, ["as it is " * 50]) == (terminal.width, terminal.colour, terminal.wrapped("as it is " * 50, 4))


def test_lines_are_broken_between_words_and_indented() -> None:
    terminal = Terminal(io.StringIO(), {"COLUMNS": "30"})
    assert ["  a line of words that is", "    broken, but", "    not-this-long-word-here"] == terminal.wrapped(
        "  a line of words that is broken, but not-this-long-word-here", 4
    )


@pytest.mark.parametrize(
    ("text", "safe"),
    [("plain → ü", "plain → ü"), ("\x1b[2J", "\\x1b[2J"), ("a\nb\r", "a\\nb\\r"), ("\u202e", "\\u202e"), (3, "3")],
)
def test_what_could_command_a_terminal_is_shown_as_what_it_is(text: object, safe: str) -> None:
    assert safe == printable(text)


@pytest.mark.parametrize(
    ("width", "told"),
    [
        (60, "POST https://api.a.test:8443/v1/orders/17/charges?expand=all"),
        (40, "POST /v1/orders/17/charges?expand=all"),
        (30, "POST /v1/orders/17/charges?…"),
        (20, "POST …ers/17/charges"),
        (8, "POST ht…"),
    ],
)
def test_of_a_request_the_method_and_the_end_of_its_path_stay(width: int, told: str) -> None:
    text = "POST https://api.a.test:8443/v1/orders/17/charges?expand=all"
    assert (told, True) == (request_shortened(text, width), len(told) <= width)


def test_what_can_be_said_briefly_is_before_anything_is_left_out() -> None:
    columns = (Column("TIME (UTC)", importance=1, brief="UTC"), Column("ID", brief="ID"), Column("REST"))
    rows = [[Cell("11-18 12:00:00", None, "12:00:00"), Cell("a" * 24, None, "a" * 8), Cell("r" * 30)]]
    for width, cells in ((80, ["11-18", "12:00:00", "a" * 24]), (60, ["12:00:00", "a" * 8]), (45, ["a" * 8])):
        stream = io.StringIO()
        table = Table(Terminal(stream, {"COLUMNS": str(width)}), columns, rows)
        table.show(rows)
        assert [*cells, "r" * 30] == stream.getvalue().split()


def test_where_there_is_room_a_time_says_how_far_away_it_is_but_not_in_a_table_that_goes_on() -> None:
    then = rfc3339(clock.wall() - 125)
    columns, rows = (Column("TIME (UTC)", brief="UTC"), Column("ID")), [[when(then), Cell("a")]]
    assert "2 min ago  a" in shown(40, columns=columns, rows=rows)[1]
    assert f"{then[5:10]} {then[11:19]}  a" == shown(24, columns=columns, rows=rows)[1]
    assert "ago" not in shown(40, columns=columns, rows=rows, growing=True)[1]
    assert "in 9 min" in str(when(rfc3339(clock.wall() + 545)).amply)


def test_a_time_of_today_is_briefly_the_clock_alone() -> None:
    today = datetime.now(UTC).date().isoformat()
    assert "09:30:15" == when(f"{today}T09:30:15.123Z").brief
    assert ("01-29 09:30:15", "01-29 09:30") == (when("2026-01-29T09:30:15Z").text, when("2026-01-29T09:30:15Z").brief)
