"""One replay: claim → send → settle.

Law: nothing is sent outside of this, and however the send ends (an answer, an exception, a time-out, the end of the
process) the result is written down before anything else happens to the entry. What cannot be written yet is tried
until it is; until then the claim stands, and nobody else sends the entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sidecar import clock
from sidecar.durable.claims import Claims, Result, Settled
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.entry import Entry
from sidecar.durable.trouble import NotKept
from sidecar.durable.workflow import Ask, Refusal
from telemetry.record import SENT

Send = Callable[[Entry], Awaitable[Result]]
Event = Callable[[str, dict[str, object]], None]

_WRITE_AGAIN = 0.5


def quiet(event: str, facts: dict[str, object]) -> None:
    """Nobody listens."""


class Attempts:
    """`send` goes through the pipeline of live calls; whatever it raises counts as sent without an answer."""

    def __init__(
        self,
        letters: DeadLetters,
        send: Send,
        on_event: Event = quiet,
        sleep: Callable[[float], Awaitable[None]] = clock.sleep,
    ) -> None:
        self._letters = letters
        self._send = send
        self._on_event = on_event
        self._sleep = sleep
        self._claims = Claims(letters)
        self._settling: set[asyncio.Task[Settled]] = set()
        self.closing = False

    async def make(self, dlq_id: str, job: str, ask: Ask, by: str) -> Settled | Refusal:
        claimed = await self._claims.take(dlq_id, job, ask, by)
        if isinstance(claimed, Refusal):
            return claimed
        lease = self._letters.terms_of(claimed.upstream).replay.lease
        try:
            async with asyncio.timeout(lease):
                result = await self._send(claimed)
        except asyncio.CancelledError:
            unknown = Result(ok=False, code="SHUTTING_DOWN", phase=SENT, message="the sidecar was stopped")
            await self._written(claimed, job, unknown)
            raise
        except TimeoutError:
            result = Result(ok=False, code="NETWORK_TIMEOUT", message=f"no result within replay.lease ({lease:g} s)")
        except Exception as error:  # our own fault: it may have been sent, so that is what is noted
            result = Result(ok=False, code="SIDECAR_INTERNAL", message=f"{type(error).__name__}: {error}")
        return await self._written(claimed, job, result)

    async def _written(self, claimed: Entry, job: str, result: Result) -> Settled:
        """Goes on when whoever asked is cancelled."""
        settling = clock.spawn(self._settle(claimed, job, result), "settle a replay")
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        return await asyncio.shield(settling)

    async def settled(self) -> None:
        """Whatever has ended is written down."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    async def _settle(self, claimed: Entry, job: str, result: Result) -> Settled:
        """Until it is written: only a crash leaves a claim behind, and that is reconciled."""
        while True:
            try:
                settled = await self._claims.settle(claimed.dlq_id, job, result)
                break
            except NotKept:
                if self.closing or not self._letters.store.running:
                    return Settled(claimed, "lost")
                await self._sleep(_WRITE_AGAIN)
        self._tell(settled, result)
        return settled

    def _tell(self, settled: Settled, result: Result) -> None:
        entry, outcome = settled
        if outcome not in ("completed", "failed", "escalated"):
            return
        self._letters.counts.dead_letter_replayed(entry.upstream, outcome)
        facts: dict[str, object] = {
            "dlq_id": entry.dlq_id,
            "upstream": entry.upstream,
            "outcome": outcome,
            "code": result.code or None,
            "status": result.status,
        }
        self._on_event("replayed", facts)
        if outcome == "escalated":
            self._on_event("escalated", facts)
