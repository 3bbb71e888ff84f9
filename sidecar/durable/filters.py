"""Which entries are meant, and the cursors that lists give out.

Law: pure. Whatever cannot be understood is refused with the name of the field; nothing is guessed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, fields
from typing import Any

from sidecar.durable.trouble import BadInput

_WORD = re.compile(r"([^\W_]+)(\*?)")

LARGEST_PAGE = 500


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
        raise BadInput("cursor", "is not a cursor that a list gave out", "leave it out to begin anew") from None
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
