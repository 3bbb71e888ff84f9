"""`sidecar explain`: what happened to one request, or to all of a trace.

Law: the words are the admin port's; here they are only fitted to the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from urllib.parse import quote

from sidecar.cli.admin import Admin, Failed, NotThere, connect, telling_failures
from sidecar.cli.listing import MOST, listed, must_be_upstreams, whole_id
from sidecar.cli.terminal import Terminal, printable

_INDENT = 12
_MOST_ROWS = 500  # as many as are kept
_STEP = re.compile(r"( *\+[\d.]+ \w+)(  )(.*)")
_NOTE = re.compile(r"( {12})(decided by:|what would change it:)(.*)")
_TRACE = re.compile(r"(?:[0-9a-f]{2}-)?([0-9a-f]{32})(?:-[0-9a-f]{16}-[0-9a-f]{2})?")
_OTHER_IDS = {"job_": "a job of the outbox", "dlq_": "a dead letter", "rpl_": "a replay"}
_SHOWN_BY = {"a job of the outbox": "jobs show", "a dead letter": "dlq show", "a replay": "dlq replays"}
_NOTE_COLOURS = {"decided by:": "dim", "what would change it:": "cyan"}


@telling_failures
def explain(chosen: argparse.Namespace) -> int:
    admin = connect(chosen, os.environ)
    terminal = Terminal()
    paths = [f"/sessions/{quote(session_id, safe='')}" for session_id in _meant(admin, chosen)]
    if chosen.json:
        told = [admin.get(path) for path in paths]
        shown = {"items": told, "next_cursor": None} if chosen.trace is not None else told[0]
        terminal.line(json.dumps(shown, indent=2))
        return 0
    for number, path in enumerate(paths):
        if number:
            terminal.line()
        _tell(terminal, admin.text(path))
    return 0


def _meant(admin: Admin, chosen: argparse.Namespace) -> list[str]:
    """The ids of the sessions that are asked for; of a trace the oldest first."""
    given = [name for name in ("id", "last", "trace") if getattr(chosen, name)]
    if len(given) != 1 or (chosen.upstream is not None and not chosen.last):
        raise Failed("say which request: an ID, --last (with or without --upstream NAME), or --trace ID", 2)
    if chosen.id is not None:
        if (kind := _OTHER_IDS.get(chosen.id[:4])) is not None:
            raise Failed(f"{chosen.id[:80]!r} is {kind}: what happened to it tells `sidecar {_SHOWN_BY[kind]} ID`", 2)
        return [whole_id(admin, "session", chosen.id)]
    if chosen.last:
        return [_last(admin, chosen.upstream)]
    trace = _TRACE.fullmatch(chosen.trace.strip().lower())
    if trace is None:
        raise Failed(f"--trace {chosen.trace[:80]!r}: write the 32 hex digits of a trace, or a whole traceparent", 2)
    known = listed(admin, "/sessions", MOST, 1000, trace=trace[1]).items
    if not known:
        raise NotThere(f"no request of trace {trace[1]} is known; healthy ones are not kept, see `sidecar sessions`")
    return [session["session_id"] for session in reversed(known)]


def _last(admin: Admin, upstream: str | None) -> str:
    """The one that ended last. What an open breaker refuses is listed by the first of its row: the last may be later
    than everything else."""
    newest = admin.get("/sessions", limit=1, upstream=upstream)["items"]
    if not newest:
        must_be_upstreams(admin, upstream)
        raise NotThere("no request is known: kept are those that were retried, failed, refused or slow")
    refused = admin.get("/sessions", limit=_MOST_ROWS, upstream=upstream, outcome="breaker_open")["items"]
    rows = [one["refusals"] for one in refused if one["refusals"] is not None]
    ends = [(newest[0]["end_time"], newest[0]["session_id"])]
    ends += [(row["last_at"], row["last_session_id"]) for row in rows]
    return str(max(ends, key=lambda end: end[0])[1])


def _tell(terminal: Terminal, text: str) -> None:
    summary, *steps = text.splitlines()
    for line in terminal.wrapped(printable(summary), 0):
        terminal.line(terminal.paint(line, "bold"))
    for step in steps:
        for number, line in enumerate(terminal.wrapped(printable(step), _INDENT)):
            terminal.line(_coloured(terminal, line) if number == 0 else line)


def _coloured(terminal: Terminal, line: str) -> str:
    if found := _STEP.fullmatch(line):
        return terminal.paint(found[1], "dim") + found[2] + found[3]
    if found := _NOTE.fullmatch(line):
        return found[1] + terminal.paint(found[2], _NOTE_COLOURS[found[2]]) + found[3]
    return line
