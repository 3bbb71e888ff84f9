"""`sidecar interception`: clients that are let through unopened for a while, and opening them again."""

from __future__ import annotations

import argparse
import json
import os
from datetime import datetime
from typing import Any

from sidecar import clock
from sidecar.cli.admin import Failed, connect, telling_failures
from sidecar.cli.listing import Listed, listed, tell
from sidecar.cli.table import Cell, Column
from sidecar.cli.terminal import Terminal, printable
from sidecar.cli.whenever import ago
from telemetry.sentences import seconds

_COLUMNS = (
    Column("ID"),
    Column("HOST", flexible=True, importance=4, least=12),
    Column("CLIENT", flexible=True, importance=5, least=16),
    Column("ADDRESS", importance=2),
    Column("SINCE", right=True, importance=3),
    Column("LEFT", right=True),
    Column("WHY", flexible=True, importance=1, least=16),
)
_PAGE = 100


@telling_failures
def interception(chosen: argparse.Namespace) -> int:
    return _clear(chosen) if chosen.order == "clear" else _list(chosen)


def _list(chosen: argparse.Namespace) -> int:
    admin, terminal = connect(chosen, os.environ), Terminal()
    found = listed(admin, "/interception", chosen.limit, _PAGE, host=chosen.host)
    if chosen.json:
        terminal.line(json.dumps(found.as_json(), indent=2))
    elif not found.items:
        of_host = "" if chosen.host is None else f" of {printable(chosen.host)}"
        terminal.line(f"No client{of_host} is let through: whatever is intercepted is opened.")
    else:
        tell(terminal, found, _COLUMNS, [_row(one) for one in found.items])
    return 0


def _clear(chosen: argparse.Namespace) -> int:
    if (chosen.which is None) is not chosen.all:
        raise Failed("say whom: a host, an id of `sidecar interception list`, or --all", 2)
    asked: dict[str, Any] = {"all": True} if chosen.all else {"which": chosen.which}
    if chosen.reason is not None:
        asked["reason"] = chosen.reason
    answer = connect(chosen, os.environ).post("/interception/clear", asked)
    terminal = Terminal()
    if chosen.json:
        terminal.line(json.dumps(answer, indent=2))
    elif not answer["items"]:
        terminal.line("Nobody is let through there: nothing to clear.")
    else:
        tell(terminal, Listed(answer["items"], None, answer["total"]), _COLUMNS, [_row(one) for one in answer["items"]])
        terminal.line("They are opened again, from their next call on.")
    return 0


def client_of(one: dict[str, Any]) -> str:
    """Of one of `GET /interception`, in words."""
    agent = one["user_agent"]
    if one["program"] is None:
        hello = one["client_hello"]
        return str(agent or "without a name") + (f" (TLS {hello})" if hello else "")
    return f"{one['program']} ({agent})" if agent else str(one["program"])


def left(one: dict[str, Any]) -> str:
    """For how long it is still let through."""
    return seconds(max(0.0, round(datetime.fromisoformat(one["until"]).timestamp() - clock.wall())))


def _row(one: dict[str, Any]) -> tuple[Cell, ...]:
    return (
        Cell(one["id"]),
        Cell(one["host"]),
        Cell(client_of(one), "yellow"),
        Cell(one["address"]),
        Cell(ago(one["since"])),
        Cell(left(one)),
        Cell(one["why"]),
    )
