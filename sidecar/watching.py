"""Noticing that the configuration file has changed.

Law: the file is looked at, once a second: one `stat` through every link on the way, which sees what an editor replaced,
what Kubernetes swapped and what another machine wrote to a network disk, where notifications see only some of it. What
counts is whether the bytes are others than those read last, and they are read only when the file looks different, or
changed so lately that its times may not tell two writes apart. Who writes in pieces is let finish. Looking happens
beside the event loop: a disk may hang.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_EACH = 1.0
_EACH_CERTIFICATE = 2.0
_SETTLE = 0.1
"""Until the file is looked at again after a change: only what stays the same so long is read."""
_LOOKS_ALIKE = 3
"""Looks after a change during which the content is compared whatever the file looks like: a second write in the same
tick of the file system's clock leaves the same times."""


class Look(NamedTuple):
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


async def watch(
    path: Path, last_read: Callable[[], bytes | None], changed: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Call `changed` whenever the file holds something else than was read last, until told to stop."""
    loop = asyncio.get_running_loop()
    seen, doubtful = None, _LOOKS_ALIKE  # what was read at the start was read before the first look
    while not await _stopped(stop, _EACH):
        look = await loop.run_in_executor(None, look_at, path)
        while look != seen:
            seen, doubtful = look, _LOOKS_ALIKE
            if await _stopped(stop, _SETTLE):
                return
            look = await loop.run_in_executor(None, look_at, path)
        if doubtful:
            doubtful -= 1
            if last_read() != await loop.run_in_executor(None, content, path):
                await changed()


async def watch_each(
    files: Callable[[], Iterable[Path]],
    seen: Mapping[int, Look | None],
    changed: Callable[[], Awaitable[None]],
    stop: asyncio.Event,
) -> None:
    """Call `changed` when one of these looks different from what was `seen` before they were read, and all of them have
    been left alone since. Theirs is a slower pace: who renews a certificate does so long before it has to be shown."""
    loop = asyncio.get_running_loop()
    look = lambda: look_at_each(files())  # noqa: E731
    while not await _stopped(stop, _EACH_CERTIFICATE):
        now = await loop.run_in_executor(None, look)
        while any(now[file] != seen[file] for file in now.keys() & seen.keys()):
            seen = now
            if await _stopped(stop, _SETTLE):
                return
            now = await loop.run_in_executor(None, look)
            if now == seen:
                await changed()
        seen = now


def look_at_each(files: Iterable[Path]) -> dict[int, Look | None]:
    """By a hash of their names, so that none is kept here that the configuration has no longer."""
    return {hash(file): look_at(file) for file in files}


def look_at(path: Path) -> Look | None:
    """None while there is nothing, or nothing that can be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return Look(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def content(path: Path) -> bytes | None:
    """None while there is no such file: half of a swap, or a mistake, which the next reload tells of."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


async def _stopped(stop: asyncio.Event, within: float) -> bool:
    """Wait so long for the end."""
    try:
        async with asyncio.timeout(within):
            await stop.wait()
    except TimeoutError:
        pass
    return stop.is_set()
