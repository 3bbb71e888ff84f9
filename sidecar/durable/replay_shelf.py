"""Replay jobs as they are remembered: those of this run live, those of earlier runs as they were left."""

from __future__ import annotations

import sqlite3
from typing import Any

import orjson

from sidecar.durable.replay_job import ENDED, Job
from sidecar.durable.store import Store
from sidecar.durable.trouble import BadInput, NoSuchThing

_KEPT = 1000


class Shelf:
    """Saves at every change of state, not at every entry."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.live: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        self.live[job.job_id] = job
        for old in [old for old in self.live.values() if old.state in ENDED][:-_KEPT]:
            del self.live[old.job_id]

    async def save(self, job: Job) -> None:
        values = (job.job_id, job.created_at, self._store.boot_id, job.state, orjson.dumps(job.shown()))
        await self._store.write(
            lambda connection: (
                connection.execute("INSERT OR REPLACE INTO replay_jobs VALUES (?, ?, ?, ?, ?)", values) and None
            )
        )

    async def jobs(
        self, limit: int = 100, after: str | None = None, since: float | None = None
    ) -> tuple[list[dict[str, Any]], str | None, int | None]:
        """The newest first, those of earlier runs included, beginning after the job `after`; the one to go on after,
        if there are more; and with the first page how many there are in all."""
        earliest = -1.0 if since is None else since

        def work(connection: sqlite3.Connection) -> tuple[list[tuple[str, bytes]], int | None]:
            total: int | None = None
            before: tuple[float, str] = (1e12, "~")
            if after is not None:
                found = connection.execute(
                    "SELECT created_at, job_id FROM replay_jobs WHERE job_id = ?", (after,)
                ).fetchone()
                if found is None:
                    raise BadInput("cursor", "is not a cursor that a list gave out", "leave it out to begin anew")
                before = found
            else:
                counted = "SELECT count(*) FROM replay_jobs WHERE created_at >= ?"
                (total,) = connection.execute(counted, (earliest,)).fetchone()
            page = connection.execute(
                "SELECT job_id, document FROM replay_jobs WHERE (created_at, job_id) < (?, ?) AND created_at >= ? "
                "ORDER BY created_at DESC, job_id DESC LIMIT ?",
                (*before, earliest, limit + 1),
            ).fetchall()
            return page, total

        stored, total = await self._store.read(work)
        shown = [
            self.live[job_id].shown() if job_id in self.live else orjson.loads(document)
            for job_id, document in stored[:limit]
        ]
        return shown, stored[limit - 1][0] if len(stored) > limit else None, total

    async def job(self, job_id: str) -> dict[str, Any]:
        if job_id in self.live:
            return self.live[job_id].shown()
        found = await self._store.read(
            lambda connection: connection.execute(
                "SELECT document FROM replay_jobs WHERE job_id = ?", (job_id,)
            ).fetchone()
        )
        if found is None:
            raise NoSuchThing(f"there is no replay {job_id[:80]!r}", "list them with `sidecar dlq replays`")
        shown: dict[str, Any] = orjson.loads(found[0])
        return shown

    async def interrupt(self) -> None:
        """After a start: jobs of an earlier run are not going on."""

        def work(connection: sqlite3.Connection) -> None:
            left = connection.execute(
                "SELECT job_id, document FROM replay_jobs WHERE boot <> ? AND state IN ('running', 'paused')",
                (self._store.boot_id,),
            ).fetchall()
            for job_id, document in left:
                shown = {**orjson.loads(document), "state": "interrupted", "why": "the sidecar was stopped or killed"}
                connection.execute(
                    "UPDATE replay_jobs SET state = 'interrupted', document = ? WHERE job_id = ?",
                    (orjson.dumps(shown), job_id),
                )
            connection.execute(
                "DELETE FROM replay_jobs WHERE job_id NOT IN "
                "(SELECT job_id FROM replay_jobs ORDER BY created_at DESC LIMIT ?)",
                (_KEPT,),
            )

        await self._store.write(work)
