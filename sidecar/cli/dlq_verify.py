"""`sidecar dlq verify`: is everything that was kept there, and whole?

Law: exit code 0 only when nothing is damaged and nothing is missing. What to do about each is said beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from sidecar.cli.admin import Admin, Failed
from sidecar.cli.terminal import Terminal, printable

_LONGEST = 3_600.0
_SHOWN = 20


def verify(admin: Admin, terminal: Terminal, chosen: argparse.Namespace) -> int:
    if chosen.accept and not (chosen.reason or "").strip():
        raise Failed("--accept needs --reason: say what you found out about what is missing", 2)
    order = {"accept": chosen.accept, **({"reason": chosen.reason} if chosen.reason else {})}
    found = admin.post("/dlq/verify", order, patience=_LONGEST)
    if chosen.json:
        terminal.line(json.dumps(found, indent=2))
    else:
        for text in _told(found):
            for line in terminal.wrapped(printable(text), 2):
                terminal.line(line)
    whole = not found["damaged_entries"] and not found["quarantined"]
    return 0 if whole and (found["accepted"] or not found["missing"]) else 1


def _told(found: dict[str, Any]) -> Iterator[str]:
    repaired = f", {found['repaired']} disagreements put right" if found["repaired"] else ""
    yield f"{found['entries']} entries read with everything that belongs to them{repaired}."
    for each in found["damaged_entries"][:_SHOWN]:
        yield f"  {each['dlq_id']} is damaged: {each['why']}"
    for each in found["quarantined"][:_SHOWN]:
        yield f"  {each['ident']} was set aside at {each['at']}: {each['why']}"
    more = sum(max(0, len(found[name]) - _SHOWN) for name in ("damaged_entries", "quarantined"))
    if more:
        yield f"  and {more} more, with --json."
    if found["damaged_entries"] or found["quarantined"]:
        yield (
            "What is damaged is never sent. Put a body file or key back from a backup and verify again, bring the "
            "entry back from an export with `sidecar dlq import FOLDER`, or give it up with `sidecar dlq discard ID`."
        )
    for each in found["missing"]:
        yield f"  Missing since {each['at']}: {each['what']}"
    unclaimed = found["unclaimed"]
    if unclaimed["files"]:
        yield f"  {unclaimed['files']} body files ({unclaimed['bytes']} bytes) belong to no entry."
    if found["accepted"]:
        yield "Answered for: it is not said any more, and body files without an entry are removed."
    elif found["missing"] or unclaimed["files"]:
        yield "When you know what happened: sidecar dlq verify --accept --reason TEXT"
    if not any(found[name] for name in ("damaged_entries", "quarantined", "missing")):
        yield "Nothing is damaged or missing."
