"""Noticing that the configuration file has changed.

Law: the directories are watched, not the file: editors replace it, and Kubernetes swaps a link beside it. An event
only says that it is worth a look; what counts is whether the bytes are others than those read last. A file that cannot
be watched is told once: SIGHUP and `POST /reload` work all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

_SETTLE = 100
"""Milliseconds without another event before the file is looked at: who writes in pieces is let finish."""
_LOOK_ANYWAY = 2_000
"""Milliseconds after which directories are looked up again: what a link leads to may be elsewhere by now."""


async def watch(
    path: Path, last_read: Callable[[], bytes | None], changed: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Call `changed` whenever the file holds something else than was read last, until told to stop. Raises OSError
    when it cannot."""
    # Only those who have a file pay for it, and not for its asynchronous side, which takes two megabytes.
    from watchfiles import watch as events_in

    loop = asyncio.get_running_loop()
    while not stop.is_set():
        folders = await loop.run_in_executor(None, _folders, path)
        events = events_in(
            *folders,
            watch_filter=None,
            debounce=_SETTLE * 4,
            step=_SETTLE,
            stop_event=stop,  # only ever asked whether it is set, which any thread may
            rust_timeout=_LOOK_ANYWAY,
            yield_on_timeout=True,
            recursive=False,
        )
        while await loop.run_in_executor(None, next, events, None) is not None:
            if last_read() != await loop.run_in_executor(None, content, path):
                await changed()
            if folders != await loop.run_in_executor(None, _folders, path):
                events.close()
                break


def content(path: Path) -> bytes | None:
    """None while there is no such file: half of a swap, or a mistake, which the next reload tells of."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _folders(path: Path) -> tuple[Path, ...]:
    """Where the name stands, and where what it leads to stands."""
    there = path.absolute().parent
    behind = path.resolve().parent
    return (there,) if behind == there or not behind.is_dir() else (there, behind)
