"""One frame of `sidecar top`: a snapshot as lines that fit the screen.

Law: pure, told what time it is. The head is always there; upstreams get what room they need, but leave some for what
happens; what does not fit is counted, never silently left out. The last changes of breakers are always in sight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sidecar.cli.folding import Event, Fold, ago, folded, is_breaker, moment
from sidecar.cli.snapshot import ReplaySeen, Snapshot, UpstreamSeen
from sidecar.cli.table import Cell, Column, Table
from sidecar.cli.terminal import Terminal, printable
from sidecar.cli.topkeys import HELP, View
from telemetry.sentences import seconds

_COLUMNS = (
    Column("UPSTREAM", flexible=True, narrow=12),
    Column("REQ/S", right=True),
    Column("ERR/S", importance=11, right=True),
    Column("OK 10S", importance=10, right=True),
    Column("OK 5M", importance=8, right=True),
    Column("P50", importance=3, right=True),
    Column("P99", importance=4, right=True),
    Column("BUSY", importance=2, right=True),
    Column("RETRY/S", importance=5, right=True),
    Column("BUDGET", importance=1, right=True),
    Column("BREAKERS", importance=12),
    Column("DEAD", importance=6, right=True),
    Column("WHY", flexible=True, importance=9, narrow=21),
)
_FEWEST_EVENTS = 5
_BREAKERS_PINNED = 3
_REPLAYS_SHOWN = 3
_BAD_WORDS = ("failure", "opened", "dead_letter", "escalated")
_GOOD_WORDS = ("success", "closed", "replayed")
_WORTH_TELLING = ("reason", "why", "outcome", "status", "endpoint", "dlq_id", "about", "to_state", "summary")
_AGO = 10


class Canvas(Terminal):
    """A terminal that keeps its lines."""

    def __init__(self, width: int | None, *, colour: bool) -> None:
        self.width = width
        self.colour = colour
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


def frame(
    snapshot: Snapshot,
    url: str,
    now: float,
    *,
    width: int | None,
    height: int | None,
    colour: bool,
    trouble: str = "",
    view: View | None = None,
) -> list[str]:
    """`height` None: as long as it gets. `trouble` says why the snapshot is an old one; `now` is wall time. Without a
    `view` nobody is there to press keys."""
    canvas = Canvas(width, colour=colour)
    _head(canvas, snapshot, url, now, trouble)
    if view is not None and view.page != "main":
        _page(canvas, view)
        return canvas.lines if height is None else canvas.lines[:height]
    seen = View() if view is None else view
    below = Canvas(width, colour=colour)
    room = None if height is None else height - len(canvas.lines) - 1
    only = seen.filter.lower()
    events = [event for event in snapshot.events if not only or only in str(event).lower()]
    _pinned(below, [event for event in events if is_breaker(event)], snapshot.replays, now)
    upstreams = seen.upstreams(snapshot.upstreams)
    least = None if room is None else max(2, room - len(below.lines) - _FEWEST_EVENTS)
    _upstreams(canvas, upstreams, least, seen if view is not None else None, now, bool(snapshot.upstreams))
    canvas.line()
    canvas.lines += below.lines
    room = None if height is None else height - len(canvas.lines) - 1 - (view is not None)
    _events(canvas, [event for event in events if not is_breaker(event)], room, now)
    if view is not None and height is not None:
        canvas.lines = canvas.lines[: height - 1]
        canvas.lines += [""] * (height - 1 - len(canvas.lines))
        canvas.line(_footer(canvas, seen))
    return canvas.lines if height is None else canvas.lines[:height]


def _head(canvas: Canvas, snapshot: Snapshot, url: str, now: float, trouble: str) -> None:
    ready = canvas.paint("ready", "green") if snapshot.ready else canvas.paint("NOT READY", "red")
    ready = canvas.paint("NO ANSWER", "red") if trouble else ready
    clock = datetime.fromtimestamp(now, UTC).strftime("%H:%M:%S UTC")
    canvas.line(f"{canvas.paint('sidecar', 'bold')} {snapshot.version} at {url}  {ready}  {clock}")
    open_ones = sum(one.breakers.get("open", 0) for one in snapshot.upstreams)
    retries = f"{_rate(snapshot.retries)} retries/s" if snapshot.retries_enabled else "retries OFF"
    parts = [
        (f"{_rate(snapshot.requests)} req/s", None),
        (f"{_rate(snapshot.errors)} errors/s", "red" if snapshot.errors else None),
        (_counted(open_ones, "breaker") + " open", "red" if open_ones else None),
        (_counted(snapshot.dead_letters, "dead letter"), "yellow" if snapshot.dead_letters else None),
        (retries, None if snapshot.retries_enabled else "yellow"),
        (f"{snapshot.in_flight} in flight", None),
    ]
    while canvas.width is not None and sum(len(text) + 3 for text, _ in parts) - 3 > canvas.width and len(parts) > 1:
        parts.pop()
    canvas.line(" · ".join(canvas.paint(text, colour) for text, colour in parts))
    canvas.line(canvas.paint(printable(trouble)[: canvas.width], "red"))


def _page(canvas: Canvas, view: View) -> None:
    if view.page == "help":
        for key, text in HELP:
            for line in canvas.wrapped(f"  {key:<10}{text}", 12):
                canvas.line(line)
        return
    lines = [line for text in view.text for line in canvas.wrapped(printable(text), 12)]
    for number, line in enumerate(lines[view.scrolled :]):
        canvas.line(canvas.paint(line, "bold") if number + view.scrolled == 0 else line)


def _footer(canvas: Canvas, view: View) -> str:
    if view.typing:
        return canvas.paint(printable(f"/{view.filter}_   Enter keeps it, Esc drops it")[: canvas.width], "cyan")
    only = f"   only {view.filter!r}, Esc: all" if view.filter else ""
    text = f"? help   q end   Enter explain   / filter   s order: {view.order}{only}"
    return canvas.paint(printable(text)[: canvas.width], "dim")


# ---- upstreams ---------------------------------------------------------------------------------------------------


def _upstreams(
    canvas: Canvas, upstreams: Sequence[UpstreamSeen], room: int | None, view: View | None, now: float, some: bool
) -> None:
    if not upstreams:
        nothing = "No upstreams yet: one appears with its first request, or when the configuration names it."
        canvas.line("No upstream has this text in its name." if some else nothing)
        return
    rows_fit = len(upstreams) if room is None else max(1, room - 1)
    fits = len(upstreams) <= rows_fit
    chosen = -1 if view is None else min(view.chosen, len(upstreams) - 1)
    first = 0 if fits else max(0, min(chosen - rows_fit + 2, len(upstreams) - rows_fit + 1))
    shown = upstreams[first:] if fits else upstreams[first : first + rows_fit - 1]
    rows = [_row(one, now, chosen=first + number == chosen) for number, one in enumerate(shown)]
    table = Table(canvas, _COLUMNS, rows or [[Cell("")] * len(_COLUMNS)])
    table.head()
    table.show(rows)
    if len(shown) < len(upstreams):
        canvas.line(canvas.paint(f"… and {len(upstreams) - len(shown)} more", "dim"))


def _row(one: UpstreamSeen, now: float, *, chosen: bool) -> Sequence[Cell]:
    worst = next((state for state in ("open", "half_open") if state in one.breakers), None)
    told = ", ".join(f"{count} {state}" for state, count in sorted(one.breakers.items())) or "-"
    told += " (forced)" if one.forced else ""
    colour = {"open": "red", "half_open": "yellow"}.get(worst or "", "green" if one.breakers else None)
    why = "-"
    if one.last_error is not None:
        why = f"{one.last_error}, {ago(now - moment({'timestamp': one.last_error_at}))} ago"
    return (
        Cell(f"> {one.name}" if chosen else one.name, "bold" if chosen else None),
        Cell(_rate(one.requests)),
        Cell(_rate(one.errors), "red" if one.errors else None),
        _success(one.success_10s),
        _success(one.success_rate),
        Cell("-" if one.p50 is None else seconds(one.p50)),
        Cell("-" if one.p99 is None else seconds(one.p99)),
        Cell(str(one.in_flight) + (f"+{one.gate_waiting}" if one.gate_waiting else "")),
        Cell(_rate(one.retries), "yellow" if one.retries else None),
        Cell(f"{one.budget:.0%}", "red" if one.budget <= 0 else None),
        Cell(told, colour),
        Cell(str(one.dead_letters), "yellow" if one.dead_letters else None),
        Cell(why),
    )


def _success(rate: float | None) -> Cell:
    return Cell("-" if rate is None else f"{rate:.1%}", None if rate is None or rate >= 0.99 else "yellow")


# ---- what happens ------------------------------------------------------------------------------------------------


def _pinned(canvas: Canvas, changes: Sequence[Event], replays: Sequence[ReplaySeen], now: float) -> None:
    """What must not scroll away: the last changes of breakers, and replays that go on."""
    if changes:
        canvas.line(canvas.paint("BREAKER CHANGES", "dim"))
        for event in changes[:_BREAKERS_PINNED]:
            context: Mapping[str, Any] = event.get("context") or {}
            text = f"{context.get('upstream')} at {context.get('endpoint')} is {context.get('to_state')}: "
            text += str(context.get("why") or context.get("reason") or "")
            _line(canvas, now - moment(event), text.removesuffix(": "), _colour(event))
    if replays:
        canvas.line(canvas.paint("REPLAYS", "dim"))
        for replay in replays[:_REPLAYS_SHOWN]:
            canvas.line(_cut(canvas, _replay(replay)))
        if len(replays) > _REPLAYS_SHOWN:
            canvas.line(canvas.paint(f"… and {len(replays) - _REPLAYS_SHOWN} more", "dim"))


def _replay(replay: ReplaySeen) -> str:
    share = f", {replay.done / replay.total:.0%}" if replay.total else ""
    return f"{replay.job_id} is {replay.state}: {replay.done} of {replay.total}{share}" + (
        f", {replay.why}" if replay.why else ""
    )


def _events(canvas: Canvas, events: Sequence[Event], room: int | None, now: float) -> None:
    canvas.line(canvas.paint("EVENTS", "dim"))
    folds = folded(events)
    if not folds:
        canvas.line("Nothing was retried and nothing changed.")
    shown = folds if room is None or len(folds) <= room else folds[: max(0, room - 1)]
    for fold in shown:
        _line(canvas, now - fold.newest, _told(fold), _colour(fold.event))
    if len(shown) < len(folds):
        canvas.line(canvas.paint(f"… and {len(folds) - len(shown)} more", "dim"))


def _line(canvas: Canvas, age: float, text: str, colour: str | None) -> None:
    canvas.line(canvas.paint(_cut(canvas, f"{f'{ago(age)} ago':<{_AGO}}  {text}"), colour))


def _cut(canvas: Canvas, text: str) -> str:
    return printable(text) if canvas.width is None else printable(text)[: canvas.width]


def _colour(event: Event) -> str | None:
    kind = str(event.get("event_type", ""))
    if any(word in kind for word in _GOOD_WORDS):
        return "green"
    return "red" if any(word in kind for word in _BAD_WORDS) else None


def _told(fold: Fold) -> str:
    """What to know about it, and in the end the session that `sidecar explain` takes."""
    event = fold.event
    session = str(event.get("session_id") or "")
    if fold.times > 1:
        return f"{fold.told}  {session[:8]}".rstrip()
    context = event.get("context") or {}
    upstream, kind = str(context.get("upstream") or ""), str(event.get("event_type", ""))
    words = [upstream, kind, str(event.get("operation") or "").removesuffix(upstream).strip()]
    error = event.get("error") or context.get("last_error") or {}
    if kind == "retry_attempt":  # what became of the session is another event
        words += [f"attempt {event.get('attempt')}", f"after {error.get('type')}", str(context.get("endpoint") or "")]
    else:
        words += [str(error.get("type") or ""), *(str(context[name]) for name in _WORTH_TELLING if context.get(name))]
    return "  ".join(dict.fromkeys(word for word in [*words, session[:8]] if word))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}"
