"""The registry of error codes, for programs and for people: the target of `documentation_url`.

Law: what is shown is the registry's data and nothing else; whoever prefers HTML gets a page, everyone else JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from aiohttp import web

from config.errors import ErrorCode
from sidecar.admin import error_page
from sidecar.admin.fields import Answer, NoBody, NoQuery
from sidecar.admin.negotiation import HTML, JSON, preferred
from sidecar.admin.problem import unknown
from sidecar.admin.route import Call, Route, Told, json_response
from sidecar.proxy import Proxy


class ErrorShown(Answer):
    """One way a call can go wrong."""

    code: str
    category: str
    severity: str
    retry: str
    status: int
    """What the app gets when there is no answer of the upstream to pass on."""
    description: str
    causes: tuple[str, ...]
    resolution: str
    examples: tuple[str, ...]
    related: tuple[str, ...]
    policy: str | None
    """The policy that follows on it where nobody chose another."""


class ErrorList(Answer):
    """All of them."""

    items: tuple[ErrorShown, ...]
    next_cursor: None = None


class Errors:
    """The handlers."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    @property
    def _registry(self) -> Mapping[str, ErrorCode]:
        return self._proxy.registry

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/errors", "Every error code.", self.all, ErrorList, also=(HTML,))
        yield Route(
            "GET",
            "/errors/{code}",
            "What an error code means and what to do.",
            self.one,
            ErrorShown,
            parts={"code": "An error code, as in CIRCUIT_OPEN."},
            also=(HTML,),
            refusals=(404,),
        )

    async def all(self, call: Call[NoQuery, NoBody]) -> Told:
        if _wants_page(call.request):
            return error_page.respond(error_page.overview(self._registry))
        return _varying(json_response({"items": list(map(_shown, self._registry.values())), "next_cursor": None}))

    async def one(self, call: Call[NoQuery, NoBody]) -> Told:
        code = call.named("code")
        entry = self._registry.get(code)
        if entry is not None:
            page = _wants_page(call.request)
            return error_page.respond(error_page.of(entry)) if page else _varying(json_response(_shown(entry)))
        if _wants_page(call.request):
            return error_page.respond(error_page.missing(code, self._registry), status=404)
        raise unknown("code", code, self._registry, f"no error code is called {code[:60]!r}", "GET /errors")


def _wants_page(request: web.Request) -> bool:
    return preferred(request.headers.get("Accept", ""), (JSON, HTML)) == HTML


def _varying(response: web.Response) -> web.Response:
    response.headers["Vary"] = "Accept"
    return response


def _shown(entry: ErrorCode) -> dict[str, object]:
    return dataclasses.asdict(entry)
