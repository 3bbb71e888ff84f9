"""Stores and layers on real files, for one test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sidecar.durable.store import Store


class Told(list[tuple[str, str]]):
    """What was reported, in order."""

    def __call__(self, event: str, sentence: str) -> None:
        self.append((event, sentence))

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self]

    def sentence(self, event: str) -> str:
        return next(sentence for found, sentence in self if found == event)


@asynccontextmanager
async def opened(directory: Path, **options: Any) -> AsyncIterator[Store]:
    store = await Store.open(directory, **options)
    try:
        yield store
    finally:
        await store.close()


def crashed_copy(directory: Path, to: Path) -> Path:
    """The files as a kill would leave them: copied while the store is still open."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*-shm"))
    return to
