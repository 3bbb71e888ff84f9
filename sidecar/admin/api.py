"""The admin port put together: every noun with its routes, in one table.

Law: no handler here. What is served is what stands in `routes`, and documents about it are made from the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiohttp import web

from config.addresses import is_loopback
from sidecar.admin.access import Access
from sidecar.admin.audit import AuditTrail
from sidecar.admin.breakers import Breakers
from sidecar.admin.changes import Changes
from sidecar.admin.dead_letter_files import DeadLetterFiles
from sidecar.admin.dead_letters import DeadLetters
from sidecar.admin.door import Door
from sidecar.admin.errors import Errors
from sidecar.admin.events import LiveEvents
from sidecar.admin.guard import Guard
from sidecar.admin.ids import Ids
from sidecar.admin.inflight import UnderWay
from sidecar.admin.interception import Interceptions
from sidecar.admin.jobs import Jobs
from sidecar.admin.keys import Keys
from sidecar.admin.letters_in_bulk import LettersInBulk
from sidecar.admin.measures import Measures
from sidecar.admin.openapi import OpenApi
from sidecar.admin.policies import RetryPolicies
from sidecar.admin.probes import FOR_ANYONE, Probes
from sidecar.admin.replays import Replays
from sidecar.admin.retries import Retries
from sidecar.admin.route import BODY_LIMIT, Route
from sidecar.admin.sessions import Sessions
from sidecar.admin.settings import EffectiveSettings
from sidecar.admin.upstreams import Upstreams
from sidecar.admin.verification import Verification
from sidecar.live import LiveFacts
from sidecar.proxy import Proxy
from sidecar.reloading import Reloading
from telemetry.live import families


class Api:
    """`not_ready` says None, or why not."""

    def __init__(self, proxy: Proxy, reloading: Reloading) -> None:
        self._proxy = proxy
        self.not_ready: str | None = "starting"
        facts = LiveFacts(proxy, lambda: self.not_ready)
        proxy.metrics.live = lambda: families(facts)
        self.events = LiveEvents(proxy)
        self.changes = changes = Changes(proxy)
        reloading.on_expired = changes.note_expiry
        openapi = OpenApi(proxy)
        self.routes: tuple[Route, ...] = (
            *Probes(proxy, lambda: self.not_ready, reloading).routes(),
            *EffectiveSettings(proxy, reloading, changes).routes(),
            *RetryPolicies(proxy, reloading, changes).routes(),
            *Upstreams(proxy).routes(),
            *Breakers(proxy, changes).routes(),
            *Retries(proxy, reloading, changes).routes(),
            *Sessions(proxy, changes).routes(),
            *UnderWay(proxy).routes(),
            *Interceptions(proxy, changes).routes(),
            *self.events.routes(),
            *Measures(proxy, changes).routes(),
            *Errors(proxy).routes(),
            *DeadLetterFiles(proxy, changes).routes(),
            *Verification(proxy, changes).routes(),
            *LettersInBulk(proxy, changes).routes(),
            *Replays(proxy, changes).routes(),
            *DeadLetters(proxy, changes).routes(),
            *Jobs(proxy, changes).routes(),
            *Keys(proxy, changes).routes(),
            *Ids(proxy).routes(),
            *AuditTrail(proxy).routes(),
            *openapi.routes(),
        )
        openapi.described = self.routes

    def application(self, door: Door, *, probes_only: bool = False) -> web.Application:
        """For one listener, behind its door; `probes_only` for the one that others than this machine may reach."""
        served = [route for route in self.routes if route.probe or not probes_only]
        beyond = not is_loopback(self._proxy.settings.admin.host)
        guard = Guard(self._proxy, served, None if probes_only else Access(self._proxy), beyond=beyond)
        app = web.Application(middlewares=[door.attended, guard.in_one_shape], client_max_size=BODY_LIMIT)
        app.on_response_prepare.append(_without_versions)
        paths = {route.path for route in served}
        for route in served:
            path = unmistakable(route.path, paths)
            if route.method == "GET":
                app.router.add_get(path, route.serve)  # and HEAD
            else:
                app.router.add_route(route.method, path, route.serve)
        if probes_only:
            app[FOR_ANYONE] = True
        else:
            app.on_shutdown.append(self._stop)
        return app

    async def _stop(self, app: web.Application) -> None:
        self.events.end()


async def _without_versions(request: web.Request, response: web.StreamResponse) -> None:
    """Whoever can reach `probes` need not know which Python and which library answer."""
    response.headers.popall("Server", None)


def unmistakable(path: str, paths: Iterable[str]) -> str:
    """The path for the router, where a `{part}` never stands for a word that another path has in its place: what
    `/dlq/replays` does not take must not be taken for something about a dead letter of that name."""
    parts = path.split("/")
    others = [other.split("/") for other in paths]
    for place, part in enumerate(parts):
        if part.startswith("{"):
            taken = {
                other[place]
                for other in others
                if len(other) == len(parts) and other[:place] == path.split("/")[:place] and other[place][0] != "{"
            }
            if taken:
                words = "|".join(re.escape(word) for word in sorted(taken))
                parts[place] = f"{part[:-1]}:(?!(?:{words})(?:/|$))[^{{}}/]+}}"
    return "/".join(parts)
