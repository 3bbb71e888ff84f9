"""A connection of an app that has to say who it is: `listen.auth`.

Law: nothing is looked at before the credentials are known to be good; a request without them is answered with 407 and
leads nowhere. Requests inside an intercepted CONNECT are not asked again: their CONNECT was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar import clock
from sidecar.failures import Refused
from sidecar.guard import Guard, required, user_of
from sidecar.inbound import Downstream
from sidecar.incoming import find_destination, find_tunnel
from sidecar.listener import Listener
from sidecar.request import Request
from sidecar.routing import Origin

if TYPE_CHECKING:
    from sidecar.proxy import Proxy
    from sidecar.upstream.destination import Destination


class GuardedRequest(Request):
    """With what its sender identifies himself by towards us."""

    __slots__ = ("credentials", "refusal")

    def __init__(self) -> None:
        super().__init__()
        self.credentials: bytes | None = None
        self.refusal: Refused | None = None

    @property
    def sender(self) -> bytes:
        return user_of(self.credentials)

    def special(self, kind: int, name: bytes, value: bytes) -> None:
        if name.lower() == b"proxy-authorization":
            self.credentials = value
        else:
            super().special(kind, name, value)


class Guarded(Downstream):
    """See the module's law."""

    __slots__ = ("_accepted", "_checking", "_guard", "_under")

    def __init__(self, listener: Listener, guard: Guard) -> None:
        super().__init__(listener, **listener.options)
        self._guard = guard
        self._accepted: bytes | None = None
        self._under = guard.users
        self._checking = False

    def on_message_begin(self) -> None:
        self._arriving = GuardedRequest()

    def _run_waiting(self) -> None:
        if self._checking:
            return
        request = self._waiting[0] if self._waiting else None
        credentials = request.credentials if isinstance(request, GuardedRequest) and not request.refusal else None
        if credentials is not None and not self._is_accepted(credentials) and self._guard.verdict(credentials) is None:
            assert isinstance(request, GuardedRequest)
            self._checking = True
            clock.spawn(self._check(request, credentials), "password").add_done_callback(_heard)
            return
        super()._run_waiting()

    async def _check(self, request: GuardedRequest, credentials: bytes) -> None:
        try:
            peer = None if self.transport is None else self.transport.get_extra_info("peername")
            while self._guard.verdict(credentials) is None:  # again, if its users are others by now
                await self._guard.verify(credentials, str(peer[0]) if peer else "")
        except Refused as refused:
            request.refusal = refused
        finally:
            self._checking = False
        if self.transport is not None:
            self._run_on()

    def _let_pass(self, request: Request) -> None:
        if not isinstance(request, GuardedRequest) or request.error is not None:
            return  # malformed, and answered as that
        if request.refusal is not None:
            raise request.refusal
        if not self._is_accepted(request.credentials):
            if not self._guard.verdict(request.credentials):
                raise required()
            self._accepted, self._under = request.credentials, self._guard.users

    def _is_accepted(self, credentials: bytes | None) -> bool:
        return credentials is not None and credentials == self._accepted and self._under is self._guard.users

    def find_destination(self, request: Request, proxy: Proxy) -> tuple[Destination, bytes]:
        self._let_pass(request)
        return find_destination(request, proxy)

    def find_tunnel(self, request: Request, proxy: Proxy) -> Origin:
        self._let_pass(request)
        return find_tunnel(request, proxy)


def _heard(task: Any) -> None:
    """Nobody waits for it: an app that left meanwhile needs no verdict."""
    if not task.cancelled():
        task.exception()
