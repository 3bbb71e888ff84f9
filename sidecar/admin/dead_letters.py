"""Dead letters: the list, one of them, and what an operator does to it.

Law: what is kept, shown and allowed is decided by the durable layers; here they are asked. Reading never creates a
store: without one there are no dead letters. Every change is noted with its state before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sidecar import clock
from sidecar.admin.changes import Changes, who
from sidecar.admin.fields import NoBody, NoQuery
from sidecar.admin.letters_asked import Change, DeadLettersQuery, DiscardQuery, EditGiven
from sidecar.admin.letters_shown import DeadLetterExplained, DeadLetterPage
from sidecar.admin.problem import Problem
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy

if TYPE_CHECKING:
    from sidecar.durable.entry import Entry
    from sidecar.durable.layers import Durable
    from sidecar.durable.operator import Edit

ID = {"id": "The id of a dead letter, as in `x-sidecar-dlq-id`."}
_EDIT_LIMIT = 8 * 1024 * 1024


def kept_in(proxy: Proxy, dlq_id: str) -> Durable:
    """The store, for something in it: 404 when there is none."""
    durable = proxy.kept.durable
    if durable is None:
        raise Problem(404, "NOT_FOUND", f"there is no dead letter {dlq_id[:80]!r}: nothing has been kept so far")
    return durable


def codes_known(proxy: Proxy) -> Collection[str]:
    """The error codes there are, and those of entries from times when there were others."""
    durable = proxy.kept.durable
    return [*proxy.registry, *(durable.listing.stats.count("error_class") if durable is not None else ())]


class DeadLetters:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/dlq", "Requests that finally failed, newest first.", self.page, DeadLetterPage, DeadLettersQuery,
            refusals=(503,),
        )  # fmt: skip  # as in the other rows: where, what for, then what may be asked
        yield Route(
            "GET", "/dlq/{id}", "One dead letter: everything but its secrets, and whether it may be replayed.",
            self.one, DeadLetterExplained, parts=ID, refusals=(404, 503),
        )  # fmt: skip
        yield Route(
            "PATCH", "/dlq/{id}", "Note what was fixed, correct the request, or take the next step of the workflow.",
            self.change, DeadLetterExplained, NoQuery, Change, parts=ID, refusals=(404, 409, 503),
            body_limit=_EDIT_LIMIT,
        )  # fmt: skip
        yield Route(
            "DELETE", "/dlq/{id}", "Mark a dead letter as discarded: it stays to be looked at and is never sent.",
            self.discard, DeadLetterExplained, DiscardQuery, parts=ID, refusals=(404, 409, 503),
        )  # fmt: skip

    async def page(self, call: Call[DeadLettersQuery, NoBody]) -> Told:
        query, durable = call.query, self._proxy.kept.durable
        wanted = query.chosen(clock.wall(), codes_known(self._proxy))
        await self._changes.note_reading(call.request, "dead letters")
        if durable is None:
            return {"items": [], "next_cursor": None, "total": 0}
        page = await durable.listing.page(wanted, limit=query.limit, cursor=query.cursor)
        total = sum((await durable.listing.count(wanted)).values()) if query.cursor is None else None
        return {"items": await durable.listing.rows_shown(page), "next_cursor": page.next_cursor, "total": total}

    async def one(self, call: Call[NoQuery, NoBody]) -> Told:
        dlq_id = call.named("id")
        await self._changes.note_reading(call.request, f"dead letter {dlq_id[:60]}")
        return await kept_in(self._proxy, dlq_id).letters.detail(dlq_id)

    async def change(self, call: Call[NoQuery, Change]) -> Told:
        dlq_id, by, body = call.named("id"), who(call.request), call.body
        durable = kept_in(self._proxy, dlq_id)
        before, note = await durable.letters.get(dlq_id), body.notes or ""
        told: dict[str, object] = {}
        if body.remediation is not None:
            given = body.remediation
            entry = await durable.operator.remediate(dlq_id, by, given.kind, given.evidence, given.ticket, note)
            what, told["remediation"] = "added a remediation to", given.kind
        elif body.edit is not None:
            entry = await durable.operator.edit(dlq_id, by, await _edit(durable, dlq_id, body.edit), note)
            what, told["edited"] = "edited the request of", _changed(body.edit)
        elif body.state is not None:
            entry = await self._step(durable, dlq_id, by, body.state, note)
            what = f"marked as {body.state}"
        else:
            entry = await durable.operator.annotate(dlq_id, by, note)
            what = "annotated"
        await self._note(call, what, before, entry, told, reason=note)
        return await durable.letters.detail(dlq_id)

    async def _step(self, durable: Durable, dlq_id: str, by: str, state: str, note: str) -> Entry:
        if state == "validated":
            return await durable.operator.validate(dlq_id, by, note)
        if state == "verified":
            return await durable.operator.verify(dlq_id, by, note)
        return await durable.operator.close(dlq_id, by, note)

    async def discard(self, call: Call[DiscardQuery, NoBody]) -> Told:
        dlq_id, reason = call.named("id"), call.query.reason
        durable = kept_in(self._proxy, dlq_id)
        before = await durable.letters.get(dlq_id)
        entry = await durable.operator.discard(dlq_id, who(call.request), reason)
        await self._note(call, "discarded", before, entry, {}, reason=reason)
        return await durable.letters.detail(dlq_id)

    async def _note(
        self, call: Call[Any, Any], what: str, before: Entry, after: Entry, told: Mapping[str, object], reason: str
    ) -> None:
        await self._changes.note(
            call.request,
            what,
            about=f"dead letter {after.dlq_id}",
            before={"status": before.status, "state": before.state},
            after={"status": after.status, "state": after.state, **told},
            reason=reason,
        )


async def _edit(durable: Durable, dlq_id: str, given: EditGiven) -> Edit:
    """Headers that are not named stay, sealed ones too: the request is opened here and goes nowhere else."""
    from sidecar.durable.operator import Edit  # with its sealing, only for who edits

    headers = None
    if given.headers is not None:
        named = {name.lower().encode() for name in given.headers}
        there = (await durable.letters.request(dlq_id)).headers
        headers = [field for field in there if field[0].lower() not in named]
        headers += [
            (name.encode(), value.encode("latin-1")) for name, value in given.headers.items() if value is not None
        ]
    return Edit(given.url, headers, given.content)


def _changed(given: EditGiven) -> list[str]:
    """What was changed, without its values: they may be secret."""
    found = [name for name, value in (("url", given.url), ("body", given.content)) if value is not None]
    return found + sorted(given.headers or ())
