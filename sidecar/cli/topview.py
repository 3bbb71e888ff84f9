"""One frame of `sidecar top`: a snapshot as lines that fit the screen.

Law: pure. The head is always there; upstreams get what room they need, but leave some for events; what does not fit is
counted, never silently left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sidecar.cli.snapshot import Snapshot, UpstreamSeen
from sidecar.cli.table import Cell, Column, Table
from sidecar.cli.terminal import Terminal, printable
from telemetry.sentences import seconds

_COLUMNS = (
    Column("UPSTREAM", flexible=True),
    Column("REQ/S", right=True),
    Column("OK 5M", importance=6, right=True),
    Column("P50", importance=3, right=True),
    Column("P99", importance=4, right=True),
    Column("BUSY", importance=2, right=True),
    Column("RETRY/S", importance=7, right=True),
    Column("BUDGET", importance=1, right=True),
    Column("BREAKERS", importance=9),
    Column("DEAD", importance=8, right=True),
    Column("LAST ERROR (UTC)", flexible=True, importance=5),
)
_FEWEST_EVENTS = 4
_BAD_WORDS = ("failure", "opened", "dead_letter", "escalated")
_GOOD_WORDS = ("success", "closed", "replayed")
_WORTH_TELLING = ("reason", "outcome", "status", "endpoint", "dlq_id", "about", "to_state", "summary")


class Canvas(Terminal):
    """A terminal that keeps its lines."""

    def __init__(self, width: int | None, *, colour: bool) -> None:
        self.width = width
        self.colour = colour
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


def frame(
    snapshot: Snapshot, url: str, clock: str, *, width: int | None, height: int | None, colour: bool, trouble: str = ""
) -> list[str]:
    """`height` None: as long as it gets. `trouble` says why the snapshot is an old one."""
    canvas = Canvas(width, colour=colour)
    _head(canvas, snapshot, url, clock, trouble)
    room = None if height is None else max(1, height - len(canvas.lines) - _FEWEST_EVENTS - 3)
    _upstreams(canvas, snapshot.upstreams, room)
    canvas.line()
    room = None if height is None else height - len(canvas.lines) - 1
    _events(canvas, snapshot.events, room)
    return canvas.lines if height is None else canvas.lines[:height]


def _head(canvas: Canvas, snapshot: Snapshot, url: str, clock: str, trouble: str) -> None:
    ready = canvas.paint("ready", "green") if snapshot.ready else canvas.paint("NOT READY", "red")
    ready = canvas.paint("NO ANSWER", "red") if trouble else ready
    canvas.line(f"{canvas.paint('sidecar', 'bold')} {snapshot.version} at {url}  {ready}  {clock}")
    open_ones = sum(one.breakers.get("open", 0) for one in snapshot.upstreams)
    parts = [
        f"{_rate(snapshot.requests)} req/s",
        f"{_rate(snapshot.retries)} retries/s" if snapshot.retries_enabled else canvas.paint("retries OFF", "yellow"),
        f"{snapshot.in_flight} in flight",
        canvas.paint(_counted(open_ones, "breaker") + " open", "red" if open_ones else None),
        canvas.paint(_counted(snapshot.dead_letters, "dead letter"), "yellow" if snapshot.dead_letters else None),
    ]
    canvas.line(" · ".join(parts))
    canvas.line(canvas.paint(printable(trouble)[: canvas.width], "red"))


def _upstreams(canvas: Canvas, upstreams: Sequence[UpstreamSeen], room: int | None) -> None:
    if not upstreams:
        canvas.line("No upstreams yet: one appears with its first request, or when the configuration names it.")
        return
    shown = upstreams if room is None or len(upstreams) <= room else upstreams[: max(0, room - 1)]
    rows = list(map(_row, shown))
    table = Table(canvas, _COLUMNS, rows or [[Cell("")] * len(_COLUMNS)])
    table.head()
    table.show(rows)
    if len(shown) < len(upstreams):
        canvas.line(canvas.paint(f"… and {len(upstreams) - len(shown)} more", "dim"))


def _row(one: UpstreamSeen) -> Sequence[Cell]:
    worst = next((state for state in ("open", "half_open") if state in one.breakers), None)
    told = ", ".join(f"{count} {state}" for state, count in sorted(one.breakers.items())) or "-"
    told += " (forced)" if one.forced else ""
    colour = {"open": "red", "half_open": "yellow"}.get(worst or "", "green" if one.breakers else None)
    rate = one.success_rate
    return (
        Cell(one.name),
        Cell(_rate(one.requests)),
        Cell("-" if rate is None else f"{rate:.1%}", None if rate is None or rate >= 0.99 else "yellow"),
        Cell("-" if one.p50 is None else seconds(one.p50)),
        Cell("-" if one.p99 is None else seconds(one.p99)),
        Cell(str(one.in_flight) + (f"+{one.gate_waiting}" if one.gate_waiting else "")),
        Cell(_rate(one.retries), "yellow" if one.retries else None),
        Cell(f"{one.budget:.0%}", "red" if one.budget <= 0 else None),
        Cell(told, colour),
        Cell(str(one.dead_letters), "yellow" if one.dead_letters else None),
        Cell(one.last_error or "-"),
    )


def _events(canvas: Canvas, events: Sequence[Mapping[str, Any]], room: int | None) -> None:
    canvas.line(canvas.paint("LAST EVENTS (UTC)", "dim"))
    if not events:
        canvas.line("Nothing was retried and nothing changed.")
    for event in events if room is None else events[: max(0, room)]:
        kind = str(event.get("event_type", ""))
        colour = "red" if any(word in kind for word in _BAD_WORDS) else None
        colour = "green" if any(word in kind for word in _GOOD_WORDS) else colour
        text = printable(f"{str(event.get('timestamp', ''))[11:19]}  {kind:<26} {_told(event)}")
        canvas.line(canvas.paint(text if canvas.width is None else text[: canvas.width], colour))


def _told(event: Mapping[str, Any]) -> str:
    """What to know about it, and in the end the session that `sidecar explain` takes."""
    context = event.get("context") or {}
    upstream = str(context.get("upstream") or "")
    words = [upstream, str(event.get("operation") or "").removesuffix(upstream).strip()]
    words = [word for word in words if word != event.get("event_type")]
    error = event.get("error") or context.get("last_error") or {}
    if event.get("event_type") == "retry_attempt":  # what became of the session is another event
        words += [f"attempt {event.get('attempt')}", f"after {error.get('type')}", str(context.get("endpoint") or "")]
    else:
        words += [str(error.get("type") or ""), *(str(context[name]) for name in _WORTH_TELLING if context.get(name))]
    return "  ".join(dict.fromkeys(word for word in [*words, str(event.get("session_id") or "")] if word))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}"
