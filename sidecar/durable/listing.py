"""Which entries, in pages: filters, cursors and counts that stay quick with a million of them.

Law: an entry is found by its facet (upstream, class, verdict, status) and its time, both indexed; a page is a merge
of a few index walks and never reads more than it shows. A search for words may have to look at more; it stops after
a while with what it has and a cursor to go on from. Malformed filters are refused by name.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sidecar.durable import rows
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.entry import Entry
from sidecar.durable.filters import LARGEST_PAGE, Filter, mark_of, match_of, read_cursor, write_cursor
from sidecar.durable.intake import LEAST
from sidecar.durable.schema import SEQ_SHIFT
from sidecar.durable.trouble import BadInput, Damaged
from sidecar.durable.workflow import STATUSES, WAITING

_MOST_LOOKED_AT = 20_000


@dataclass(frozen=True, slots=True)
class Page:
    items: list[Entry]
    next_cursor: str | None


class Group(NamedTuple):
    """Entries that share their four words."""

    upstream: str
    error_class: str
    verdict: str
    status: str
    entries: int
    bytes: int


@dataclass(slots=True)
class Stats:
    """For gauges and the overview, as of the last refresh."""

    groups: list[Group] = field(default_factory=list)
    oldest: dict[str, float] = field(default_factory=dict)
    """Upstream → when its oldest waiting entry was made."""
    disk_free: int | None = None
    """Not looked at so far: None."""
    deliveries_bytes: int = 0
    """What the outbox takes of the same budget."""

    @property
    def bytes(self) -> int:
        """All that counts towards `dead_letter.max_bytes`."""
        return sum(group.bytes for group in self.groups) + self.deliveries_bytes

    @property
    def waiting(self) -> dict[str, int]:
        return self.count("upstream", WAITING)

    def count(self, word: str, statuses: Iterable[str] = STATUSES) -> dict[str, int]:
        """Entries by one of the four words."""
        wanted, found = frozenset(statuses), dict[str, int]()
        for group in self.groups:
            if group.status in wanted:
                found[getattr(group, word)] = found.get(getattr(group, word), 0) + group.entries
        return found


class Listing:
    """Reads only."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters
        self.stats = Stats()

    async def page(
        self, wanted: Filter, *, limit: int = 50, cursor: str | None = None, oldest_first: bool = False
    ) -> Page:
        if not 1 <= limit <= LARGEST_PAGE:
            raise BadInput("limit", f"must be from 1 to {LARGEST_PAGE}")
        mark = mark_of(wanted, oldest_first)
        after = None if cursor is None else read_cursor(cursor, mark)
        found = await self._letters.store.read(lambda connection: _walk(connection, wanted, limit, after, oldest_first))
        for dlq_id, why in found.damaged:
            await self._letters.set_aside(dlq_id, why)
        items = [self._judged(entry) for entry in found.entries]
        if wanted.verdict:  # time may have changed it since it was last written
            items = [entry for entry in items if entry.verdict in wanted.verdict]
        return Page(items, None if found.last is None else write_cursor(found.last, mark))

    async def rows_shown(self, page: Page) -> list[dict[str, Any]]:
        """As a listing shows them: without secrets, the url redacted."""
        letters = self._letters

        def urls(connection: sqlite3.Connection) -> list[str]:
            found = []
            for entry in page.items:
                head = connection.execute(
                    "SELECT head FROM payloads JOIN dead_letters USING (seq) WHERE dlq_id = ?", (entry.dlq_id,)
                ).fetchone()
                try:
                    url = letters.payloads.url(entry, head[0]) if head else ""
                    found.append(letters.terms_of(entry.upstream).redactor.url(url))
                except Damaged:
                    found.append("")  # told, and set aside, when the entry itself is opened
            return found

        return [
            {**entry.shown(), "url": url} for entry, url in zip(page.items, await letters.store.read(urls), strict=True)
        ]

    def _judged(self, entry: Entry) -> Entry:
        if entry.status in WAITING:
            verdict = self._letters.judge(entry)
            entry.verdict, entry.sentence = verdict.word, verdict.sentence
        return entry

    async def count(self, wanted: Filter) -> dict[str, int]:
        """How many entries there are, by verdict."""
        return await self._letters.store.read(lambda connection: _count(connection, wanted))

    async def refresh(self) -> Stats:
        """Read the counts anew. Called every few seconds, so that a scrape finds them ready."""
        stats = await self._letters.store.read(_stats)
        stats.disk_free = await self._letters.store.in_thread(
            lambda: self._letters.store.disk.free_bytes(self._letters.store.directory)
        )
        self._letters.waiting |= set(stats.waiting)
        self.stats = stats
        return stats

    def full(self) -> str | None:
        """Why nothing more fits, as of the last refresh; None while something does."""
        stats, settings = self.stats, self._letters.settings
        if stats.disk_free is not None and stats.disk_free - settings.min_free_bytes < LEAST:
            return (
                f"{stats.disk_free} bytes are free on the disk below {self._letters.store.directory}, and "
                f"`dead_letter.min_free_bytes` leaves {settings.min_free_bytes} alone; make room, or lower that limit"
            )
        if stats.bytes + LEAST > settings.max_bytes:
            return (
                f"dead letters and deliveries take {stats.bytes} bytes, and `dead_letter.max_bytes` is "
                f"{settings.max_bytes}; replay or discard entries, let the outbox drain, or raise the limit"
            )
        return None


# ---- walking ---------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    entries: list[Entry]
    damaged: list[tuple[str, str]]
    last: int | None
    """Where to go on; None at the end."""


def _walk(connection: sqlite3.Connection, wanted: Filter, limit: int, after: int | None, oldest_first: bool) -> _Found:
    low, high = rows.seq_range(wanted.since, wanted.until)
    if after is not None:
        low, high = (max(low, after + 1), high) if oldest_first else (low, min(high, after))
    order = "ASC" if oldest_first else "DESC"
    entries: list[Entry] = []
    damaged: list[tuple[str, str]] = []
    looked_at, last, more = 0, None, False
    for seq in _numbers(connection, wanted, low, high, order):
        if len(entries) == limit or looked_at == _MOST_LOOKED_AT:
            more = True
            break
        last, looked_at = abs(seq), looked_at + 1
        if seq < 0:  # seen by the search, but not wanted
            continue
        try:
            row = rows.load_seq(connection, seq)
        except Damaged as problem:
            (dlq_id,) = connection.execute("SELECT dlq_id FROM dead_letters WHERE seq = ?", (seq,)).fetchone()
            damaged.append((dlq_id, problem.message))
            continue
        if row is not None:
            entries.append(row.entry)
    return _Found(entries, damaged, last if more else None)


def _numbers(connection: sqlite3.Connection, wanted: Filter, low: int, high: int, order: str) -> Iterator[int]:
    """Numbers of entries in order; negative ones were looked at and do not fit."""
    facets = _facets(connection, wanted)
    if facets is not None and not facets:
        return
    if wanted.q or wanted.workflow:
        for seq, facet in _by_words(connection, wanted, low, high, order):
            yield seq if facets is None or facet in facets else -seq
        return
    if facets is None:
        statement = f"SELECT seq FROM dead_letters WHERE seq >= ? AND seq < ? ORDER BY seq {order}"
        yield from (seq for (seq,) in connection.execute(statement, (low, high)))
        return
    statement = (
        "SELECT seq FROM dead_letters INDEXED BY dead_letters_by_facet "
        f"WHERE facet = ? AND seq >= ? AND seq < ? ORDER BY seq {order}"
    )
    walks = [connection.execute(statement, (facet, low, high)) for facet in sorted(facets)]
    yield from (seq for (seq,) in heapq.merge(*walks, reverse=order == "DESC"))


def _by_words(
    connection: sqlite3.Connection, wanted: Filter, low: int, high: int, order: str
) -> Iterator[tuple[int, int]]:
    workflow = " AND workflow = ?" if wanted.workflow else ""
    parameters: list[object] = [low, high]
    if wanted.q:
        statement = (
            "SELECT w.rowid, d.facet FROM dead_letter_words w CROSS JOIN dead_letters d ON d.seq = w.rowid "
            f"WHERE dead_letter_words MATCH ? AND w.rowid >= ? AND w.rowid < ?{workflow} ORDER BY w.rowid {order}"
        )
        parameters.insert(0, match_of(wanted.q))
    else:
        statement = f"SELECT seq, facet FROM dead_letters WHERE seq >= ? AND seq < ?{workflow} ORDER BY seq {order}"
    if wanted.workflow:
        parameters.append(wanted.workflow)
    yield from connection.execute(statement, parameters)


def _facets(connection: sqlite3.Connection, wanted: Filter) -> set[int] | None:
    """Those that fit and have entries; None when all do."""
    conditions, parameters = ["n > 0"], list[str]()
    for name in ("status", "upstream", "error_class", "verdict"):
        words: tuple[str, ...] = getattr(wanted, name)
        if words:
            conditions.append(f"{name} IN ({', '.join('?' * len(words))})")
            parameters.extend(words)
    if not parameters:
        return None
    found = connection.execute(f"SELECT id FROM facets WHERE {' AND '.join(conditions)}", parameters)
    return {facet for (facet,) in found}


def _count(connection: sqlite3.Connection, wanted: Filter) -> dict[str, int]:
    facets = _facets(connection, wanted)
    known = connection.execute("SELECT id, verdict, n FROM facets WHERE n > 0").fetchall()
    counted: dict[str, int] = {}
    low, high = rows.seq_range(wanted.since, wanted.until)
    if wanted.q or wanted.workflow:
        verdicts = {facet: verdict for facet, verdict, _ in known}
        for _, facet in _by_words(connection, wanted, low, high, "ASC"):
            if facets is None or facet in facets:
                counted[verdicts[facet]] = counted.get(verdicts[facet], 0) + 1
        return counted
    for facet, verdict, n in known:
        if facets is not None and facet not in facets:
            continue
        if wanted.since is not None or wanted.until is not None:
            statement = "SELECT count(*) FROM dead_letters WHERE facet = ? AND seq >= ? AND seq < ?"
            (n,) = connection.execute(statement, (facet, low, high)).fetchone()
        if n:
            counted[verdict] = counted.get(verdict, 0) + n
    return counted


def _stats(connection: sqlite3.Connection) -> Stats:
    found = connection.execute("SELECT upstream, error_class, verdict, status, n, bytes, id FROM facets WHERE n > 0")
    stats = Stats()
    for *words, facet in found.fetchall():
        group = Group(*words)
        stats.groups.append(group)
        if group.status in WAITING:
            (seq,) = connection.execute("SELECT min(seq) FROM dead_letters WHERE facet = ?", (facet,)).fetchone()
            if seq is not None:
                made_at = (seq >> SEQ_SHIFT) / 1000
                stats.oldest[group.upstream] = min(made_at, stats.oldest.get(group.upstream, made_at))
    (stats.deliveries_bytes,) = connection.execute("SELECT bytes FROM totals WHERE name = 'deliveries'").fetchone()
    return stats
