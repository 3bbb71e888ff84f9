"""What people write to say which entries they mean, and the cursors that lists give out.

Law: pure. Whatever cannot be understood is refused with the name of the field; nothing is guessed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from sidecar.durable.trouble import BadInput
from sidecar.durable.verdict import WORDS
from sidecar.durable.workflow import STATUSES

_AGO = re.compile(r"([0-9]{1,6})([smhd])")
_WORD = re.compile(r"([^\W_]+)(\*?)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Filter:
    """Empty: everything. Several words in one field mean any of them."""

    status: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    error_class: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    q: str = ""
    workflow: str = ""

    def shown(self) -> dict[str, Any]:
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) not in ((), None, "")}


def parse_filter(given: Mapping[str, str], now: float) -> Filter:
    """From query parameters; `limit` and `cursor` are read by others. Raises BadInput."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name in ("limit", "cursor"):
            continue
        if name in ("since", "until"):
            values[name] = moment(name, text, now)
        elif name in ("q", "workflow"):
            if len(text) > 200:
                raise BadInput(name, "must have at most 200 characters")
            values[name] = text.strip()
        elif name in ("status", "upstream", "error_class", "verdict"):
            values[name] = _words(name, text)
        else:
            names = ", ".join(item.name for item in fields(Filter))
            raise BadInput(name, f"is not a filter; there are {names}")
    found = Filter(**values)
    if found.since is not None and found.until is not None and found.since >= found.until:
        raise BadInput("until", "must be after `since`")
    if found.q:
        match_of(found.q)
    return found


def _words(name: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    allowed = {"status": STATUSES, "verdict": WORDS}.get(name)
    for word in words:
        if allowed is not None and word not in allowed:
            raise BadInput(name, f"{word[:40]!r} is not one of {', '.join(allowed)}")
        if name == "error_class" and not _CODE.fullmatch(word):
            raise BadInput(name, f"{word[:40]!r} is not an error code, as in NETWORK_TIMEOUT")
    if not words or len(words) > 50:
        raise BadInput(name, "must name 1 to 50 values, separated by commas")
    return words


def moment(name: str, text: str, now: float) -> float:
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now - int(ago[1]) * _UNITS[ago[2]]
    if text.isascii() and text.replace(".", "", 1).isdigit() and len(text) < 20:
        return float(text)
    try:
        given = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise BadInput(name, "must be a time: 2026-01-29T12:00:00Z, seconds since 1970, or 15m, 2h, 3d ago") from None
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


def mark_of(wanted: Filter, oldest_first: bool) -> str:
    """A cursor is good for the filter it was made for; times may be relative, so they may move."""
    words = (wanted.status, wanted.upstream, wanted.error_class, wanted.verdict, wanted.q, wanted.workflow)
    return hashlib.sha256(repr((words, oldest_first)).encode()).hexdigest()[:8]


def write_cursor(seq: int, mark: str) -> str:
    return base64.urlsafe_b64encode(f"{mark}{seq:x}".encode()).decode().rstrip("=")


def read_cursor(cursor: str, mark: str) -> int:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        seq = int(text[8:], 16)
    except (ValueError, binascii.Error):
        raise BadInput("cursor", "is not a cursor that a list gave out") from None
    if text[:8] != mark:
        raise BadInput("cursor", "was made for another filter", "start again without a cursor")
    return seq


def match_of(q: str) -> str:
    """Every word of `q`; one with a `*` behind it stands for all that begin like that. Quoted, so that nothing in it
    is syntax."""
    words = _WORD.findall(q)
    if not words:
        raise BadInput("q", "has no word to look for")
    return " ".join(f'"{word}"{star}' for word, star in words[:20])
