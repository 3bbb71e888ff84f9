"""`sidecar dlq groups`, and what `annotate` and `discard` do to all that fit a filter.

Law: how many it would be is said before anything is changed, and nothing is changed without a yes.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from sidecar.cli.admin import Admin, Failed
from sidecar.cli.dlq import which
from sidecar.cli.table import Cell, Column, Table
from sidecar.cli.terminal import Terminal, printable
from sidecar.cli.whenever import ago
from telemetry.sentences import counted

_LONGEST = 900.0


def groups(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    found = admin.get("/dlq/groups", by=chosen.by, **which(chosen))
    if chosen.json:
        terminal.line(json.dumps(found, indent=2))
        return 0
    if not found["items"]:
        terminal.line("No such dead letters." if which(chosen) else "No dead letters are kept here.")
        return 0
    words = list(found["items"][0]["group"])
    columns = (
        Column("COUNT", right=True),
        *(Column(word.upper().replace("_", " "), flexible=True, importance=5) for word in words),
        Column("OLDEST", importance=2),
        Column("NEWEST", importance=3),
    )
    rows = [
        (
            Cell(str(item["entries"])),
            *(Cell(item["group"][word] or "-") for word in words),
            Cell(ago(item["oldest"]), "dim"),
            Cell(ago(item["newest"]), "dim"),
        )
        for item in found["items"]
    ]
    table = Table(terminal, columns, rows)
    table.head()
    table.show(rows)
    left_out = found["total"] - len(rows)
    more = f"; the smallest {left_out} groups are not shown" if left_out else ""
    terminal.line(
        terminal.paint(
            f"{counted(found['entries'], 'dead letter')} in {counted(found['total'], 'group')}{more}.", "dim"
        )
    )
    return 0


def change(
    admin: Admin, terminal: Terminal, chosen: argparse.Namespace, path: str, change: dict[str, Any], verb: str
) -> int:
    order = {**change, "filter": which(chosen), "all": chosen.all}
    would = admin.post(path, {**order, "dry_run": True})
    if chosen.dry_run:
        terminal.line(
            json.dumps(would, indent=2) if chosen.json else f"{counted(would['fit'], 'dead letter')} would be changed."
        )
        return 0
    if not would["fit"]:
        raise Failed("no dead letter fits, so nothing was changed")
    if not chosen.yes:
        _ask(f"{verb} {counted(would['fit'], 'dead letter')}?")
    done = admin.post(path, order, patience=_LONGEST)
    if chosen.json:
        terminal.line(json.dumps(done, indent=2))
    else:
        terminal.line(f"{done['changed']} of {counted(done['fit'], 'dead letter')} changed.")
        for why, number in done["refused"].items():
            terminal.line(printable(f"  {number} left as they are: {why}"))
    return 0 if done["changed"] else 1


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise Failed("nothing was changed: nobody is there to ask, so say --yes", 2)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failed("nothing was changed")
