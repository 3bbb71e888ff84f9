"""Who may ask, and in which shape refusals are told.

Law: on loopback `Host` must be a loopback name (a page in a browser can make a name of its own point at loopback, but
cannot fake the Host its requests carry); a listener beyond this machine goes by whatever name its clients know, and
there nobody gets past without a token, which no page has. Every `Origin`, which browsers add, must be that same host,
and where they leave it out `Sec-Fetch-Site` must not say that another site asks for a change. There are no cookies and
there is no CORS. Whatever is refused or goes wrong anywhere below is answered in one shape.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from config.keys import nearest
from sidecar import clock
from sidecar.admin.access import Access
from sidecar.admin.problem import ErrorAnswer, Problem, from_trouble
from sidecar.admin.route import REDACTOR, Route, json_response
from sidecar.durable.trouble import Trouble
from sidecar.proxy import Proxy
from telemetry.timestamps import rfc3339

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LONGEST_PATH = 100
# What cannot be said while the store is still another process's, and how long it is waited for.
_ABOUT_THE_STORE = frozenset({"dlq", "ids", "jobs", "keys", "audit"})
_PATIENCE = 5.0
_LOOKING = frozenset({"GET", "HEAD"})
_OWN_SITE = frozenset({"same-origin", "none"})
"""What a browser says of a request that a page of ours made, or its user. Others may follow a link and no more."""


class Guard:
    """The middleware, for one listener and its routes. Without `access` anyone may ask; `beyond` says that others
    than this machine can reach it."""

    def __init__(self, proxy: Proxy, routes: Iterable[Route], access: Access | None, *, beyond: bool) -> None:
        self._proxy = proxy
        self._access = access
        self._beyond = beyond
        self._paths = sorted({route.path for route in routes})

    @web.middleware
    async def in_one_shape(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REDACTOR] = self._proxy.signals.redactor
        try:
            if self._access is not None:
                self._admit(request, self._access)
            kept = self._proxy.kept
            if kept.still_with is not None and request.path.split("/")[1] in _ABOUT_THE_STORE:
                await kept.at_hand(_PATIENCE)
            return await handler(request)
        except Problem as problem:
            return self._refusal(problem)
        except Trouble as trouble:
            return self._refusal(from_trouble(trouble))
        except web.HTTPException as refused:
            return self._refusal(self._of_the_library(request, refused))
        except ConnectionError:
            return web.Response(status=499)  # whoever asked has gone, nobody sees this
        except Exception as error:
            # The redactor has no say in frames, but nothing a request brings is in their text.
            self._proxy.signals.internal_error("admin", f"{request.method} on the admin port failed", error)
            return self._refusal(Problem(500, "SIDECAR_INTERNAL", "the sidecar failed on this; its log says why"))

    def _admit(self, request: web.Request, access: Access) -> None:
        if not request.raw_path.startswith("/"):
            # The host in such a target would count instead of the field that is checked here.
            raise Problem(400, "MALFORMED_REQUEST", "this is no proxy; ask for a path, as in GET /sessions")
        _no_strangers(request, beyond=self._beyond)
        if access.needs_token:
            access.admit(request)
        elif self._beyond:
            # A reload took the tokens away, and the new address waits for a restart.
            raise Problem(
                403, "INSUFFICIENT_PERMISSIONS", "admin.token_file is set no longer; restart the sidecar, or set it"
            )

    def _refusal(self, problem: Problem) -> web.Response:
        redactor = self._proxy.signals.redactor
        answer = json_response(
            ErrorAnswer(
                error_code=problem.code,
                message=redactor.text(problem.message),
                details=problem.details(redactor),
                request_id=clock.unguessable(16),
                timestamp=rfc3339(clock.wall()),
                documentation_url=f"{self._proxy.answers.documentation}/errors/{problem.code}",
            ).model_dump(),
            problem.status,
        )
        answer.headers.update(problem.headers)
        return answer

    def _of_the_library(self, request: web.Request, refused: web.HTTPException) -> Problem:
        """What aiohttp refuses by itself, in our words."""
        path = request.path[:_LONGEST_PATH]
        if isinstance(refused, web.HTTPMethodNotAllowed):
            allowed = ", ".join(sorted(refused.allowed_methods))
            message = f"{path} does not take {request.method[:20]}; it takes {allowed}"
            return Problem(405, "CLIENT_ERROR", message, headers={"Allow": refused.headers["Allow"]})
        if refused.status == 404:
            near = nearest(path, self._paths)
            hint = f'; did you mean "{near}"?' if near is not None else ""
            return Problem(404, "NOT_FOUND", f"there is no {path}{hint or ';'} there is {', '.join(self._paths)}")
        return Problem(refused.status, "CLIENT_ERROR", f"{request.method[:20]} {path}: {refused.reason}")


def _no_strangers(request: web.Request, *, beyond: bool) -> None:
    host = request.headers.get("Host", "")
    ours = (f"http://{host.lower()}", f"https://{host.lower()}")
    foreign = [origin for origin in request.headers.getall("Origin", []) if origin.lower() not in ours]
    sites = request.headers.getall("Sec-Fetch-Site", [])
    stranger = None
    if len(request.headers.getall("Host", [])) > 1:
        stranger = "two of them at once"
    elif not beyond and not is_local_name(host):
        stranger = f"Host {host[:_LONGEST_PATH]!r}"
    elif foreign:
        stranger = f"Origin {foreign[0][:_LONGEST_PATH]!r}"
    elif request.method not in _LOOKING and any(site.strip().lower() not in _OWN_SITE for site in sites):
        stranger = f"pages of other sites (Sec-Fetch-Site {sites[0][:_LONGEST_PATH]!r})"
    if stranger is not None:
        raise Problem(
            403,
            "INSUFFICIENT_PERMISSIONS",
            f"the admin port answers to its own names and pages only, not to {stranger}; "
            "ask for http://127.0.0.1 from this machine",
        )


def is_local_name(authority: str) -> bool:
    host = authority.rpartition(":")[0] if authority.rpartition(":")[2].isdigit() else authority
    host = host.strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
