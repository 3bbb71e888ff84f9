"""The kill switch: whether anything is ever sent a second time.

Law: takes effect with the next decision, also of requests under way; lasts until it is switched back or the sidecar
restarts, which reads `retries_enabled` again.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, NoBody, NoQuery, Text
from sidecar.admin.problem import unknown
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy

_ACTIONS = {"enable": True, "disable": False}


class SwitchOrder(Body):
    """May be left out."""

    reason: Text = ""
    """For the log."""


class Switch(Answer):
    """Where the switch stands."""

    retries_enabled: bool
    configured: bool
    """What the configuration says, and a restart goes back to."""


class Retries:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
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
        proxy = self._proxy
        return Switch(retries_enabled=proxy.retries_enabled, configured=proxy.settings.retries_enabled)

    async def switch(self, call: Call[NoQuery, SwitchOrder]) -> Told:
        action = call.named("action")
        if action not in _ACTIONS:
            raise unknown("action", action, _ACTIONS, f"retries do not obey {action[:60]!r}", ", ".join(_ACTIONS))
        before, after = self._proxy.retries_enabled, _ACTIONS[action]
        self._proxy.retries_enabled = after
        await self._changes.note(
            call.request, f"{action}d", about="retries", before=before, after=after, reason=call.body.reason
        )
        return await self.shown(Call(call.request, NoQuery(), NoBody()))
