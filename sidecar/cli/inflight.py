"""`sidecar inflight`: requests that have not ended, what each waits for, and since when; the oldest first."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from sidecar.cli.admin import connect, telling_failures
from sidecar.cli.listing import Listed, must_be_upstreams, tell
from sidecar.cli.table import Cell, Column
from sidecar.cli.terminal import Terminal
from telemetry.sentences import seconds

_COLUMNS = (
    Column("AGE", importance=5, right=True, least=7),
    Column("SESSION"),
    Column("UPSTREAM", flexible=True, importance=4, least=10),
    Column("REQUEST", flexible=True, importance=2, least=24),
    Column("WAITS FOR", least=11),
    Column("SINCE", right=True, least=7),
    Column("TRIES", importance=3, right=True),
    Column("LAST ERROR", flexible=True, importance=1, least=12),
)


@telling_failures
def inflight(chosen: argparse.Namespace) -> int:
    admin, terminal = connect(chosen, os.environ), Terminal()
    found = admin.get("/inflight", upstream=chosen.upstream, waits_for=chosen.waits_for, limit=chosen.limit)
    if not found["items"]:
        must_be_upstreams(admin, chosen.upstream)
    if chosen.json:
        terminal.line(json.dumps(found, indent=2))
    elif not found["items"]:
        terminal.line("Nothing is under way.")
    else:
        shown = Listed(found["items"], None, found["total"])
        tell(terminal, shown, _COLUMNS, [_row(one) for one in shown.items])
    return 0


def _row(one: dict[str, Any]) -> tuple[Cell, ...]:
    waits, kind = one["waits_for"], one["kind"]
    request = f"{one['method']} {one['url']}" + ("" if kind in ("request", "tunnel") else f" ({kind})")
    return (
        Cell(seconds(one["age"])),
        Cell(one["session_id"]),
        Cell(one["upstream"]),
        Cell(request),
        Cell(waits, "yellow" if waits in ("max_in_flight", "rate_limit_gate", "backoff") else None),
        Cell(seconds(one["waited"])),
        Cell(str(one["attempts"])),
        Cell(one["last_error"] or "-"),
    )
