"""Whole ids from a part of them, of all that is kept.

Law: a part is a beginning or an end, for a person copies what fits: the end of a dead letter's id is random where its
beginning is a date.
"""

from __future__ import annotations

import sqlite3
from functools import partial

from sidecar.durable.store import Store

_TABLES = (("dead_letter", "dead_letters", "dlq_id"), ("job", "jobs", "job_id"), ("replay", "replay_jobs", "job_id"))


async def like(store: Store, part: str, limit: int) -> list[tuple[str, str]]:
    """Kinds and ids that begin or end so, at most so many of each kind."""
    return await store.read(partial(_like, part=part, limit=limit))


def _like(connection: sqlite3.Connection, part: str, limit: int) -> list[tuple[str, str]]:
    found = []
    for kind, table, column in _TABLES:
        statement = (  # words of this file only
            f"SELECT {column} FROM {table} WHERE ({column} >= ? AND {column} < ?) OR substr({column}, -?) = ? LIMIT ?"
        )
        rows = connection.execute(statement, (part, f"{part}\x7f", len(part), part, limit))
        found += [(kind, whole) for (whole,) in rows]
    return found
