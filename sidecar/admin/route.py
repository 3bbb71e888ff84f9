"""What a route of the admin port is: one row of the table, from which requests are served and documents made.

Law: a row says everything there is to know about its route: method, path, what may be asked and sent, what is
answered. A handler is called with a query and a body that have been validated by the row's own models, and returns
what the row promises; it never parses anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from sidecar.admin.access import ROLE, WHO
from sidecar.admin.fields import Answer, Body, NoBody, NoQuery, Query
from sidecar.admin.problem import Problem, from_validation, wrong
from telemetry.redact import Redactor

BODY_LIMIT = 65_536
BODY_PATIENCE = 10.0
_READABLE = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS

REDACTOR = web.RequestKey("sidecar.redactor", Redactor)
"""What hides secrets in what operators write."""

Q = TypeVar("Q", bound=Query)
B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """One request, validated."""

    request: web.Request
    query: Q
    body: B

    def named(self, part: str) -> str:
        """A part of the path, decoded."""
        return self.request.match_info[part]


Told = Answer | Mapping[str, Any] | web.StreamResponse
"""A model, its dump when somebody else made it, or a response for what is not JSON."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row."""

    method: str
    path: str
    summary: str
    """One sentence for a person."""
    handler: Callable[[Call[Any, Any]], Awaitable[Told]]
    answer: type[BaseModel] | None
    """The shape of a 200 in JSON; None when it is never JSON."""
    query: type[Query] = NoQuery
    body: type[Body] = NoBody
    parts: Mapping[str, str] = field(default_factory=dict)
    """What the `{parts}` of the path are."""
    one_of: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The words that a part can be, when they are known beforehand."""
    also: tuple[str, ...] = ()
    """Media types that are answered besides JSON, to those who ask for them."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Header fields that are read, and what they say."""
    otherwise: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    """Statuses besides 200 that are no refusals, and their shapes."""
    refusals: tuple[int, ...] = ()
    """Statuses of refusals beyond those every route has."""
    body_limit: int = BODY_LIMIT
    """How many bytes its body may have."""
    sealed: bool = False
    """Shows what is kept sealed: not for a token with the role read."""
    probe: bool = False
    """Served on the `probes` listener too."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if self.sealed and request.get(ROLE) == "read":
            raise Problem(
                403,
                "INSUFFICIENT_PERMISSIONS",
                f"the token of {request[WHO]} has the role read, and this is kept sealed; "
                "it needs one with the role operate",
            )
        query = _query(request, self.query)
        body = await _body(request, self.body, self.body_limit)
        told = await self.handler(Call(request, query, body))
        return told if isinstance(told, web.StreamResponse) else json_response(told)


def json_response(data: Answer | Mapping[str, Any], status: int = 200) -> web.Response:
    body = orjson.dumps(data, option=_READABLE, default=_plain)
    return web.Response(body=body, status=status, content_type="application/json")


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _query(request: web.Request, model: type[Query]) -> Query:
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given:
            raise wrong(name, value, "is given twice; give it once", "repeated")
        given[name] = value
    try:
        return model.model_validate(given, context=request.get(REDACTOR))
    except ValidationError as refused:
        raise from_validation(refused, model) from None


async def _body(request: web.Request, model: type[Body], limit: int) -> Body:
    if model is NoBody:
        return NoBody()
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            raw = await request.clone(client_max_size=limit).read()
    except TimeoutError:
        raise Problem(408, "CLIENT_ERROR", f"the body did not arrive within {BODY_PATIENCE:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise Problem(413, "PAYLOAD_TOO_LARGE", f"the body is larger than {limit} bytes") from None
    except web.RequestPayloadError as broken:
        raise Problem(400, "MALFORMED_REQUEST", f"the body cannot be read: {broken}") from None
    if raw and request.content_type != "application/json":
        raise Problem(
            415, "UNSUPPORTED_CONTENT_TYPE", "the body must be JSON; send it with `content-type: application/json`"
        )
    try:
        given = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise Problem(400, "MALFORMED_JSON", f"the body is not JSON: {error}") from None
    try:
        return model.model_validate(given, context=request.get(REDACTOR))
    except ValidationError as refused:
        raise from_validation(refused, model) from None
