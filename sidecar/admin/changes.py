"""What operators change while the sidecar runs, written down.

Law: whoever changes something through the admin port says so here, after it is done: what, who, from where,
before and after, and why.
"""

from __future__ import annotations

from aiohttp import web

from sidecar.admin.access import WHO
from sidecar.proxy import Proxy

_EVENT = "sidecar.operator.change"


def who(request: web.Request) -> str:
    """The name of whoever asks, for what they leave behind."""
    name: str = request.get(WHO, "local")
    return name


class Changes:
    """Writes each change to the log."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def note(
        self, request: web.Request, what: str, *, about: str, before: object, after: object, reason: str = ""
    ) -> None:
        """`what` is a verb phrase for a person, `about` the thing that was changed."""
        told = self._proxy.signals.redactor.text(reason)
        self._proxy.log.info(
            _EVENT,
            f"{what} {about}" + (f": {told}" if told else ""),
            about=about,
            before=before,
            after=after,
            reason=told or None,
            who=who(request),
            user=self._proxy.signals.redactor.text(request.headers.get("x-sidecar-user", ""))[:40] or None,
            client=request.remote,
            user_agent=self._proxy.signals.redactor.text(request.headers.get("User-Agent", ""))[:200] or None,
        )
