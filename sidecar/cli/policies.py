"""`sidecar policies`: the retry policies in force, changes to them at run time, and the way back."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from sidecar.cli.admin import Admin, Failed, NotThere, connect, telling_failures
from sidecar.cli.table import Cell, Column, Table
from sidecar.cli.terminal import Terminal, printable
from sidecar.cli.whenever import left
from telemetry.sentences import seconds

_COLUMNS = (
    Column("POLICY"),
    Column("FROM"),
    Column("ATTEMPTS", right=True),
    Column("BACKOFF", flexible=True, importance=3),
    Column("TIMEOUTS", flexible=True, importance=2, narrow=14),
    Column("USED BY", flexible=True, importance=1),
)


@telling_failures
def policies(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    terminal = Terminal()
    if chosen.order is None:
        answer = admin.get("/policies")
    elif chosen.order == "set":
        answer = _set(admin, chosen)
    else:
        answer = admin.delete(_path(chosen.name), reason=chosen.reason)
    if chosen.json:
        terminal.line(json.dumps(answer, indent=2))
        return 0
    if chosen.order == "remove" and answer["policy"] is None:
        terminal.line(f"There is no policy {printable(chosen.name)} any more.")
        return 0
    shown = answer.get("items") or [answer["policy"] if chosen.order == "remove" else answer]
    table = Table(terminal, _COLUMNS, rows := list(map(_row, shown)))
    table.head()
    table.show(rows)
    if chosen.order == "set" and not answer["used_by"]:
        name = printable(chosen.name)
        terminal.line(f"Nothing uses {name}: let an upstream or an operation name it, or a call (x-sidecar-policy).")
    return 0


def _set(admin: Admin, chosen: argparse.Namespace) -> Any:
    """Keys that were given before stay; those of this call lie over them."""
    changes = dict(map(_change, chosen.changes))
    try:
        before = admin.get(_path(chosen.name))
        kept = {key: before["policy"][key] for key in before["changed"]}
    except NotThere:
        kept = {}
    return admin.put(_path(chosen.name), kept | changes, reason=chosen.reason, ttl=chosen.ttl)


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise Failed(f"{text[:60]!r} is not KEY=VALUE, as in max_attempts=2", 2)
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value  # a word: exponential, full


def _path(name: str) -> str:
    return f"/policies/{quote(name, safe='')}"


def _row(shown: dict[str, Any]) -> Sequence[Cell]:
    policy, origin = shown["policy"], shown["origin"]
    backoff = f"{policy['backoff_type']} from {seconds(policy['base_delay'])} to {seconds(policy['max_delay'])}"
    return (
        Cell(shown["id"]),
        _origin(origin, shown["until"]),
        Cell(str(policy["max_attempts"]) if policy["enabled"] else "1 (off)"),
        Cell(f"{backoff}, jitter {policy['jitter_type']}"),
        Cell(f"{seconds(policy['attempt_timeout'])}, {seconds(policy['total_timeout'])} in all"),
        Cell(", ".join(shown["used_by"]) or "-"),
    )


def _origin(origin: str, until: str | None) -> Cell:
    if origin != "runtime":
        return Cell(origin)
    return Cell(origin, "yellow") if until is None else Cell(f"{origin}, {left(until)}", "yellow")
