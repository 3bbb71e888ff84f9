"""The keys that dead letters, stored answers and deliveries are sealed with.

Law: no key is ever shown, only ids. A rotation is answered when the new key seals; what older keys sealed is sealed
anew in the background, and an old key is given up only after a whole pass found nothing under it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidecar import clock
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, NoBody, NoQuery, Prose
from sidecar.admin.problem import Problem
from sidecar.admin.route import Call, Route, Told
from sidecar.durable.trouble import Trouble
from sidecar.proxy import Proxy

if TYPE_CHECKING:
    from sidecar.durable.layers import Durable
    from sidecar.durable.rotation import Resealed


class Rotate(Body):
    """May be left out."""

    reason: Prose = ""
    """For the log of changes."""


class ResealingShown(Answer):
    """How far the sealing anew is, or was at its end."""

    state: str
    """running, done, or interrupted (rotate again to go on)."""
    why: str
    """Of an interruption."""
    values: int
    files: int
    damaged: int
    """What could not be opened. Old keys are not given up while there is any."""


class KeysShown(Answer):
    """Ids of keys."""

    active: str | None
    """The one that seals; null while there is no store."""
    needed: tuple[str, ...]
    """Those that something in the store is sealed with, or may be."""
    resealing: ResealingShown | None
    """Of the last rotation since the start."""


class Keys:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes
        self._progress: Resealed | None = None
        self._state = ""
        self._why = ""
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/keys", "Which keys are in use, by id.", self.shown, KeysShown, refusals=(503,))
        yield Route(
            "POST", "/keys/rotate", "Seal with a new key from now on, and everything older anew in the background.",
            self.rotate, KeysShown, NoQuery, Rotate, refusals=(409, 503),
        )  # fmt: skip

    async def shown(self, call: Call[NoQuery, NoBody]) -> Told:
        return await self._shown(self._proxy.kept.durable)

    async def rotate(self, call: Call[NoQuery, Rotate]) -> Told:
        durable = self._proxy.kept.durable
        if durable is None:
            raise Problem(409, "CONFLICT", "nothing is sealed yet; a key is made when the first dead letter is kept")
        if self._state == "running":
            raise Problem(409, "CONFLICT", "a rotation is still under way; `GET /keys` tells how far it is")
        from sidecar.durable.rotation import Resealed

        keyring = durable.letters.keyring
        before = keyring.active
        self._state, self._why, self._progress = "running", "", Resealed()
        try:
            if keyring.from_environment and set(await durable.rotation.needed()) - {before}:
                after = before  # the new key came with the environment; what is left is the sealing
            else:
                after = await durable.rotation.rotate()
        except BaseException:
            self._state, self._progress = "", None
            raise
        self._task = clock.spawn(self._reseal(durable, self._progress), "seal anew")
        await self._changes.note(
            call.request, "rotated", about="the sealing key", before=before, after=after, reason=call.body.reason
        )
        return await self._shown(durable)

    async def _reseal(self, durable: Durable, progress: Resealed) -> None:
        try:
            await durable.rotation.reseal(progress)
        except Trouble as trouble:
            self._state, self._why = "interrupted", str(trouble)
            self._proxy.log.warn("sidecar.keys.interrupted", f"sealing anew was interrupted, rotate again: {trouble}")
        else:
            self._state = "done"
            self._proxy.log.info(
                "sidecar.keys.rotated",
                f"{progress.values} values and {progress.files} files are sealed with the new key",
                damaged=progress.damaged,
            )

    async def _shown(self, durable: Durable | None) -> KeysShown:
        resealing = None
        if self._progress is not None:
            done = self._progress
            resealing = ResealingShown(
                state=self._state, why=self._why, values=done.values, files=done.files, damaged=done.damaged
            )
        if durable is None:
            return KeysShown(active=None, needed=(), resealing=resealing)
        needed = await durable.rotation.needed()
        return KeysShown(active=durable.letters.keyring.active, needed=tuple(needed), resealing=resealing)
