"""A connection of the app whose TLS ends here: what is inside is read as if it had been asked of the host itself.

Law: every request inside belongs to the host that the CONNECT named, whatever it says itself (the certificate was for
that one), and goes out over TLS. Everything else is as on any other connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.failures import Malformed
from sidecar.inbound import Downstream
from sidecar.incoming import check_unusual
from sidecar.listener import Listener
from sidecar.routing import Origin, bracketed, origin_path, parse_authority, split_absolute

if TYPE_CHECKING:
    from sidecar.proxy import Proxy
    from sidecar.request import Request
    from sidecar.upstream.destination import Destination

_BORDERS = frozenset((b"", b"/", b"?"))  # what may follow the host


class Secured(Downstream):
    """See the module's law. Of `used` and `left_unused` one is called, once: at its first request, or when the app has
    left without one."""

    __slots__ = ("_authority", "_host", "_left_unused", "_made", "_names", "_port", "_prefix", "_used")

    def __init__(
        self, listener: Listener, origin: Origin, used: Callable[[], None], left_unused: Callable[[], None]
    ) -> None:
        super().__init__(listener, **listener.options)
        self._host, self._port = origin.host, origin.port
        name, port = bracketed(origin.host).encode(), origin.port
        whole = b"%b:%d" % (name, port)
        self._authority = name if port == 443 else whole
        self._prefix = b"https://" + self._authority
        self._names = frozenset({name, whole} if port == 443 else {whole})
        self._made = False
        self._used: Callable[[], None] | None = used
        self._left_unused = left_unused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made = True
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._made:
            return  # it was never more than a handshake
        if self._used is not None and self.transport is not None:  # else it was closed from here
            self._left_unused()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        request = self._arriving
        if request is not None and self._body_again is None:
            # As a forward proxy is asked, so that every record says which host it was.
            if request.target[:1] == b"/":
                request.target = self._prefix + request.target
            elif request.target == b"*" and self.parser.get_method() == b"OPTIONS":
                request.target = self._prefix
        super().on_headers_complete()
        if self._used is not None:
            self._used()
            self._used = None

    # ---- where requests go -----------------------------------------------------------------------------------

    def find_destination(self, request: Request, proxy: Proxy) -> tuple[Destination, bytes]:
        if request.unusual:
            check_unusual(request, proxy)
        host = request.host
        if host not in self._names and not (request.http10 if host is None else self._is_named(host)):
            raise Malformed(
                "MALFORMED_REQUEST",
                f"inside TLS with {self._authority.decode()} only that host can be asked, not "
                f"{(host or b'nobody').decode('latin-1')[:100]!r}",
                reason="host",
            )
        prefix, rest = request.target[: len(self._prefix)], request.target[len(self._prefix) :]
        if prefix != self._prefix or rest[:1] not in _BORDERS:
            scheme, authority, rest = split_absolute(request.target)
            if scheme != "https" or not self._is_named(authority):
                raise Malformed(
                    "MALFORMED_REQUEST",
                    f"inside TLS with {self._authority.decode()} a path is asked for",
                    reason="target",
                )
        if b"#" in rest:
            raise Malformed("MALFORMED_REQUEST", "a request target cannot carry a fragment", reason="target")
        return proxy.directory.forward("https", self._authority), origin_path(rest, request.method)

    def _is_named(self, authority: bytes) -> bool:
        """Whether this is another spelling of the CONNECT's host."""
        host, port = parse_authority(authority.decode("latin-1"))
        return (host, port or 443) == (self._host, self._port)

    def find_tunnel(self, request: Request, proxy: Proxy) -> Origin:
        raise Malformed("MALFORMED_REQUEST", "inside TLS there is no further CONNECT", reason="target")
