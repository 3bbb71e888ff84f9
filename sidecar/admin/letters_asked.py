"""What may be asked about dead letters and done to them: the shapes of queries and bodies.

Law: every field is checked here, before anything is touched; a word that does not exist is refused with the nearest
one that does. What an edit may put into a request cannot change where it goes or how it is framed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from config.keys import nearest
from sidecar.admin.fields import Body, Moment, Query, Text, without_secrets
from sidecar.admin.problem import wrong, wrong_choice
from sidecar.durable.filters import LARGEST_PAGE, Filter
from sidecar.durable.verdict import WORDS
from sidecar.durable.workflow import STATUSES

_MOST_WORDS = 50
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING = frozenset(
    "host content-length transfer-encoding connection keep-alive te trailer upgrade expect proxy-authorization "
    "proxy-connection".split()
)
Value = TypeVar("Value", str, str | None)


# ---- values ------------------------------------------------------------------------------------------------------


def _words(given: Any, allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
    if not isinstance(given, str):
        raise ValueError("must be words, separated by commas")
    words = tuple(part.strip(" ") for part in given.split(","))
    if not 1 <= len(words) <= _MOST_WORDS or not all(0 < len(word) <= 300 for word in words):
        raise ValueError(f"must name 1 to {_MOST_WORDS} values, separated by commas")
    for word in words:
        if allowed and word not in allowed:
            near = nearest(word, allowed)
            hint = f'; did you mean "{near}"?' if near is not None else ""
            raise ValueError(f"{word[:40]!r} is not one of {', '.join(allowed)}{hint}")
    return words


def _schema(*allowed: str) -> WithJsonSchema:
    word = f"(?:{'|'.join(allowed)})" if allowed else "[^,]+"
    return WithJsonSchema({"type": "string", "pattern": f"^ *{word} *(?:, *{word} *)*$", "examples": [*allowed[:1]]})


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def some(most: int) -> AfterValidator:
    """From 1 to so many. Asked afterwards: a list whose only item is wrong is not too short as well."""

    def check(given: tuple[Any, ...]) -> tuple[Any, ...]:
        if not 1 <= len(given) <= most:
            raise ValueError(f"must have 1 to {most} items")
        return given

    return AfterValidator(check)


def _bytes(given: Any) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except (ValueError, TypeError, binascii.Error):
        raise ValueError("must be base64") from None


def _url(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text or "#" in text:
        raise ValueError("must be an absolute url in ASCII, without spaces and fragment")
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError("must not hold credentials; send them in a header")
    return text


def _headers(given: Mapping[str, Value]) -> Mapping[str, Value]:
    for name, value in given.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is not the name of a header")
        if name.lower() in _FRAMING:
            raise ValueError(f"{name} follows from the url and the body; leave it out")
        if value is not None and not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the value of {name} has characters that a header cannot carry")
    return given


Words = Annotated[tuple[str, ...], PlainValidator(_words), _schema()]
Statuses = Annotated[tuple[str, ...], PlainValidator(lambda given: _words(given, STATUSES)), _schema(*STATUSES)]
Verdicts = Annotated[tuple[str, ...], PlainValidator(lambda given: _words(given, WORDS)), _schema(*WORDS)]
Reason = Annotated[str, Field(max_length=500), AfterValidator(_not_blank), AfterValidator(without_secrets)]
Note = Annotated[str, Field(max_length=4000), AfterValidator(_not_blank), AfterValidator(without_secrets)]
Content = Annotated[bytes, PlainValidator(_bytes), WithJsonSchema({"type": "string", "format": "byte"})]
Url = Annotated[str, Field(max_length=8192), AfterValidator(_url)]
HeadersGiven = Annotated[Mapping[str, str], Field(max_length=200), AfterValidator(_headers)]
HeadersChanged = Annotated[Mapping[str, str | None], Field(max_length=200), AfterValidator(_headers)]


# ---- which -------------------------------------------------------------------------------------------------------


class Which(Query):
    """Which dead letters. Several words in one field, separated by commas, mean any of them."""

    status: Statuses | None = None
    """Only those in one of these."""
    upstream: Words | None = None
    """Only those of these upstreams: a name, or host:port of one that is not configured."""
    error_class: Words | None = None
    """Only those that failed last with one of these codes."""
    verdict: Verdicts | None = None
    """Only those with one of these replay safety verdicts."""
    since: Moment | None = None
    """Only those kept since: a time (2026-01-29T12:00:00Z), or how long ago (15m)."""
    until: Moment | None = None
    """Only those kept before: a time, or how long ago."""
    q: Annotated[str, Field(max_length=200)] | None = None
    """Words that must all be there, in operation, message, ids or notes; `charg*` stands for all that begin so."""
    workflow: Annotated[str, Field(max_length=200)] | None = None
    """Only those of this workflow."""

    def chosen(self, now: float, codes: Collection[str]) -> Filter:
        """Raises a Problem, or BadInput, about the field that cannot be."""
        for code in self.error_class or ():
            if code not in codes:
                raise wrong_choice(
                    "error_class", code, codes, f"{code[:60]!r} is not an error code; GET /errors lists what there is"
                )
        since = None if self.since is None else self.since.wall(now)
        until = None if self.until is None else self.until.wall(now)
        if since is not None and until is not None and since >= until:
            raise wrong("until", None, "must be after `since`")
        return Filter(
            status=self.status or (),
            upstream=self.upstream or (),
            error_class=self.error_class or (),
            verdict=self.verdict or (),
            since=since,
            until=until,
            q=(self.q or "").strip(),
            workflow=(self.workflow or "").strip(),
        )


class ExportQuery(Which):
    """Which dead letters; all of them, oldest first."""


class DeadLettersQuery(Which):
    """Which dead letters; newest first."""

    limit: Annotated[int, Field(ge=1, le=LARGEST_PAGE)] = 50
    cursor: Text | None = None
    """`next_cursor` of the page before, for the same filter."""


class DiscardQuery(Query):
    """Why it is never to be sent."""

    reason: Reason
    """For whoever looks at the entry, and for the log of changes."""


# ---- changes -----------------------------------------------------------------------------------------------------


class RemediationGiven(Body):
    """What was wrong, and where it can be seen that it is fixed."""

    kind: Literal["transient", "data", "auth_config", "code_defect"]
    """What was wrong."""
    evidence: Note
    """What was fixed and where that can be seen."""
    ticket: Annotated[str, Field(max_length=200), AfterValidator(without_secrets)] = ""
    """Where it is tracked."""


class EditGiven(Body):
    """Corrections to the request. The original is kept beside it; the destination cannot be changed."""

    url: Url | None = None
    """The whole url, on the same scheme and host."""
    headers: HeadersChanged | None = None
    """Name → value, or null to drop the header. Those not named stay as they are."""
    body: Annotated[str, Field(max_length=4_194_304)] | None = None
    """The whole body, as text."""
    body_base64: Content | None = None
    """The whole body, when it is not text."""

    @model_validator(mode="after")
    def _something_and_one_body(self) -> EditGiven:
        if self.body is not None and self.body_base64 is not None:
            raise ValueError("give either `body` or `body_base64`")
        if all(part is None for part in (self.url, self.headers, self.body, self.body_base64)):
            raise ValueError("must say what to change: url, headers, body or body_base64")
        return self

    @property
    def content(self) -> bytes | None:
        return self.body_base64 if self.body is None else self.body.encode()


class Change(Body):
    """One change: a remediation, an edit or a step of the workflow, each with or without notes; or only notes."""

    notes: Note | None = None
    """Something to remember, added to those that are there."""
    remediation: RemediationGiven | None = None
    edit: EditGiven | None = None
    state: Literal["validated", "verified", "closed"] | None = None
    """`validated`: nothing speaks against a replay. `verified`: the effect of a replay was seen. `closed`: done with,
    which needs `notes`."""

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Change:
        given = [name for name in ("remediation", "edit", "state") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one change at a time, not {' and '.join(given)}; send them one after the other")
        if not given and self.notes is None:
            raise ValueError("must say what to change: notes, remediation, edit or state")
        return self


# ---- files -------------------------------------------------------------------------------------------------------


class FileGiven(Body):
    """One exported dead letter."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its path, `{operation}/{dlq_id}.json`, as it is to be named in what is said about it."""
    document: Content
    """What is in the file."""
    body_file: Content | None = None
    """What is in `{dlq_id}.body`, if there is one."""
    original_body_file: Content | None = None
    """What is in `{dlq_id}.original.body`, if there is one."""


class Import(Body):
    """Exported dead letters. Each is taken in whole or refused; one that is refused does not hold up the others."""

    files: Annotated[tuple[FileGiven, ...], some(500)]
