"""Tells somebody outside that requests began to be kept: one message per upstream and error code within a window.

Law: a notification is a hint, never a promise: it is sent beside the traffic, once, and a receiver that is down costs
nothing but the message. It names what is in any listing, no secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from config.durable import DeadLetterStore
from sidecar import clock
from telemetry.timestamps import rfc3339

Post = Callable[[str, dict[str, Any]], Awaitable[None]]

_MOST = 1000


class Notifier:
    """`post` sends JSON to a url; whatever it raises is counted."""

    def __init__(self, settings: DeadLetterStore, post: Post, now: Callable[[], float] = clock.steady) -> None:
        self.settings = settings
        self._post = post
        self._now = now
        self._told: dict[tuple[str, str], tuple[float, int]] = {}
        self._last: asyncio.Task[None] | None = None
        self.failures = 0

    def kept(self, upstream: str, code: str, dlq_id: str) -> None:
        """Called for every entry; sends for the first one of a window."""
        url, now, key = self.settings.notify_url, self._now(), (upstream, code)
        if url is None:
            return
        last, unsaid = self._told.get(key, (None, 0))
        if last is not None and now - last < self.settings.notify_window:
            self._told[key] = (last, unsaid + 1)
            return
        if len(self._told) >= _MOST:
            self._told.clear()
        self._told[key] = (now, 0)
        message = {
            "event": "dead_lettered",
            "upstream": upstream,
            "error_class": code,
            "dlq_id": dlq_id,
            "at": rfc3339(now),
            "since_last_notice": unsaid,
        }
        self._last = clock.spawn(self._send(url, message), "dead letter notification")

    async def _send(self, url: str, message: dict[str, Any]) -> None:
        try:
            await self._post(url, message)
        except Exception:  # a hint that was not heard
            self.failures += 1
