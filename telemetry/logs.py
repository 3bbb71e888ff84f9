"""Log lines on standard error: one per line, in the words of OpenTelemetry's log model, of ECS, or for people.

Law: a line is written for a person who was not there: what happened, to what, and what to do. Writing never raises.
The healthy path writes nothing. While there is a writer every line goes through its thread, because a pipe that nobody
reads blocks whoever writes to it: lines are dropped rather than waited for, those about traffic (`event`, `exception`)
are limited in rate too, and what was left out is counted and told. Before and after there is one, lines are written at
once; the last ones, after it, are waited for, but not for long.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import TextIO

import orjson

from telemetry.names import LEVELS, Event, Field
from telemetry.rates import TokenBuckets
from telemetry.redact import Redactor
from telemetry.timestamps import rfc3339
from telemetry.writer import Writer

SEVERITY = {"debug": ("DEBUG", 5), "info": ("INFO", 9), "warn": ("WARN", 13), "error": ("ERROR", 17)}
_RANK = {level: rank for rank, level in enumerate(LEVELS)}
_RATE, _BURST = 10.0, 100.0  # lines per second for one (event, upstream)
_PATIENCE = 1.0  # seconds for a last line

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
        self._ending = False
        self._stuck = False
        self._buckets = TokenBuckets(_RATE, _BURST)
        self._redact: Callable[[str], str] = Redactor().clauses
        self._left_out: Counter[tuple[str, str]] = Counter()
        self.suppressed: MutableMapping[str, int] = dict.fromkeys(LEVELS, 0)
        self.configure(form, level)

    def configure(self, form: str, level: str) -> None:
        """At the start and on each reload."""
        self._format = {"json": _json, "ecs": _ecs, "text": _text}[form]
        self._least = _RANK[level]
        self.debugging = level == "debug"

    def attach(
        self,
        writer: Writer,
        suppressed: MutableMapping[str, int],
        redact: Callable[[str], str] | None = None,
    ) -> None:
        """From now on lines go through this thread, and those left out are counted here."""
        self._writer = writer
        self.suppressed = suppressed
        self._redact = redact or self._redact

    def detach(self) -> None:
        """The thread is about to end: what it has is written, then every line at once again, all within bounds.
        Not for the event loop."""
        if self._writer is not None:
            self._writer.flush(_PATIENCE)
            self._ending = True
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
            self.leave_out(event, level)
        else:
            self._hand_over(self._make, level, event, self._wall(), fields)

    def exception(self, body: str, error: BaseException, **fields: object) -> None:
        """Our own fault: with the frames, at every level, because nothing else will show where it happened. What it
        was about when it failed may be in there, so everything is redacted, line by line."""
        at = self._wall()
        if not self._buckets.take((Event.INTERNAL_ERROR, type(error)), at):
            self.leave_out(Event.INTERNAL_ERROR, "error")
            return
        frames = "".join(traceback.format_exception(error)).splitlines()
        said = {
            Field.BODY: self._redact(body),
            "exception": self._redact(repr(error)),
            "frames": "\n".join([self._redact(line) for line in frames]) + "\n",
            **{name: self._redact(value) if isinstance(value, str) else value for name, value in fields.items()},
        }
        self._hand_over(self._write, "error", Event.INTERNAL_ERROR, at, said)

    # ---- what is left out ----------------------------------------------------------------------------------------

    def leave_out(self, event: str, level: str, count: int = 1) -> None:
        """So many lines, or records of another file, were not written."""
        self.suppressed[level] = self.suppressed.get(level, 0) + count
        self._left_out[event, level] += count

    def tell_left_out(self) -> None:
        """Once a minute: one line about the lines that were left out since the last one."""
        left_out, self._left_out = self._left_out, Counter()
        if left_out:
            each = ", ".join(f"{count} × {event} ({level})" for (event, level), count in left_out.most_common())
            body = (
                f"{sum(left_out.values())} lines were left out: {each}; an event of an upstream may have {_RATE:g} per "
                "second, and the disk and whoever reads standard error must keep up; the metrics count everything"
            )
            if _RANK["warn"] >= self._least and not self._hand_over(
                self._write, "warn", Event.SUPPRESSED, self._wall(), {Field.BODY: body}
            ):
                self._left_out.update(left_out)  # told when it can be

    # ---- writing -------------------------------------------------------------------------------------------------

    def _now(self, level: str, event: str, body: str, fields: Fields) -> None:
        if _RANK[level] >= self._least:
            self._hand_over(self._write, level, event, self._wall(), {Field.BODY: body, **fields})

    def _hand_over(self, write: Callable[..., None], level: str, event: str, *facts: object) -> bool:
        writer = self._writer
        if writer is not None:
            taken = writer.put(write, level, event, *facts)
        elif self._ending:
            taken = self._within_bounds(write, level, event, *facts)
        else:
            write(level, event, *facts)
            taken = True
        if not taken:
            self.leave_out(event, level)
        return taken

    def _within_bounds(self, write: Callable[..., None], *arguments: object) -> bool:
        """A last line, in a thread that may be left behind: the process ends although nobody reads its pipe."""
        if self._stuck:
            return False
        last = threading.Thread(target=write, args=arguments, name="last-line", daemon=True)
        last.start()
        last.join(_PATIENCE)
        self._stuck = last.is_alive()
        return not self._stuck

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
                _send(stream, written + "\n")
        except (OSError, ValueError, TypeError):
            pass  # nobody can be told that telling failed


def _send(stream: TextIO, text: str) -> None:
    """Past Python's buffer where there is one: a thread stuck in it holds its lock, and the interpreter, which flushes
    it at the end, would abort."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if raw is None:
        stream.write(text)
        stream.flush()
        return
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        sent = raw.write(left)
        if not sent:  # a pipe that does not block, and is full
            return
        left = left[sent:]


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
