"""Dead letters counted by what they have in common.

Law: a function of a connection, for a reader's thread. Four of the words are columns; the other two are read out of the
records, which a filter on the columns keeps few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sidecar.durable.filters import Filter, match_of
from sidecar.durable.schema import SEQ_SHIFT

if TYPE_CHECKING:
    import sqlite3

_MOST = 1_000
_RECORD = "CAST(record AS TEXT)"
_COLUMNS = {
    "error_class": "facets.error_class",
    "upstream": "facets.upstream",
    "verdict": "facets.verdict",
    "status": "facets.status",
    "stage": f"CASE WHEN json_valid({_RECORD}) THEN json_extract({_RECORD}, '$.stage') END",
    "operation": f"CASE WHEN json_valid({_RECORD}) THEN json_extract({_RECORD}, '$.operation_type') END",
}
WORDS = tuple(_COLUMNS)


class Group(NamedTuple):
    """`words` in the order they were asked for."""

    words: tuple[str | None, ...]
    entries: int
    oldest: float
    newest: float


class Groups(NamedTuple):
    """All of them, in numbers; the largest, one by one."""

    groups: int
    entries: int
    largest: list[Group]


def groups(connection: sqlite3.Connection, wanted: Filter, by: tuple[str, ...]) -> Groups:
    from sidecar.durable import rows  # brings the database library, which a sidecar that keeps nothing does not load

    low, high = rows.seq_range(wanted.since, wanted.until)
    conditions, parameters = ["seq >= ?", "seq < ?"], list[object]([low, high])
    for name in ("status", "upstream", "error_class", "verdict"):
        words: tuple[str, ...] = getattr(wanted, name)
        if words:
            conditions.append(f"facets.{name} IN ({', '.join('?' * len(words))})")
            parameters += words
    if wanted.workflow:
        conditions.append("workflow = ?")
        parameters.append(wanted.workflow)
    if wanted.q:
        conditions.append("seq IN (SELECT rowid FROM dead_letter_words WHERE dead_letter_words MATCH ?)")
        parameters.append(match_of(wanted.q))
    columns = ", ".join(f"{_COLUMNS[word]} AS w{number}" for number, word in enumerate(by))
    names = ", ".join(f"w{number}" for number in range(len(by)))
    found = connection.execute(
        f"SELECT {columns}, count(*) AS n, min(seq), max(seq) FROM dead_letters JOIN facets ON facets.id = facet "
        f"WHERE {' AND '.join(conditions)} GROUP BY {names} ORDER BY n DESC, {names}",
        parameters,
    ).fetchall()
    largest = [Group(tuple(words), n, _time(oldest), _time(newest)) for *words, n, oldest, newest in found[:_MOST]]
    return Groups(len(found), sum(row[-3] for row in found), largest)


def _time(seq: int) -> float:
    return (seq >> SEQ_SHIFT) / 1000
