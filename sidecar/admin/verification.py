"""Is everything there that should be, and is it whole? And what a person says about what is not.

Law: looking repairs what can be repaired without a decision and sets aside what is damaged; it removes nothing. What
is missing is said until somebody has answered for it with a reason, which is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, Flag, NoQuery
from sidecar.admin.letters_asked import Reason
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from telemetry.timestamps import rfc3339

if TYPE_CHECKING:
    from sidecar.durable.layers import Durable

_MOST_SHOWN = 1_000


class Verify(Body):
    """May be left out: only look."""

    accept: Flag = False
    """What is missing has been looked into: stop saying so, and remove the body files that no entry refers to."""
    reason: Reason | None = None
    """What was found out; needed with `accept`."""

    @model_validator(mode="after")
    def _accepting_has_a_reason(self) -> Verify:
        if self.accept and self.reason is None:
            raise ValueError("`accept` needs a `reason`: say what was found out about what is missing")
        return self


class DamagedShown(Answer):
    """Something that is not what was written."""

    dlq_id: str
    why: str


class MissingShown(Answer):
    """Something that should be in the store and is not."""

    at: str
    """When that was found."""
    what: str


class QuarantinedShown(Answer):
    """A row that could not be read any more. Its bytes are kept; a backup or an export has the entry."""

    at: str
    source: str
    ident: str
    why: str


class UnclaimedShown(Answer):
    """Body files that no entry refers to, kept because an entry may be missing."""

    files: int
    bytes: int


class Verified(Answer):
    """What was found."""

    entries: int
    """So many were read, with everything that belongs to them."""
    damaged: int
    repaired: int
    """Disagreements that were put right, and damage that is none any more."""
    damaged_entries: tuple[DamagedShown, ...]
    """The first thousand: newly found or set aside before. They cannot be replayed as they are."""
    quarantined: tuple[QuarantinedShown, ...]
    """The newest thousand."""
    missing: tuple[MissingShown, ...]
    unclaimed: UnclaimedShown
    accepted: bool
    """What was missing has been answered for now, and unclaimed files are removed."""


class Verification:
    """The handler."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "POST", "/dlq/verify", "Read and check everything that is kept; answer for what is missing.",
            self.verify, Verified, NoQuery, Verify, refusals=(503,),
        )  # fmt: skip

    async def verify(self, call: Call[NoQuery, Verify]) -> Told:
        durable = self._proxy.kept.durable
        if durable is None:
            nothing = {"entries": 0, "damaged": 0, "repaired": 0, "damaged_entries": [], "quarantined": []}
            return {**nothing, "missing": [], "unclaimed": {"files": 0, "bytes": 0}, "accepted": False}
        found = await _found(durable)
        if call.body.accept:
            await durable.store.accept_losses()
            await durable.letters.bodies.release_unclaimed()
            await self._changes.note(
                call.request,
                "answered for",
                about="what is missing in the store",
                before={"missing": [each["what"] for each in found["missing"]], "unclaimed": found["unclaimed"]},
                after=None,
                reason=call.body.reason or "",
            )
        return {**found, "accepted": call.body.accept}


async def _found(durable: Durable) -> dict[str, Any]:
    checked = await durable.upkeep.check()
    rows = await durable.store.read(
        lambda connection: connection.execute(
            "SELECT at, source, ident, why FROM quarantine ORDER BY id DESC LIMIT ?", (_MOST_SHOWN,)
        ).fetchall()
    )
    unclaimed = await durable.letters.bodies.unclaimed()
    return {
        "entries": checked.entries,
        "damaged": checked.damaged,
        "repaired": checked.repaired,
        "damaged_entries": [{"dlq_id": dlq_id, "why": why} for dlq_id, why in checked.which[:_MOST_SHOWN]],
        "quarantined": [
            {"at": rfc3339(at), "source": source, "ident": ident, "why": why} for at, source, ident, why in rows
        ],
        "missing": [{"at": rfc3339(loss.at), "what": loss.what} for loss in durable.store.losses],
        "unclaimed": {"files": unclaimed.files, "bytes": unclaimed.bytes},
    }
