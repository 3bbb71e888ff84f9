"""A file of JSON lines that never grows without end.

Law: used by the writer's thread only. A file that has reached its size is put aside under the time it ended, then
compressed; the compressed one appears whole or not at all. Old ones go by number and by age. Only the owner can read
them. A disk that refuses costs lines, never an exception: the first refusal is told, the next ones are counted.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class RotatingFile:
    """Lines at `path`; `told` hears of the first of several refusals by the disk."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        keep: int,
        ttl: float | None,
        wall: Callable[[], float],
        told: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        # Exactly what `_aside` and `_rotate` name: whatever else lies in the folder belongs to somebody else.
        self._ours = re.compile(
            rf"{re.escape(path.stem)}-\d{{8}}T\d{{12}}-\d{{3,}}{re.escape(path.suffix)}(\.gz|\.part)?"
        )
        self._max_bytes = max_bytes
        self._keep = keep
        self.ttl = ttl
        self._wall = wall
        self._told = told
        self._file: BinaryIO | None = None
        self._size = 0
        self._refused = False
        self.lost = 0

    def append(self, line: bytes) -> None:
        """One line, without its newline. Buffered until `flush`."""
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            self._file.write(line + b"\n")
            self._size += len(line) + 1
            if self._size >= self._max_bytes:
                self._rotate()
        except OSError as error:
            self._refuse(error)

    def flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
                self._refused = False
        except OSError as error:
            self._refuse(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._refuse(error)
            self._file = None

    def expire(self) -> None:
        """Delete what was put aside too long ago or is too many."""
        aside = sorted((path for path in self._path.parent.glob("*") if self._ours.fullmatch(path.name)), reverse=True)
        oldest = float("-inf") if self.ttl is None else self._wall() - self.ttl
        whole = 0
        for path in aside:
            unfinished = path.suffix == ".part"  # of a process that ended while it compressed; the original is there
            whole += not unfinished
            try:
                if unfinished or whole > self._keep or path.stat().st_mtime < oldest:
                    path.unlink()
            except OSError as error:
                self._refuse(error)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(descriptor).st_size
        self._file = os.fdopen(descriptor, "ab", buffering=262_144)

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        now = self._wall()
        aside = self._aside(now)
        self._path.rename(aside)
        unfinished = aside.with_name(aside.name + ".part")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with aside.open("rb") as plain, os.fdopen(descriptor, "wb") as raw:
            with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, filename="", mtime=now) as packed:
                shutil.copyfileobj(plain, packed, 262_144)
            raw.flush()
            os.fsync(raw.fileno())
        unfinished.rename(aside.with_name(aside.name + ".gz"))
        aside.unlink()
        self.expire()

    def _aside(self, now: float) -> Path:
        """A name that is free, whatever the clock did since the last time."""
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f"{int(now % 1 * 1_000_000):06d}"
        for number in itertools.count():
            path = self._path.with_name(f"{self._path.stem}-{stamp}-{number:03d}{self._path.suffix}")
            if not path.exists() and not path.with_name(path.name + ".gz").exists():
                break
        return path

    def _refuse(self, error: OSError) -> None:
        self.lost += 1
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                pass  # it cannot be written; closing tries to, again
            self._file = None
        if not self._refused and self._told is not None:
            self._told(f"{self._path} cannot be written: {error.strerror or error}; make room or change its place")
        self._refused = True
