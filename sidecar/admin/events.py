"""Live events as server-sent events.

Law: nobody waits for a reader. What happens is queued for each, bounded; a reader that does not take it in time is cut
off, and comes back with the last id it saw. A reader is told of a gap: events that are known to have happened and are
gone. While nothing happens a comment is sent now and then, so that both sides notice when the other has gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Literal

import orjson
from aiohttp import web

from sidecar import clock
from sidecar.admin.fields import NoBody, Query
from sidecar.admin.problem import Problem, wrong
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from telemetry.events import Subscription, as_sse

MOST_READERS = 100
_EVENT_ID = re.compile(r"evt_[0-9]{1,18}_[0-9]{1,18}")
_RETRY_MS = 2_000
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


class EventsQuery(Query):
    """What to read."""

    follow: Literal["true", "false"] = "true"
    """`false`: what is known now, the oldest first, and then the stream ends whatever happens meanwhile."""


class LiveEvents:
    """The handler. `heartbeat` is how often a comment is sent, `patience` how long a reader may not take anything,
    both in seconds."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._readers: set[Subscription] = set()
        self.heartbeat = 15.0
        self.patience = 5.0

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET",
            "/events",
            "What happens, live, as server-sent events; `Last-Event-ID` goes on where a reader left off.",
            self.stream,
            None,
            EventsQuery,
            also=("text/event-stream",),
            fields={"Last-Event-ID": "The id of the last event that was received; those after it follow."},
            refusals=(503,),
        )

    def end(self) -> None:
        """The sidecar stops: every reader's stream ends."""
        for reader in tuple(self._readers):
            reader.end()

    async def stream(self, call: Call[EventsQuery, NoBody]) -> Told:
        request = call.request
        last_id = request.headers.get("Last-Event-ID")
        if last_id is not None and not _EVENT_ID.fullmatch(last_id):
            raise wrong("Last-Event-ID", last_id, "is not the id of an event; send one as it was received, or none")
        if len(self._readers) >= MOST_READERS:
            raise Problem(
                503,
                "OVERLOADED",
                f"{MOST_READERS} readers are listening already; close some, or read `telemetry.events.file`",
                headers={"Retry-After": "5"},
            )
        response = web.StreamResponse(headers=_HEADERS)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        if request.method == "HEAD":
            return response
        reader = self._proxy.signals.events.subscribe(last_id, follow=call.query.follow == "true")
        self._readers.add(reader)
        try:
            await self._serve(request, response, reader)
        finally:
            self._readers.discard(reader)
            reader.close()
        return response

    async def _serve(self, request: web.Request, response: web.StreamResponse, reader: Subscription) -> None:
        await response.prepare(request)
        beating = clock.spawn(self._beat(response, reader), "event stream heartbeat")
        try:
            await self._write(response, b"retry: %d\n\n" % _RETRY_MS)
            if reader.missed:
                await self._write(response, _gap(request.headers.get("Last-Event-ID", "")))
            async for event in reader:
                await self._write(response, as_sse(event, self._proxy.signals.redactor))
            ended = "too slow, come back with Last-Event-ID" if reader.too_slow else reader.ends_with
            await self._write(response, f": {ended}\n\n".encode())
            await response.write_eof()
        except ConnectionError:
            pass  # the reader has gone
        except Exception as error:
            if not isinstance(error, TimeoutError):
                self._proxy.signals.internal_error("admin", "a stream of events broke", error)
            if request.transport is not None:
                request.transport.abort()  # what a slow reader has not read is not worth waiting for
        finally:
            beating.cancel()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(self.patience):
            await response.write(data)

    async def _beat(self, response: web.StreamResponse, reader: Subscription) -> None:
        while True:
            await clock.sleep(self.heartbeat)
            try:
                await response.write(b": still here\n\n")
            except ConnectionError:
                reader.end()  # it has gone, and without an event nobody else would notice
                return


def _gap(last_id: str) -> bytes:
    told = {"after": last_id, "message": "events after this one are gone; what follows is the oldest that is known"}
    return b"event: gap\ndata: %b\n\n" % orjson.dumps(told)
