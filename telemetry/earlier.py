"""Sessions of earlier runs: what was worth looking at when the process that saw it has ended.

Law: written by the writer's thread, as it is shown and redacted; read only when somebody asks, line by line, in a
thread of its own, and never held in memory. Bounded by the size of the file. A line that cannot be read (the last one
of a crash) is as if it were not there.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from telemetry.rotating import RotatingFile
from telemetry.sessions import Wanted
from telemetry.timestamps import rfc3339

_MAX_BYTES = 8_388_608
_KEEP = 1


class EarlierPage(NamedTuple):
    """Some, newest first, how many were passed over so far (None: there are no more), and how many there are in all."""

    items: list[dict[str, Any]]
    next_cursor: str | None
    total: int


class EarlierSessions:
    """`run` names this process: what it wrote itself is not of an earlier one."""

    def __init__(
        self,
        path: Path,
        run: str,
        ttl: float,
        wall: Callable[[], float],
        told: Callable[[str], None],
        size: int = _MAX_BYTES,
    ) -> None:
        self._path = path
        self._run = run
        self._ttl = ttl
        self._wall = wall
        self.file = RotatingFile(path, size, _KEEP, ttl, wall, told)

    def configure(self, ttl: float) -> None:
        """On each reload."""
        self._ttl = self.file.ttl = ttl

    def write(self, shown: dict[str, Any]) -> None:
        """In the writer's thread."""
        self.file.append(orjson.dumps(shown, default=str))

    # ---- for whoever asks, in a thread ---------------------------------------------------------------------------

    def find(self, session_id: str) -> dict[str, Any] | None:
        named = session_id.encode()
        return next((one for one in self._newest_first(named) if one["session_id"] == session_id), None)

    def ids_like(self, part: str, limit: int) -> list[str]:
        """Ids that begin or end so, the newest first."""
        ids = (str(one["session_id"]) for one in self._newest_first(part.encode()))
        return list(islice((whole for whole in ids if whole.startswith(part) or whole.endswith(part)), limit))

    def page(self, wanted: Wanted, limit: int, cursor: str | None) -> EarlierPage:
        """ValueError for a cursor that was never given out."""
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
            raise ValueError("cursor: not one of this list; leave it out to begin with the newest")
        skipped, total, items = int(cursor or 0), 0, []
        for one in self._newest_first():
            if _fits(one, wanted):
                total += 1
                if skipped < total <= skipped + limit:
                    items.append(one)
        following = skipped + len(items)
        return EarlierPage(items, str(following) if following < total else None, total)

    def _newest_first(self, named: bytes = b"") -> Iterator[dict[str, Any]]:
        own, oldest = f'"{self._run}"'.encode(), rfc3339(self._wall() - self._ttl)
        for lines in self._files():
            for line in reversed(lines):
                if named not in line or own in line:
                    continue
                try:
                    one = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                if one["end_time"] >= oldest:
                    yield one

    def _files(self) -> Iterator[list[bytes]]:
        """The lines of each, the newest file first."""
        aside = sorted(self._path.parent.glob(f"{self._path.stem}-*{self._path.suffix}.gz"), reverse=True)
        for path in (self._path, *aside[:_KEEP]):
            try:
                raw = path.read_bytes()
                yield (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()
            except (OSError, EOFError):
                continue  # not there yet, or just put aside: the rest can be shown


def _fits(one: dict[str, Any], wanted: Wanted) -> bool:
    error = one["final_error"]
    codes = {error["type"] if error else None, *(tried["error"]["type"] for tried in one["attempts"] if tried["error"])}
    return (
        wanted.outcome in (None, one["outcome"])
        and wanted.upstream in (None, one["upstream"])
        and wanted.trace in (None, one["trace_id"])
        and (wanted.code is None or wanted.code in codes)
        and (wanted.since is None or one["end_time"] >= rfc3339(wanted.since))
    )
