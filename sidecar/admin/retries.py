"""The kill switch: whether anything is ever sent a second time.

Law: takes effect with the next decision, also of requests under way, and outlives a restart, until it is switched back.
It works also where nothing can be kept; then the answer says that a restart will forget it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from config.runtime import LONGEST, RETRIES
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, Duration, NoBody, NoQuery, Prose
from sidecar.admin.problem import unknown
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from sidecar.reloading import Reloading
from telemetry.timestamps import rfc3339

_ACTIONS = {"enable": True, "disable": False}


class SwitchOrder(Body):
    """May be left out."""

    ttl: Annotated[Duration, Field(gt=0, le=LONGEST)] | None = None
    """For how long: 90s, 10m, 2h, or seconds; at most 30 days. Then it is as the file says again. Not given: until it
    is switched back."""
    reason: Prose = ""
    """For the log."""


class Switch(Answer):
    """Where the switch stands."""

    retries_enabled: bool
    configured: bool
    """What the file and the variables say."""
    until: str | None = None
    """When it goes back to what is configured, by itself."""
    lasting: bool = True
    """false: it could not be written down, and a restart goes back to what was last written."""


class Retries:
    """The handlers."""

    def __init__(self, proxy: Proxy, reloading: Reloading, changes: Changes) -> None:
        self._proxy = proxy
        self._reloading = reloading
        self._lasting = True
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/retries", "Whether failures are retried at all.", self.shown, Switch)
        yield Route(
            "POST",
            "/retries/{action}",
            "Switch all retries on or off.",
            self.switch,
            Switch,
            body=SwitchOrder,
            parts={"action": "`enable` or `disable`."},
            one_of={"action": _ACTIONS},
            refusals=(404, 413, 415),
        )

    async def shown(self, call: Call[NoQuery, NoBody]) -> Told:
        return self._shown()

    async def switch(self, call: Call[NoQuery, SwitchOrder]) -> Told:
        action = call.named("action")
        if action not in _ACTIONS:
            raise unknown("action", action, _ACTIONS, f"retries do not obey {action[:60]!r}", ", ".join(_ACTIONS))
        before, after = self._proxy.retries_enabled, _ACTIONS[action]
        trouble = await self._reloading.switch_retries(after, call.body.ttl)
        self._lasting = trouble is None
        if trouble is not None:
            self._proxy.log.error("sidecar.retries.not_kept", f"retries are {action}d until a restart: {trouble}")
        await self._changes.note(
            call.request,
            f"{action}d",
            about="retries",
            before=before,
            after=after if call.body.ttl is None else {"retries_enabled": after, "for_seconds": call.body.ttl},
            reason=call.body.reason,
        )
        return self._shown()

    def _shown(self) -> Switch:
        until = self._reloading.runtime.until.get(RETRIES)
        return Switch(
            retries_enabled=self._proxy.retries_enabled,
            configured=self._reloading.configured_retries,
            until=None if until is None else rfc3339(until),
            lasting=self._lasting,
        )
