"""`sidecar sessions`: requests worth looking at, as a table, as JSON, or as they come.

Law: newest first in a list, oldest first when following, each session once. JSON is the admin port's own; when
following, one object per line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from time import sleep
from typing import Any

from sidecar.cli.admin import Admin, connect, telling_failures
from sidecar.cli.listing import listed, must_be_upstreams, tell
from sidecar.cli.table import Cell, Column, Table, when
from sidecar.cli.terminal import Terminal
from telemetry.record import BAD, GOOD
from telemetry.sentences import seconds

_PAGE = 100
_MOST_PAGES = 10
_POLL = 1.0
_FILTERS = ("outcome", "upstream", "code", "trace", "since")
_COLUMNS = (
    Column("TIME (UTC)", importance=6, brief="UTC", least=8),
    Column("SESSION", brief="SESSION", least=8),
    Column("UPSTREAM", flexible=True, importance=2, least=10),
    Column("REQUEST", flexible=True, importance=7, least=24, narrow=16, request=True),
    Column("OUTCOME", least=13),
    Column("RESULT", flexible=True, importance=4, least=12),
    Column("TRIES", importance=1, right=True),
    Column("TOOK", importance=5, right=True, least=7),
)

Session = dict[str, Any]


@telling_failures
def sessions(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    filters = {name: getattr(chosen, name) for name in _FILTERS}
    if chosen.earlier:
        filters["earlier"] = "true"
    terminal = Terminal()
    found = listed(admin, "/sessions", chosen.limit, 1000, **filters)
    if not found.items:
        must_be_upstreams(admin, chosen.upstream)
    if chosen.follow:
        _follow(admin, filters, terminal, found.items, as_json=chosen.json)
    elif chosen.json:
        terminal.line(json.dumps(found.as_json(), indent=2))
    elif not found.items:
        terminal.line("No such sessions. Kept are requests that were retried, failed, refused or slow, for a day.")
    else:
        tell(terminal, found, _COLUMNS, list(map(_row, found.items)))
    return 0


def _follow(
    admin: Admin, filters: dict[str, str | None], terminal: Terminal, found: list[Session], *, as_json: bool
) -> None:
    newest = found[0]["session_id"] if found else None
    found.reverse()
    table = Table(terminal, _COLUMNS, list(map(_row, found)), growing=True)
    if not as_json:
        table.head()
    try:
        while True:
            if as_json:
                for session in found:
                    terminal.line(json.dumps(session))
            else:
                table.show(list(map(_row, found)))
            terminal.flush()
            sleep(_POLL)
            found = _news(admin, filters, newest)
            newest = found[-1]["session_id"] if found else newest
    except KeyboardInterrupt:
        return  # that is how following ends


def _news(admin: Admin, filters: dict[str, str | None], newest: str | None) -> list[Session]:
    """Sessions that came after the newest that is known, oldest first; of a flood the last thousand."""
    found: list[Session] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = admin.get("/sessions", limit=_PAGE, cursor=cursor, **filters)
        for session in page["items"]:
            if session["session_id"] == newest:
                return found[::-1]
            found.append(session)
        cursor = page["next_cursor"]
        if cursor is None:
            break
    return found[::-1]


def _row(session: Session) -> Sequence[Cell]:
    outcome = session["outcome"]
    colour = "green" if outcome in GOOD else "red" if outcome in BAD else "yellow"
    error, result = session["final_error"], session["final_result"]
    shown = error["type"] if error is not None else str(result["status"]) if result is not None else "-"
    if session["refusals"] is not None and session["refusals"]["count"] > 1:
        shown += f" ×{session['refusals']['count']:,}"
    return (
        when(session["start_time"]),
        Cell(session["session_id"], None, session["session_id"][:8]),
        Cell(session["upstream"]),
        Cell(f"{session['method']} {session['url']}"),
        Cell(outcome, colour),
        Cell(shown),
        Cell(str(session["total_attempts"])),
        Cell(seconds(session["total_duration"])),
    )
