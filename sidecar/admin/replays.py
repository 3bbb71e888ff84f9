"""Replays: one dead letter, or many by a filter, looked at before, on the way and afterwards.

Law: the rules of what may go out are the durable layers'; a refusal is answered with their words on what to do. A
dry run changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from sidecar import clock
from sidecar.admin.changes import Changes, who
from sidecar.admin.dead_letters import ID, codes_known, kept_in
from sidecar.admin.fields import Body, Flag, Limit, Moment, NoBody, NoQuery, Number, Prose, Query, Text
from sidecar.admin.letters_asked import Reason, Which
from sidecar.admin.letters_shown import DryRun, ReplayedOne, ReplayPage, ReplayShown, ReplayStarted
from sidecar.admin.problem import Problem, unknown
from sidecar.admin.route import Call, Route, Told, json_response
from sidecar.durable.replay_job import STOP_AFTER, Order
from sidecar.durable.workflow import WAITING
from sidecar.proxy import Proxy

if TYPE_CHECKING:
    from sidecar.durable.layers import Durable
    from sidecar.durable.replay import Replayer

ACTIONS = ("pause", "resume", "cancel")
_REPLAY = {"id": "The id of a replay, `rpl_…`."}


class Insisting(Body):
    """Whether the rules may be overruled, and why."""

    force: Flag = False
    """Send what is not known to be safe, has failed too often or lacks a remediation. Never what succeeded."""
    reason: Reason | None = None
    """Why that is right; needed with `force`."""

    @model_validator(mode="after")
    def _force_has_a_reason(self) -> Insisting:
        if self.force and self.reason is None:
            raise ValueError("`force` needs a `reason`: say why it is safe to send it")
        return self


class ReplayMany(Insisting):
    """Which entries, how fast, and how much is insisted on it."""

    filter: Which = Field(default_factory=Which)
    """Not given: everything that waits."""
    dry_run: Flag = False
    """Only say what would happen."""
    rate: Annotated[float, Field(strict=True, gt=0, le=1000)] | None = None
    """Replays per second; not given: `replay.rate` of the upstream."""
    ramp: Flag = True
    """One first; when it succeeded two at a time, four, and so on. The job pauses when the first one fails."""
    limit: Annotated[Number, Field(ge=1)] | None = None
    """At most so many, the oldest."""
    stop_after: Annotated[Number, Field(ge=0, le=1_000_000)] = STOP_AFTER
    """Pause after so many failed replays; 0: never."""


class ReplaysQuery(Query):
    """Which replays; newest first."""

    since: Moment | None = None
    """Only those begun since: a time (2026-01-29T12:00:00Z), or how long ago (15m)."""
    limit: Limit = 100
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class Why(Body):
    """May be left out."""

    reason: Prose = ""
    """For the log of changes."""


class Replays:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "POST", "/dlq/{id}/replay", "Send one dead letter again, and wait for how that ends.", self.one,
            ReplayedOne, NoQuery, Insisting, parts=ID, refusals=(404, 409, 503),
        )  # fmt: skip
        yield Route(
            "POST", "/dlq/replay", "Send many dead letters again, or only say what that would do.", self.many,
            ReplayStarted, NoQuery, ReplayMany, refusals=(409, 503), otherwise={202: ReplayStarted},
        )  # fmt: skip
        yield Route(
            "GET", "/dlq/replays", "Replays of many entries, newest first.", self.page, ReplayPage, ReplaysQuery,
            refusals=(503,),
        )  # fmt: skip
        yield Route(
            "GET", "/dlq/replays/{id}", "How far a replay is.", self.shown, ReplayShown, parts=_REPLAY,
            refusals=(404, 503),
        )  # fmt: skip
        yield Route(
            "POST", "/dlq/replays/{id}/{action}", "Pause, resume or cancel a replay.", self.act, ReplayShown, NoQuery,
            Why, parts={**_REPLAY, "action": "What it is to do."}, one_of={"action": ACTIONS}, refusals=(404, 409, 503),
        )  # fmt: skip

    # ---- one -----------------------------------------------------------------------------------------------------

    async def one(self, call: Call[NoQuery, Insisting]) -> Told:
        dlq_id, body = call.named("id"), call.body
        durable = kept_in(self._proxy, dlq_id)
        before = (await durable.letters.get(dlq_id)).status
        settled = await _replayer(durable).one(dlq_id, who(call.request), force=body.force, reason=body.reason or "")
        await self._changes.note(
            call.request,
            "replayed by force" if body.force else "replayed",
            about=f"dead letter {dlq_id}",
            before={"status": before},
            after={"status": settled.entry.status, "outcome": settled.outcome},
            reason=body.reason or "",
        )
        return {"outcome": settled.outcome, "entry": await durable.letters.detail(dlq_id)}

    # ---- many ----------------------------------------------------------------------------------------------------

    async def many(self, call: Call[NoQuery, ReplayMany]) -> Told:
        body, durable = call.body, self._proxy.kept.durable
        order = Order(
            body.filter.chosen(clock.wall(), codes_known(self._proxy)),
            who(call.request),
            body.rate,
            body.ramp,
            body.limit,
            body.stop_after,
            body.force,
            body.reason or "",
        )
        if durable is None:
            if not body.dry_run:
                raise Problem(409, "CONFLICT", "there is nothing to replay: no dead letter has been kept so far")
            nothing = DryRun(
                by_verdict={},
                would_replay=0,
                stop_after=body.stop_after,
                refused_in_first_page={},
                first=(),
                breakers={},
            )
            return ReplayStarted(dry_run=nothing, replay=None)
        replayer = _replayer(durable)
        if body.dry_run:
            found = await replayer.dry_run(order)
            return {"dry_run": {**found, "breakers": self._breakers(durable, order)}, "replay": None}
        job = await replayer.start(order)
        await self._changes.note(
            call.request,
            "started a replay by force," if body.force else "started a replay,",
            about=job.job_id,
            before=None,
            after=order.shown(),
            reason=body.reason or "",
        )
        return json_response({"dry_run": None, "replay": job.shown()}, 202)

    def _breakers(self, durable: Durable, order: Order) -> dict[str, str]:
        """Of upstreams with entries that wait: the worst state of their breakers, where that is not closed."""
        now, waiting = clock.monotonic(), durable.listing.stats.count("upstream", WAITING)
        asked = order.wanted.upstream or waiting
        found = {}
        for state in self._proxy.directory.states():
            if state.label in asked and state.label in waiting:
                states = {breaker.state(now) for _, breaker in state.breakers()} - {"closed"}
                if states:
                    found[state.label] = "open" if "open" in states else "half_open"
        return found

    async def page(self, call: Call[ReplaysQuery, NoBody]) -> Told:
        durable = self._proxy.kept.durable
        if durable is None:
            return {"items": [], "next_cursor": None, "total": 0}
        query, now = call.query, clock.wall()
        since = None if query.since is None else query.since.wall(now)
        items, following, total = await _replayer(durable).jobs(query.limit, query.cursor, since)
        return {"items": items, "next_cursor": following, "total": total}

    async def shown(self, call: Call[NoQuery, NoBody]) -> Told:
        return await self._replays(call.named("id")).job(call.named("id"))

    async def act(self, call: Call[NoQuery, Why]) -> Told:
        job_id, action = call.named("id"), call.named("action")
        if action not in ACTIONS:
            raise unknown("action", action, ACTIONS, f"replays do not obey {action[:60]!r}", ", ".join(ACTIONS))
        replayer = self._replays(job_id)
        before = (await replayer.job(job_id))["state"]
        shown = await replayer.act(job_id, action)
        await self._changes.note(
            call.request,
            f"ordered {action} of",
            about=f"replay {job_id}",
            before={"state": before},
            after={"state": shown["state"]},
            reason=call.body.reason,
        )
        return shown

    def _replays(self, job_id: str) -> Replayer:
        durable = self._proxy.kept.durable
        if durable is None:
            raise Problem(404, "NOT_FOUND", f"there is no replay {job_id[:80]!r}: nothing has been kept so far")
        return _replayer(durable)


def _replayer(durable: Durable) -> Replayer:
    assert durable.replayer is not None  # attached before anybody gets to see the store
    return durable.replayer
