"""A dead letter as a file: one field per line, sealed parts included, every line accounted for at the end.

Law: pure. What is written can be read back to the same entry and writes the same bytes again. A file that was cut off
or edited is refused with the number of the line; nothing in it is believed. Secrets stay sealed: whoever holds the
file without the key learns no more than a listing shows.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from sidecar.durable.entry import TIMES, Entry, ms
from sidecar.durable.trouble import BadInput
from telemetry.timestamps import rfc3339

FORMAT = "sidecar dead letter 1"
_SEALED = ("head", "body", "response", "original_head", "original_body")
_FILES = ("body_file", "original_body_file")
# Of the entry's own fields these are written inside `original_payload`, where S0 has them.
_IN_PAYLOAD = ("method", "host", "headers", "sealed_headers", "body")
_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Document:
    """An entry with what is sealed beside it; files by what they hold."""

    entry: Entry
    sealed: dict[str, bytes | None]
    files: dict[str, str | None]
    """body_file, original_body_file → sha256 of the file's content."""


def written(document: Document) -> bytes:
    record = document.entry.record()
    payload = {name: record.pop(name) for name in _IN_PAYLOAD}
    payload["sealed"] = {
        **{name: None if data is None else base64.b64encode(data).decode() for name, data in document.sealed.items()},
        **document.files,
    }
    for name in TIMES:
        record[name] = None if record[name] is None else rfc3339(record[name])
    for name in ("history", "notes"):
        record[name] = [{**item, "at": rfc3339(item["at"])} for item in record[name]]
    if record["remediation"] is not None:
        record["remediation"] = {**record["remediation"], "at": rfc3339(record["remediation"]["at"])}
    fields = {"format": FORMAT, "dlq_id": record.pop("dlq_id"), "original_payload": payload, **record}
    lines = [b"{"]
    lines += [orjson.dumps(name) + b": " + orjson.dumps(value) + b"," for name, value in fields.items()]
    return b"\n".join([*lines, _proof(lines), b"}", b""])


def _proof(lines: list[bytes]) -> bytes:
    return b'"integrity": ' + orjson.dumps({"lines": "".join(map(_digest, lines)), "count": len(lines)})


def read(data: bytes, name: str) -> Document:
    """Raises BadInput whose field is `name:line`."""
    lines = _checked_lines(data, name)
    try:
        fields: dict[str, Any] = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _wrong(name, error.lineno, f"is not JSON: {error.msg}") from None
    try:
        return _document(fields)
    except BadInput as wrong:
        raise _wrong(name, _line_of(lines, wrong.field), wrong.message) from None
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise _wrong(name, 2, f"is not a dead letter: {type(error).__name__} {error}") from None


def _document(fields: dict[str, Any]) -> Document:
    fields.pop("integrity")
    fields.pop("format")
    payload = fields.pop("original_payload")
    sealed = payload.pop("sealed")
    record = {**fields, **{name: payload[name] for name in _IN_PAYLOAD}}
    for name in TIMES:
        record[name] = _time(name, record[name])
    for name in ("history", "notes"):
        record[name] = [{**item, "at": _time(name, item["at"])} for item in record[name]]
    if record["remediation"] is not None:
        record["remediation"] = {**record["remediation"], "at": _time("remediation", record["remediation"]["at"])}
    return Document(
        entry=Entry.from_record(record),
        sealed={
            name: None if sealed[name] is None else base64.b64decode(sealed[name], validate=True) for name in _SEALED
        },
        files={name: sealed[name] for name in _FILES},
    )


def _time(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadInput(name, "must be a time, as in 2026-01-29T12:00:00.000Z")
    return ms(moment.timestamp())


def _checked_lines(data: bytes, name: str) -> list[bytes]:
    """Every line but the last two is as it was written."""
    lines = data.split(b"\n")
    if lines[-2:] != [b"}", b""] or len(lines) < 4 or not lines[-3].startswith(b'"integrity": '):
        raise _wrong(name, len(lines), "is cut off here, or was not written by a sidecar", "export it again")
    body = lines[:-3]
    try:
        proof = orjson.loads(lines[-3].removeprefix(b'"integrity": '))
        digests, count = str(proof["lines"]), int(proof["count"])
    except (ValueError, KeyError, TypeError):
        raise _wrong(name, len(lines) - 2, "was changed since it was written", "export it again") from None
    for number, line in enumerate(body, 1):
        if _digest(line) != digests[(number - 1) * _DIGITS : number * _DIGITS]:
            raise _wrong(name, number, "was changed since it was written", "export it again")
    if len(body) != count or len(digests) != count * _DIGITS:
        raise _wrong(name, len(body) + 1, "lines are missing here", "export it again")
    if lines[-3] != _proof(body):
        raise _wrong(name, len(lines) - 2, "was changed since it was written", "export it again")
    if len(body) < 2 or body[1] != b'"format": ' + orjson.dumps(FORMAT) + b",":
        raise _wrong(name, 2, f"must say {FORMAT!r}", "this file is of another kind or another release")
    return body


def _line_of(lines: list[bytes], field: str) -> int:
    first = field.partition(".")[0]
    where = "original_payload" if first in _IN_PAYLOAD else first
    start = orjson.dumps(where) + b": "
    return next((number for number, line in enumerate(lines, 1) if line.startswith(start)), 1)


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:_DIGITS]


def _wrong(name: str, line: int, message: str, hint: str = "") -> BadInput:
    return BadInput(f"{name}:{line}", message, hint)
