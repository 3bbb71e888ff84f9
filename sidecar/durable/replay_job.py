"""One replay of many entries, as a person asked for it and as it goes.

Law: data and its state machine, no sending. A job that was running when its process died is `interrupted`: it is not
taken up again by itself; the entries it held are reconciled, and whoever wants the rest starts another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from sidecar import clock
from sidecar.durable.filters import Filter
from sidecar.durable.trouble import BadInput, NotNow
from sidecar.durable.workflow import Ask
from telemetry.timestamps import rfc3339

AUTOMATIC = "auto: "
STOP_AFTER = 10
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
    stop_after: int = STOP_AFTER
    """The job pauses after so many failed replays; 0: never."""
    force: bool = False
    reason: str = ""

    def check(self) -> None:
        if self.rate is not None and not 0 < self.rate <= 1000:
            raise BadInput("rate", "must be more than 0 and at most 1000 per second")
        if self.limit is not None and self.limit < 1:
            raise BadInput("limit", "must be 1 or more")
        if not 0 <= self.stop_after <= 1_000_000:
            raise BadInput("stop_after", "must be 0 (never) to 1000000")
        if self.force and not self.reason.strip():
            raise BadInput("reason", "a forced replay needs one", "say why it is safe")

    @property
    def automatic(self) -> bool:
        """Nobody is there to resume it."""
        return self.by.startswith(AUTOMATIC)

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
    """Why entries were not sent: kinds of reasons, so that they are few however many entries there are."""
    failures: int = 0
    """Since it began or was last resumed."""
    monotonic: Callable[[], float] = clock.monotonic
    going_since: float | None = None
    worked: float = 0.0
    """Seconds before that, pauses left out."""
    current: str = ""
    """running: `sending`, `waiting for live traffic`."""
    ended_at: float | None = None
    going: asyncio.Event = field(default_factory=asyncio.Event)

    def pause(self, why: str = "") -> None:
        if self.state not in ("running", "paused"):
            raise NotNow(f"replay {self.job_id} is {self.state}", "only a running one can be paused")
        self.state, self.why = "paused", why
        self.going.clear()
        self._stand_still()

    def go(self) -> None:
        self.going_since = self.monotonic()
        self.going.set()

    def _stand_still(self) -> None:
        self.worked, self.going_since = self.seconds, None

    def resume(self) -> None:
        if self.state not in ("running", "paused"):
            raise NotNow(f"replay {self.job_id} is {self.state}", "start another one")
        self.state, self.why, self.failures = "running", "", 0
        if self.going_since is None:
            self.go()

    def cancel(self) -> None:
        """What is under way ends; nothing more is begun."""
        if self.state in ENDED:
            raise NotNow(f"replay {self.job_id} is {self.state}", "there is nothing left to cancel")
        self.state = "cancelled"
        self.end()

    def give_up(self, why: str) -> None:
        """Paused; or ended, where nobody is there to resume it."""
        if self.order.automatic:
            self.state, self.why = "cancelled", why
            self.end()
        else:
            self.pause(why)

    def end(self) -> None:
        self._stand_still()
        self.going.set()  # whoever waits has to hear of it

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self.failures += outcome in ("failed", "escalated")
        self.total = max(self.total, self.done)  # more may have come since it was counted

    @property
    def done(self) -> int:
        return self.sent + self.outcomes["skipped"]

    @property
    def seconds(self) -> float:
        """At work so far."""
        return self.worked + (0.0 if self.going_since is None else self.monotonic() - self.going_since)

    @property
    def sent(self) -> int:
        return sum(self.outcomes[word] for word in ("completed", "failed", "escalated"))

    def _pace(self) -> dict[str, Any]:
        rate = self.done / self.seconds if self.done and self.seconds > 0 else None
        left = self.total - self.done
        return {
            "percent": round(100 * self.done / self.total, 1) if self.total else 100.0,
            "per_second": None if rate is None else round(rate, 2),
            "seconds_left": None if rate is None or self.state in ENDED else round(left / rate, 1),
        }

    def shown(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "state": self.state,
            "why": self.why,
            "current": self.current if self.state == "running" else "",
            "order": self.order.shown(),
            "total": self.total,
            "done": self.done,
            **self._pace(),
            "outcomes": dict(self.outcomes),
            "skipped": dict(self.skipped),
            "created_at": rfc3339(self.created_at),
            "ended_at": None if self.ended_at is None else rfc3339(self.ended_at),
        }
