"""One replay of many entries, as a person asked for it and as it goes.

Law: data and its state machine, no sending. A job that was running when its process died is `interrupted`: it is not
taken up again by itself; the entries it held are reconciled, and whoever wants the rest starts another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from sidecar.durable.filters import Filter
from sidecar.durable.trouble import BadInput, NotNow
from sidecar.durable.workflow import Ask
from telemetry.timestamps import rfc3339

ENDED = frozenset({"done", "cancelled", "interrupted"})


@dataclass(frozen=True, slots=True)
class Order:
    """What a person asks for."""

    wanted: Filter
    by: str = "operator"
    rate: float | None = None
    """Replays per second; None: as the upstream's settings say."""
    ramp: bool = True
    limit: int | None = None
    force: bool = False
    reason: str = ""

    def check(self) -> None:
        if self.rate is not None and not 0 < self.rate <= 1000:
            raise BadInput("rate", "must be more than 0 and at most 1000 per second")
        if self.limit is not None and self.limit < 1:
            raise BadInput("limit", "must be 1 or more")
        if self.force and not self.reason.strip():
            raise BadInput("reason", "a forced replay needs one", "say why it is safe")

    @property
    def ask(self) -> Ask:
        return Ask(bulk=True, force=self.force, reason=self.reason)

    def shown(self) -> dict[str, Any]:
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "wanted"}
        return {"filter": self.wanted.shown(), **found}


@dataclass(slots=True)
class Job:
    """`outcomes` counts completed, failed, escalated, held_back and skipped entries."""

    job_id: str
    order: Order
    created_at: float
    total: int = 0
    state: str = "running"
    why: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Why entries were not sent."""
    current: str = ""
    """running: `sending`, `waiting for live traffic`."""
    ended_at: float | None = None
    going: asyncio.Event = field(default_factory=asyncio.Event)

    def pause(self, why: str = "") -> None:
        if self.state not in ("running", "paused"):
            raise NotNow(f"replay {self.job_id} is {self.state}", "only a running one can be paused")
        self.state, self.why = "paused", why
        self.going.clear()

    def resume(self) -> None:
        if self.state not in ("running", "paused"):
            raise NotNow(f"replay {self.job_id} is {self.state}", "start another one")
        self.state, self.why = "running", ""
        self.going.set()

    def cancel(self) -> None:
        """What is under way ends; nothing more is begun."""
        if self.state in ENDED:
            raise NotNow(f"replay {self.job_id} is {self.state}", "there is nothing left to cancel")
        self.state = "cancelled"
        self.going.set()

    @property
    def sent(self) -> int:
        return sum(self.outcomes[word] for word in ("completed", "failed", "escalated"))

    def shown(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "state": self.state,
            "why": self.why,
            "current": self.current if self.state == "running" else "",
            "order": self.order.shown(),
            "total": self.total,
            "done": self.sent + self.outcomes["skipped"],
            "outcomes": dict(self.outcomes),
            "skipped": dict(self.skipped),
            "created_at": rfc3339(self.created_at),
            "ended_at": None if self.ended_at is None else rfc3339(self.ended_at),
        }
