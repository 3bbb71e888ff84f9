"""Are the files that a promise stands on still those at their paths?

An unlinked or replaced file can be written to as if nothing had happened; what is written is gone with the process.
Law: asked in the writer's thread, before a group of writes and again after its commit, before anybody is told. Only
stat calls while all is well. What can be mended without losing anything is mended and said, a moment later: somebody
may be about to remove more. The rest is a sentence for a person, and nothing is promised until the very same files are
back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sidecar import clock

_MEND_AFTER = 1.0

Identity = tuple[int, int]


class Guard(Protocol):
    """Something else that must be in its place."""

    def missing(self) -> str | None:
        """What is not as it was; None while all is well. Blocks."""

    def mend(self) -> str | None:
        """Put it right. What was done; None if that is not possible. Blocks."""


def identity_of(path: Path | str) -> Identity | None:
    """Which file this is, None if there is none."""
    try:
        found = os.stat(path)  # per commit: a Path would cost more than the call
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Presence:
    """`note` once the store is open, then `missing` as often as needed."""

    def __init__(self, database: Path, guards: Sequence[Guard], report: Callable[[str, str], None]) -> None:
        self._directory = str(database.parent)
        self._database = str(database)
        self._log = f"{database}-wal"
        self._guards = guards
        self._report = report
        self._noted: Identity | None = None
        self._noted_log: Identity | None = None
        self._missing_since: float | None = None

    def note(self) -> None:
        """These are the files that were opened."""
        self._noted, self._noted_log = identity_of(self._database), identity_of(self._log)

    @property
    def log_to_replace(self) -> bool:
        """Only the log is gone: what is in it can still be written into the database, which is in its place."""
        there = identity_of(self._database) == self._noted
        return there and identity_of(self._log) != self._noted_log and self._is_time()

    def _is_time(self) -> bool:
        now = clock.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        return now - self._missing_since >= _MEND_AFTER

    def foreign(self) -> str | None:
        """Another database lies where the one was that was open before, or none."""
        if self._noted is None:
            return None
        found = identity_of(self._database)
        if found == self._noted:
            return None
        what = f"{self._directory} was removed" if identity_of(self._directory) is None else f"{self._database} was "
        if not what.endswith("removed"):
            what += "removed" if found is None else "replaced by another file"
        return (
            f"{what} while the sidecar runs: put the same files back (`mv` keeps them the same), or restart the "
            "sidecar, which goes on with what then lies there; what was kept in the old ones is only there"
        )

    def missing(self) -> str | None:
        """None while a promise can be kept."""
        problem = self._problem()
        if problem is None:
            self._missing_since = None
        return problem

    def _problem(self) -> str | None:
        problem = self.foreign()
        if problem is not None:
            return problem
        if identity_of(self._log) != self._noted_log:
            self._is_time()
            return f"{self._log} was removed or replaced while the sidecar runs; it is being made anew"
        for guard in self._guards:
            problem = guard.missing()
            if problem is not None:
                done = guard.mend() if self._is_time() else None
                if done is None:
                    return problem
                self._report("sidecar.store.mended", done)
        return None
