"""Log lines: one JSON object per line on standard error, with the field names of OpenTelemetry's log model.

Law: a line is written for a person who was not there: what happened, to what, and what to do. Writing never
raises. The healthy path writes nothing.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import TextIO

import orjson

_SEVERITY = {"debug": ("DEBUG", 5), "info": ("INFO", 9), "warn": ("WARN", 13), "error": ("ERROR", 17)}


class Log:
    """Writes lines. `stream` is standard error unless a test says otherwise."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def info(self, event: str, body: str, **fields: object) -> None:
        self._write("info", event, body, fields)

    def warn(self, event: str, body: str, **fields: object) -> None:
        self._write("warn", event, body, fields)

    def error(self, event: str, body: str, **fields: object) -> None:
        self._write("error", event, body, fields)

    def exception(self, body: str, error: BaseException, **fields: object) -> None:
        """Our own fault: with the frames, because nothing else will show where it happened."""
        frames = "".join(traceback.format_exception(error))
        self._write("error", "sidecar.internal_error", body, {"exception": repr(error), "frames": frames, **fields})

    def _write(self, level: str, event: str, body: str, fields: dict[str, object]) -> None:
        text, number = _SEVERITY[level]
        now = time.time()  # noqa: TID251  # log lines carry wall time; telemetry may not import the proxy's clock
        line = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
            "severity_text": text,
            "severity_number": number,
            "event_name": event,
            "body": body,
            **fields,
        }
        try:
            stream = self._stream or sys.stderr
            stream.write(orjson.dumps(line, default=str).decode() + "\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody can be told that telling failed
