"""Many dead letters at once: counted in groups, annotated, given up; and what is sealed in one of them, shown.

Law: what would happen can be asked before (`dry_run`); a filter that is empty means everything only when `all` says so.
What is sealed is shown to nobody but who may operate, and that is written down with the reason before the first byte.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import web
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from sidecar import clock
from sidecar.admin.changes import Changes, who
from sidecar.admin.dead_letters import ID, codes_known, kept_in
from sidecar.admin.fields import Answer, Body, Flag, NoBody, NoQuery
from sidecar.admin.letters_asked import Note, Reason, RemediationGiven, Which
from sidecar.admin.problem import Problem
from sidecar.admin.route import Call, Route, Told
from sidecar.durable.filters import Filter
from sidecar.durable.groups import WORDS, groups
from sidecar.durable.trouble import NotNow
from sidecar.proxy import Proxy
from telemetry.timestamps import rfc3339

if TYPE_CHECKING:
    from sidecar.durable.entry import Entry
    from sidecar.durable.layers import Durable

_AT_ONCE = 100
_FIRST = 10
_BY = ("error_class", "upstream")


def _words(given: Any) -> tuple[str, ...]:
    words = tuple(word.strip() for word in given.split(",")) if isinstance(given, str) else ()
    if not words or len(set(words)) != len(words) or not set(words) <= set(WORDS):
        raise ValueError(f"must be one or more of {', '.join(WORDS)}, separated by commas")
    return words


By = Annotated[
    tuple[str, ...],
    PlainValidator(_words),
    WithJsonSchema({"type": "string", "examples": ["error_class,upstream"]}),
]


class GroupsQuery(Which):
    """Which dead letters, and what they have in common."""

    by: By | None = None
    """Words, separated by commas: error_class, upstream, verdict, status, stage, operation. Not given: error_class and
    upstream."""


class GroupShown(Answer):
    """Dead letters that have the same words."""

    group: Mapping[str, str | None]
    entries: int
    oldest: str
    newest: str


class GroupPage(Answer):
    """The largest first, at most a thousand."""

    items: tuple[GroupShown, ...]
    next_cursor: None = None
    total: int
    """How many groups there are."""
    entries: int
    """How many dead letters are in all of them."""


class Chosen(Body):
    """Which dead letters."""

    filter: Which = Field(default_factory=Which)
    all: Flag = False
    """Everything, where the filter says nothing."""
    dry_run: Flag = False
    """Only say how many that are."""

    @model_validator(mode="after")
    def _something_is_chosen(self) -> Chosen:
        if not self.filter.model_fields_set and not self.all:
            raise ValueError("an empty `filter` means everything only with `all: true`")
        return self


class DiscardMany(Chosen):
    """Which, and why they are never to be sent."""

    reason: Reason


class AnnotateMany(Chosen):
    """Which, and what is noted on each."""

    notes: Note | None = None
    remediation: RemediationGiven | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> AnnotateMany:
        if self.notes is None and self.remediation is None:
            raise ValueError("must say what to note: notes, remediation or both")
        return self


class ManyChanged(Answer):
    """What became of them."""

    fit: int
    """So many fit the filter."""
    changed: int
    """0 in a dry run."""
    refused: Mapping[str, int]
    """How many were left as they are, by why."""
    first: tuple[str, ...]
    """The oldest of them."""


class Reveal(Body):
    """What is to be shown, and why."""

    part: Literal["body", "response"]
    """`body`: of the request. `response`: of the upstream's last answer, as much as was kept."""
    reason: Reason
    """For the log of changes."""


class LettersInBulk:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/dlq/groups", "How many dead letters have what in common.", self.groups, GroupPage, GroupsQuery,
            refusals=(503,),
        )  # fmt: skip  # as in the other rows
        yield Route(
            "POST", "/dlq/annotate", "Note the same on many dead letters.", self.annotate, ManyChanged, NoQuery,
            AnnotateMany, refusals=(503,),
        )  # fmt: skip
        yield Route(
            "POST", "/dlq/discard", "Mark many dead letters as discarded.", self.discard, ManyChanged, NoQuery,
            DiscardMany, refusals=(503,),
        )  # fmt: skip
        yield Route(
            "POST", "/dlq/{id}/reveal", "The body of a request, or of its last answer, as bytes. It is written down.",
            self.reveal, None, NoQuery, Reveal, parts=ID, also=("application/octet-stream",), refusals=(404, 503),
        )  # fmt: skip

    # ---- counted -------------------------------------------------------------------------------------------------

    async def groups(self, call: Call[GroupsQuery, NoBody]) -> Told:
        query, durable = call.query, self._proxy.kept.durable
        wanted, by = query.chosen(clock.wall(), codes_known(self._proxy)), query.by or _BY
        if durable is None:
            return {"items": [], "next_cursor": None, "total": 0, "entries": 0}
        found = await durable.store.read(lambda connection: groups(connection, wanted, by))
        items = [
            {
                "group": dict(zip(by, group.words, strict=True)),
                "entries": group.entries,
                "oldest": rfc3339(group.oldest),
                "newest": rfc3339(group.newest),
            }
            for group in found.largest
        ]
        return {"items": items, "next_cursor": None, "total": found.groups, "entries": found.entries}

    # ---- changed -------------------------------------------------------------------------------------------------

    async def annotate(self, call: Call[NoQuery, AnnotateMany]) -> Told:
        body, by = call.body, who(call.request)

        async def one(durable: Durable, entry: Entry) -> None:
            if body.remediation is not None:
                given = body.remediation
                await durable.operator.remediate(
                    entry.dlq_id, by, given.kind, given.evidence, given.ticket, body.notes or ""
                )
            else:
                await durable.operator.annotate(entry.dlq_id, by, body.notes or "")

        return await self._each(call, "annotated", one, body.notes or "")

    async def discard(self, call: Call[NoQuery, DiscardMany]) -> Told:
        body, by = call.body, who(call.request)

        async def one(durable: Durable, entry: Entry) -> None:
            if entry.status not in ("completed", "discarded"):
                await durable.operator.discard(entry.dlq_id, by, body.reason)
            else:
                raise NotNow(f"it is {entry.status}")

        return await self._each(call, "discarded", one, body.reason)

    async def _each(
        self,
        call: Call[NoQuery, Any],
        what: str,
        one: Callable[[Durable, Entry], Awaitable[None]],
        reason: str,
    ) -> Told:
        chosen: Chosen = call.body
        wanted = chosen.filter.chosen(clock.wall(), codes_known(self._proxy))
        durable = self._proxy.kept.durable
        changed, refused, first, fit = 0, Counter[str](), list[str](), 0
        if durable is None:
            return {"fit": 0, "changed": 0, "refused": {}, "first": []}
        if chosen.dry_run:
            fit = sum((await durable.listing.count(wanted)).values())
            page = await durable.listing.page(wanted, limit=_FIRST, oldest_first=True)
            return {"fit": fit, "changed": 0, "refused": {}, "first": [entry.dlq_id for entry in page.items]}
        try:
            async for some in _pages(durable, wanted):
                fit += len(some)
                first += [entry.dlq_id for entry in some[: _FIRST - len(first)]]
                ended = await asyncio.gather(*(one(durable, entry) for entry in some), return_exceptions=True)
                for error in ended:
                    if error is None:
                        changed += 1
                    elif isinstance(error, NotNow):
                        refused[error.message.partition(" ")[2] or error.message] += 1
                    else:
                        raise error
        finally:
            await self._changes.note(
                call.request,
                f"{what} by a filter:",
                about=f"{changed} dead letters",
                before={"filter": wanted.shown()},
                after={"changed": changed, "refused": dict(refused)},
                reason=reason,
            )
        return {"fit": fit, "changed": changed, "refused": dict(refused), "first": first}

    # ---- shown ---------------------------------------------------------------------------------------------------

    async def reveal(self, call: Call[NoQuery, Reveal]) -> Told:
        dlq_id, part = call.named("id"), call.body.part
        letters = kept_in(self._proxy, dlq_id).letters
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        if part == "response":
            answer = await letters.last_answer(dlq_id)
            if answer is None:
                raise Problem(404, "NOT_FOUND", f"no body of a last answer was kept with {dlq_id[:80]}")
            await self._note_reveal(call, dlq_id, part)
            await response.prepare(call.request)
            await response.write(answer)
        else:
            entry, request = await letters.get(dlq_id), await letters.request(dlq_id)
            if not entry.body["kept"]:
                raise Problem(404, "NOT_FOUND", f"the body of {dlq_id[:80]} is not here: {entry.body['note']}")
            await self._note_reveal(call, dlq_id, part)
            await response.prepare(call.request)
            async for chunk in letters.payloads.body(request):
                await response.write(chunk)
        await response.write_eof()
        return response

    async def _note_reveal(self, call: Call[NoQuery, Reveal], dlq_id: str, part: str) -> None:
        await self._changes.note(
            call.request,
            f"read the {part} of",
            about=f"dead letter {dlq_id}",
            before=None,
            after=None,
            reason=call.body.reason,
        )


async def _pages(durable: Durable, wanted: Filter) -> Any:
    cursor = None
    while True:
        page = await durable.listing.page(wanted, limit=_AT_ONCE, cursor=cursor, oldest_first=True)
        yield page.items
        cursor = page.next_cursor
        if cursor is None:
            return
