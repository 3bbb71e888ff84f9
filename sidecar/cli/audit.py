"""`sidecar audit`: who changed what, newest first."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from sidecar.cli.admin import connect, telling_failures
from sidecar.cli.listing import listed, tell
from sidecar.cli.table import Cell, Column, when
from sidecar.cli.terminal import Terminal

_COLUMNS = (
    Column("TIME (UTC)", brief="UTC"),
    Column("WHO", flexible=True),
    Column("FROM", importance=1),
    Column("WHAT", flexible=True, narrow=20),
    Column("BEFORE → AFTER", flexible=True, importance=2),
    Column("REASON", flexible=True, importance=3, narrow=16),
)
_MOST_AT_ONCE = 1000
_MOST_KEYS = 4
_LONGEST_VALUE = 120


@telling_failures
def audit(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    wanted = {"since": chosen.since, "until": chosen.until, "who": chosen.who}
    wanted |= {"what": chosen.what, "about": chosen.about}
    found = listed(admin, "/audit", chosen.limit, _MOST_AT_ONCE, **wanted)
    terminal = Terminal()
    if chosen.json:
        terminal.line(json.dumps(found.as_json(), indent=2))
        return 0
    if not found.items:
        terminal.line("Nothing was changed, as far as is asked for.")
        return 0
    tell(terminal, found, _COLUMNS, list(map(_row, found.items)))
    return 0


def _row(entry: dict[str, Any]) -> Sequence[Cell]:
    claimed = entry["claimed_user"]
    return (
        when(entry["timestamp"]),
        Cell(entry["who"] if claimed is None else f"{entry['who']} ({claimed}?)"),
        Cell(entry["client"] or "-"),
        Cell(f"{entry['what']} {entry['about']}"),
        Cell(_difference(entry["before"], entry["after"])),
        Cell(entry["reason"] or ""),
    )


def _difference(before: Any, after: Any) -> str:
    """Short: `--json` has all of it."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
        shown = ", ".join(f"{key} {_short(before.get(key))} → {_short(after.get(key))}" for key in keys[:_MOST_KEYS])
        return shown + (f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else "")
    return "" if before is None and after is None else f"{_short(before)} → {_short(after)}"


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
