"""What operators change while the sidecar runs, written down.

Law: whoever changes something through the admin port says so here, after it is done: what, who, from where,
before and after, and why. It goes to the log and to the audit, which is in the store and only ever added to. A change
whose note cannot be kept stands all the same, and that is told as an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from config.runtime import RETRIES, policy_key
from sidecar import clock
from sidecar.admin.access import WHO
from sidecar.durable.trouble import Trouble
from sidecar.proxy import Proxy

if TYPE_CHECKING:
    from sidecar.reloading import Reloaded

_EVENT = "sidecar.operator.change"
_LOOKED_AGAIN = 60.0
"""Who looks at the same thing again within so many seconds is not written down again: `sidecar top` looks every one."""
_MOST_LOOKERS = 1_000


def who(request: web.Request) -> str:
    """The name of whoever asks, for what they leave behind."""
    name: str = request.get(WHO, "local")
    return name


class Changes:
    """Writes each change to the log and the audit."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._looked: dict[tuple[str, str], float] = {}

    async def note(
        self, request: web.Request, what: str, *, about: str, before: object, after: object, reason: str = ""
    ) -> None:
        """`what` is a verb phrase for a person, `about` the thing that was changed."""
        name = who(request)
        told = self._text(reason)
        client, agent = request.remote, self._text(request.headers.get("User-Agent", ""))[:200] or None
        claimed = self._text(request.headers.get("x-sidecar-user", ""))[:40] or None
        self._proxy.log.info(
            _EVENT,
            f"{what} {about}" + (f": {told}" if told else ""),
            about=about,
            before=before,
            after=after,
            reason=told or None,
            who=name,
            user=claimed,
            client=client,
            user_agent=agent,
        )
        await self._keep(name, what, about, before, after, told or None, claimed=claimed, client=client, agent=agent)

    async def note_own(self, name: str, done: Reloaded) -> None:
        """A reload that nobody asked for through the admin port; the log has it already."""
        await self._keep(name, "reloaded", "the configuration", done.before, done.after, None)

    async def note_expiry(self, key: str, before: object, after: object) -> None:
        """The time of what was set at run time is over; the log has it already."""
        about = "retries" if key == RETRIES else f"policy {key.removeprefix(policy_key(''))}, set at run time"
        await self._keep("sidecar", "let the order run out for", about, before, after, "its time is over")

    async def note_reading(self, request: web.Request, about: str) -> None:
        """Somebody looks at what `admin.audit_reads` is about."""
        if not self._proxy.settings.admin.audit_reads:
            return
        name, now = who(request), clock.monotonic()
        key = (f"{name} {request.headers.get('x-sidecar-user', '')[:40]} {request.remote}", about)
        if now - self._looked.get(key, -_LOOKED_AGAIN) < _LOOKED_AGAIN:
            return
        if len(self._looked) >= _MOST_LOOKERS:
            self._looked.clear()
        self._looked[key] = now
        await self.note(request, "looked at", about=about, before=None, after=None)

    async def _keep(
        self, name: str, what: str, about: str, before: object, after: object, reason: str | None, **where: Any
    ) -> None:
        try:
            durable = await self._proxy.kept.open()
            from sidecar.durable.audit import Entry  # loaded with the store, not before

            await durable.audit.add(Entry(clock.wall(), name, what, about, before, after, reason, **where))
        except Trouble as trouble:
            self._proxy.log.error(
                "sidecar.audit.lost", f"{name} {what} {about}, which the audit does not have: {trouble}"
            )

    def _text(self, text: str) -> str:
        return self._proxy.signals.redactor.text(text)
