"""`sidecar breakers`: their states and last changes, and orders to them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from sidecar.cli.admin import Admin, Failed, NotThere, connect, telling_failures
from sidecar.cli.table import Cell, Column, Table, when
from sidecar.cli.terminal import Terminal, printable

_COLOURS = {"closed": "green", "half_open": "yellow", "open": "red"}
_COLUMNS = (
    Column("UPSTREAM"),
    Column("ENDPOINT"),
    Column("STATE"),
    Column("FAILED", importance=3, right=True),
    Column("LAST CHANGE (UTC)", importance=2, brief="CHANGED"),
    Column("NEXT PROBE (UTC)", importance=4, brief="PROBE"),
    Column("FORCED", flexible=True, importance=5),
)
_CHANGES_SHOWN = 10


@telling_failures
def breakers(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    terminal = Terminal()
    answer = _all(admin) if chosen.order is None else _ordered(admin, chosen)
    if chosen.json:
        terminal.line(json.dumps(answer, indent=2))
        return 0
    items = answer["items"]
    if not items:
        terminal.line("No breakers yet: an endpoint gets one with its first request, or when `endpoints` names it.")
        return 0
    table = Table(terminal, _COLUMNS, rows := list(map(_row, items)))
    table.head()
    table.show(rows)
    changes = answer.get("transitions", [])[:_CHANGES_SHOWN]
    if changes:
        terminal.line()
        terminal.line(terminal.paint("Last changes, newest first:", "dim"))
    for change in changes:
        line = (
            f"{_time(change['timestamp'])}  {change['upstream']} at {change['endpoint']}: "
            f"{change['from_state']} → {change['to_state']}, {change['reason']}"
        )
        for part in terminal.wrapped(printable(line), 16):
            terminal.line(part)
    return 0


def _all(admin: Admin) -> dict[str, Any]:
    answer: dict[str, Any] = admin.get("/breakers", limit=1000)
    while answer["next_cursor"] is not None:
        page = admin.get("/breakers", limit=1000, cursor=answer["next_cursor"])
        answer = {**answer, "items": answer["items"] + page["items"], "next_cursor": page["next_cursor"]}
    return answer


def _ordered(admin: Admin, chosen: argparse.Namespace) -> dict[str, Any]:
    order = {"ttl": getattr(chosen, "ttl", None), "reason": chosen.reason}
    try:
        answer: dict[str, Any] = admin.post(
            f"/breakers/{quote(chosen.upstream, safe='')}/{chosen.order}",
            {name: value for name, value in order.items() if value is not None},
            endpoint=chosen.endpoint,
        )
    except NotThere as no_such:
        raise Failed(str(no_such), 2) from None  # a wrong name is wrong use
    return answer


def _row(breaker: dict[str, Any]) -> Sequence[Cell]:
    calls = breaker["failure_count"] + breaker["success_count"]
    forced = breaker["forced"]
    told = ""
    if forced is not None:
        until = "until reset" if forced["until"] is None else f"until {_time(forced['until'])}"
        told = f"{forced['state']} {until}: {forced['reason']}"
    return (
        Cell(breaker["upstream"]),
        Cell(breaker["endpoint"]),
        Cell(breaker["state"], _COLOURS.get(breaker["state"])),
        Cell(f"{breaker['failure_count']} of {calls}"),
        when(breaker["last_state_change"]),
        when(breaker["next_probe_at"]),
        Cell(told),
    )


def _time(timestamp: str | None) -> str:
    return "-" if timestamp is None else f"{timestamp[5:10]} {timestamp[11:19]}"
