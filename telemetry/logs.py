"""Log lines on standard error: one per line, in the words of OpenTelemetry's log model, of ECS, or for people.

Law: a line is written for a person who was not there: what happened, to what, and what to do. Writing never raises.
The healthy path writes nothing. Lines about the life of the process (`info`, `warn`, `error`) are written at once, so
that the last one before an end is seen; lines about traffic (`event`, `exception`) go through the writer's thread,
limited in rate and dropped rather than waited for, and what was left out is counted and told.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import TextIO

import orjson

from telemetry.names import LEVELS, Event, Field
from telemetry.rates import TokenBuckets
from telemetry.timestamps import rfc3339
from telemetry.writer import Writer

SEVERITY = {"debug": ("DEBUG", 5), "info": ("INFO", 9), "warn": ("WARN", 13), "error": ("ERROR", 17)}
_RANK = {level: rank for rank, level in enumerate(LEVELS)}
_RATE, _BURST = 10.0, 100.0  # lines per second for one (event, upstream)

# OpenTelemetry's names → Elastic's; the semantic conventions below them are the same in both.
_ECS = {
    Field.TIMESTAMP: "@timestamp",
    Field.SEVERITY: "log.level",
    Field.SEVERITY_NUMBER: "event.severity",
    Field.EVENT: "event.action",
    Field.BODY: "message",
    Field.TRACE_ID: "trace.id",
    Field.SPAN_ID: "span.id",
}

Fields = Mapping[str, object]


class Log:
    """Writes lines. `stream` is standard error unless a test says otherwise."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        form: str = "json",
        level: str = "info",
        wall: Callable[[], float] = time.time,  # noqa: TID251  # before the proxy, whose clock it is, there is a log
    ) -> None:
        self._stream = stream
        self._wall = wall
        self._one_at_a_time = threading.Lock()
        self._writer: Writer | None = None
        self._buckets = TokenBuckets(_RATE, _BURST)
        self.suppressed: MutableMapping[str, int] = dict.fromkeys(LEVELS, 0)
        self.configure(form, level)

    def configure(self, form: str, level: str) -> None:
        """At the start and on each reload."""
        self._format = {"json": _json, "ecs": _ecs, "text": _text}[form]
        self._least = _RANK[level]
        self.debugging = level == "debug"

    def attach(self, writer: Writer, suppressed: MutableMapping[str, int]) -> None:
        """From now on lines about traffic go through this thread, and those left out are counted here."""
        self._writer = writer
        self.suppressed = suppressed

    def detach(self) -> None:
        """The thread is about to end: every line is written at once again."""
        self._writer = None

    # ---- the life of the process ---------------------------------------------------------------------------------

    def debug(self, event: str, body: str, **fields: object) -> None:
        self._now("debug", event, body, fields)

    def info(self, event: str, body: str, **fields: object) -> None:
        self._now("info", event, body, fields)

    def warn(self, event: str, body: str, **fields: object) -> None:
        self._now("warn", event, body, fields)

    def error(self, event: str, body: str, **fields: object) -> None:
        self._now("error", event, body, fields)

    # ---- traffic -------------------------------------------------------------------------------------------------

    def event(
        self, level: str, event: str, about: str, now: float, fields: Callable[[], Fields], *, limited: bool = True
    ) -> None:
        """A line about traffic; `about` is the upstream. `fields` (with the body) are made in the writer's thread."""
        if _RANK[level] < self._least:
            return
        if limited and not self._buckets.take((event, about), now):
            self._leave_out(level)
        elif self._writer is None:
            self._make(level, event, self._wall(), fields)
        elif not self._writer.put(self._make, level, event, self._wall(), fields):
            self._leave_out(level)

    def exception(self, body: str, error: BaseException, **fields: object) -> None:
        """Our own fault: with the frames, because nothing else will show where it happened."""
        at = self._wall()
        if not self._buckets.take((Event.INTERNAL_ERROR, type(error)), at):
            self._leave_out("error")
            return
        frames = "".join(traceback.format_exception(error))
        said = {Field.BODY: body, "exception": repr(error), "frames": frames, **fields}
        if self._writer is None:
            self._write("error", Event.INTERNAL_ERROR, at, said)
        elif not self._writer.put(self._write, "error", Event.INTERNAL_ERROR, at, said):
            self._leave_out("error")

    # ---- writing -------------------------------------------------------------------------------------------------

    def _leave_out(self, level: str) -> None:
        self.suppressed[level] = self.suppressed.get(level, 0) + 1

    def _now(self, level: str, event: str, body: str, fields: Fields) -> None:
        if _RANK[level] >= self._least:
            self._write(level, event, self._wall(), {Field.BODY: body, **fields})

    def _make(self, level: str, event: str, at: float, fields: Callable[[], Fields]) -> None:
        self._write(level, event, at, fields())

    def _write(self, level: str, event: str, at: float, fields: Fields) -> None:
        text, number = SEVERITY[level]
        line = {
            Field.TIMESTAMP: rfc3339(at),
            Field.SEVERITY: text,
            Field.SEVERITY_NUMBER: number,
            Field.EVENT: event,
            **fields,
        }
        try:
            written = self._format(line)
            stream = self._stream or sys.stderr
            with self._one_at_a_time:
                stream.write(written + "\n")
                stream.flush()
        except (OSError, ValueError, TypeError):
            pass  # nobody can be told that telling failed


def _json(line: Fields) -> str:
    return orjson.dumps(line, default=str).decode()


def _ecs(line: Fields) -> str:
    renamed = {_ECS.get(name, name): value for name, value in line.items()}
    renamed["log.level"] = str(line[Field.SEVERITY]).lower()
    return orjson.dumps({**renamed, "ecs.version": "8.11.0"}, default=str).decode()


def _text(line: Fields) -> str:
    rest = dict(line)
    at, level, event, body = (
        str(rest.pop(name)) for name in (Field.TIMESTAMP, Field.SEVERITY, Field.EVENT, Field.BODY)
    )
    rest.pop(Field.SEVERITY_NUMBER)
    shown = " ".join(f"{name}={_shown(value)}" for name, value in rest.items() if value is not None)
    return f"{at} {level:5} {event}: {_printable(body)}" + (f"  {shown}" if shown else "")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return f'"{_printable(text)}"' if " " in text and isinstance(value, str) else _printable(text)


def _printable(text: str) -> str:
    """No line breaks, no terminal commands: a line is one line, whatever a peer sent."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
