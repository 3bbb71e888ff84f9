"""Lists that come in pages: as many items as were wanted, how many there are in all, and whole ids from parts of them.

Law: how many there are is the sidecar's count at the first page. A list ends at its limit, however fast it grows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from sidecar.cli.admin import Admin, Failed, NotThere
from sidecar.cli.table import Cell, Column, Table
from sidecar.cli.terminal import Terminal

MOST = 10_000
_WHOLE = {"session": 24, "dead_letter": 28, "job": 20, "replay": 16}
_NOUNS = {"session": "session", "dead_letter": "dead letter", "job": "job", "replay": "replay"}


class Listed(NamedTuple):
    """What was found."""

    items: list[dict[str, Any]]
    next_cursor: str | None
    total: int

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def listed(admin: Admin, path: str, limit: int, page: int, **query: str | None) -> Listed:
    """At most `limit`, in pages of at most `page`."""
    items: list[dict[str, Any]] = []
    cursor: str | None = None
    total = 0
    while True:
        found = admin.get(path, limit=min(limit - len(items), page), cursor=cursor, **query)
        total = found["total"] if cursor is None else total
        items += found["items"]
        cursor = found["next_cursor"]
        if cursor is None or len(items) >= limit:
            return Listed(items, cursor, max(total, len(items)))


def tell(terminal: Terminal, found: Listed, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """As a table, and below it how many there are: on standard error, so that scripts read rows only."""
    table = Table(terminal, columns, rows)
    table.head()
    table.show(rows)
    shown, total = len(found.items), found.total
    if shown < total:
        more = f"--limit {total} shows all" if total <= MOST else f"--limit {MOST} shows more"
        told = f"{shown:,} of {total:,}; {more}."
    else:
        told = f"{total:,} in all."
    terminal.flush()
    print(terminal.paint(told, "dim"), file=sys.stderr)


def must_be_upstreams(admin: Admin, names: str | None) -> None:
    """For a list that is empty: whether that is because no upstream is called so."""
    known = [item["name"] for item in listed(admin, "/upstreams", MOST, 1000).items] if names else []
    for name in (names or "").split(","):
        if name and name.strip() not in known:
            near = get_close_matches(name.strip(), known, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else f"; there is {', '.join(known) or 'none so far'}"
            raise Failed(f"no upstream is called {name.strip()[:60]!r}, and nothing of one is kept{hint}", 2)


def whole_id(admin: Admin, kind: str, given: str) -> str:
    """The id that a beginning or an end of one means."""
    if len(given) >= _WHOLE[kind] or len(given) < 4 or not given.replace("_", "").isalnum() or not given.isascii():
        return given  # whole already, or none: the sidecar says so in its own words
    fitting = [item["id"] for item in admin.get(f"/ids/{given}")["items"] if item["kind"] == kind]
    if len(fitting) > 1:
        noun = _NOUNS[kind]
        raise NotThere(f"more than one {noun} has an id that begins or ends with {given!r}: {', '.join(fitting)}")
    return fitting[0] if fitting else given
