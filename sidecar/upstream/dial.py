"""Making a connection: resolve, check, connect to *that* address, TLS.

Law: an address is checked by the egress rules after resolution and then connected to as it is, so a name cannot
resolve to one thing for the check and to another for the connection. Every foreign error is translated here.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import aiohappyeyeballs

from sidecar.egress import Egress
from sidecar.failures import AttemptFailed, Refused
from sidecar.routing import Origin
from sidecar.upstream.proxy_opening import ProxyOpening
from sidecar.upstream.resolve import Resolver
from sidecar.upstream.system_lookup import AddressInfo
from sidecar.upstream.tls import ResumingContext
from telemetry.record import NOT_CONNECTED

if TYPE_CHECKING:
    from sidecar.upstream.endpoints import ParentProxy

# RFC 8305: how long the first address family may take before the other one is tried beside it.
_HAPPY_EYEBALLS_DELAY = 0.25
# Of the time for a connection: how much of it a name may take that is looked up only to be judged.
_SHARE_BEHIND_PROXY = 0.2

_PRIVATE = "for a private authority set `ca_bundle` on the upstream"
_WEAK = "it can be forged; the upstream needs a stronger one (2048 bits of RSA or P-256, signed with SHA-256)"
# What to do about a certificate, by OpenSSL's X509_V_ERR numbers.
_CERTIFICATE_TODO = {
    2: _PRIVATE,  # issuer not found
    9: "compare this machine's clock, `date -u`, with the certificate's beginning",
    10: "it has to be renewed at the upstream; if it has been, compare this machine's clock, `date -u`",
    18: _PRIVATE,  # self-signed
    19: _PRIVATE,  # self-signed in the chain
    20: _PRIVATE,  # issuer not here
    21: _PRIVATE,  # only the leaf was sent
    23: "it has been revoked; the upstream needs another",
    62: "it is for another host (a name in its subject alone does not count): check `hosts` and `endpoints`, "
    "set `rewrite_host`, or give the upstream one with a subjectAltName",
    64: "it is for another address: check `endpoints`, or name the host instead of its address",
    66: _WEAK,
    67: _WEAK,
    68: _WEAK,
}

P = TypeVar("P", bound=asyncio.Protocol)


class Dialler:
    """Connects to origins. One for the whole sidecar."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resolver: Resolver,
        egress: Egress,
        may_dial: Callable[[int | None], None],
    ) -> None:
        """`may_dial` is told the number of a new socket, None when the kernel gave none, and raises Refused when that
        is one too many: our own shortage, of which no upstream is to blame."""
        self._loop = loop
        self.resolver = resolver
        self._egress = egress
        self._may_dial = may_dial

    async def connect(
        self,
        make_protocol: Callable[[], P],
        origin: Origin,
        timeout: float,
        tls: ResumingContext | None = None,
        server_name: str | None = None,
        proxy: ParentProxy | None = None,
        *,
        tunnel: bool = False,
    ) -> tuple[P, str]:
        """A connected protocol and the address it is connected to. `tunnel`: bytes, not requests, will be sent."""
        if proxy is not None:
            return await self._connect_through(proxy, make_protocol, origin, timeout, tls, server_name, tunnel)
        stage = "resolve"
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._allowed_addresses(origin)
                stage = "connect"
                sock = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY, interleave=1, loop=self._loop
                )
                stage = "tls"
                try:
                    self._may_dial(sock.fileno())
                    address = str(sock.getpeername()[0])
                    # What the kernel made of the address is judged as well, before anything is sent there.
                    self._egress.check_address(address, origin.port, origin.host)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    name = server_name if tls is not None else None
                    _, protocol = await self._loop.create_connection(
                        make_protocol, sock=sock, ssl=tls, server_hostname=name
                    )
                except BaseException:
                    sock.close()
                    raise
        except (OSError, ssl.SSLError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                self._may_dial(None)
            self.resolver.failed(origin.host, origin.port)
            raise _translated(error, "connect" if stage == "tls" and tls is None else stage, origin, timeout) from error
        return protocol, address

    async def _connect_through(
        self,
        proxy: ParentProxy,
        make_protocol: Callable[[], P],
        origin: Origin,
        timeout: float,
        tls: ResumingContext | None,
        server_name: str | None,
        tunnel: bool,
    ) -> tuple[P, str]:
        """The same behind a parent proxy: a plain connection to it for http, CONNECT and then TLS for https."""
        opening: ProxyOpening | None = None
        opened = False
        try:
            async with asyncio.timeout(timeout):
                await self._check_behind_proxy(origin, timeout)
                if tls is None and not tunnel:
                    return await self.connect(make_protocol, proxy.origin, timeout)
                opening, address = await self.connect(ProxyOpening, proxy.origin, timeout)
                transport = await opening.open(origin.label, proxy.lines)
                opened = True
                protocol = make_protocol()
                if tls is None:
                    transport.set_protocol(protocol)
                    protocol.connection_made(transport)
                    return protocol, address
                try:
                    secured = await self._loop.start_tls(transport, protocol, tls, server_hostname=server_name)
                except BaseException:
                    transport.abort()
                    raise
                assert secured is not None
                protocol.connection_made(secured)
                return protocol, address
        except (AttemptFailed, OSError, ssl.SSLError) as error:
            if opened:
                raise _translated(error, "tls", origin, timeout) from error
            failed = error if isinstance(error, AttemptFailed) else self._proxy_failed(error, proxy, opening, timeout)
            # Several may wait for the same failure (of a look-up): what is said about this one is said to a copy.
            told = AttemptFailed(failed.code, f"through the egress proxy {proxy.label}: {failed.message}", failed.phase)
            told.momentary = failed.momentary
            told.at_proxy = opening is None or not opening.target_unreachable
            raise told from error

    def _proxy_failed(
        self, error: Exception, proxy: ParentProxy, opening: ProxyOpening | None, timeout: float
    ) -> AttemptFailed:
        if opening is not None and isinstance(error, TimeoutError):
            return AttemptFailed("CONNECT_TIMEOUT", f"it did not answer CONNECT within {timeout:g} s", NOT_CONNECTED)
        return _translated(error, "connect", proxy.origin, timeout)

    async def _check_behind_proxy(self, origin: Origin, timeout: float) -> None:
        """The proxy resolves the name, so all that can be checked is what the name means here, if anything."""
        try:
            async with asyncio.timeout(timeout * _SHARE_BEHIND_PROXY):
                await self._allowed_addresses(origin)
        except (AttemptFailed, TimeoutError):
            return  # it may well be that only the proxy knows the name

    async def _allowed_addresses(self, origin: Origin) -> list[Any]:
        host, port = origin.host, origin.port
        self._egress.check_name(host)
        literal = _literal(host, port)
        infos = [literal] if literal is not None else await self.resolver.addresses(host, port)
        allowed: list[AddressInfo] = []
        refusal: Refused | None = None
        for info in infos:
            try:
                self._egress.check_address(str(info[4][0]), port, host)
            except Refused as refused:
                refusal = refused
            else:
                allowed.append(info)
        if not allowed:
            assert refusal is not None
            try:
                raise refusal
            finally:
                del refusal  # raised, it holds this frame
        return allowed


def _literal(host: str, port: int) -> AddressInfo | None:
    """An address needs no resolver. Only canonical spellings count; `127.1` and friends go to the resolver."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    where: tuple[Any, ...] = (host, port) if address.version == 4 else (host, port, 0, 0)
    return (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where)


def _translated(error: BaseException, stage: str, origin: Origin, timeout: float) -> AttemptFailed:
    label = origin.label
    if isinstance(error, ssl.SSLCertVerificationError):
        todo = _CERTIFICATE_TODO.get(error.verify_code, "look at it with `openssl s_client`")
        told = f"the certificate of {label} was not accepted: {error.verify_message}; {todo}"
        return AttemptFailed("TLS_FAILURE", told, NOT_CONNECTED)
    if isinstance(error, TimeoutError) and stage == "resolve":
        told = f"the name {origin.host} could not be resolved: the name server has not answered for {timeout:g} s"
        return AttemptFailed("DNS_FAILURE", told, NOT_CONNECTED)
    if isinstance(error, TimeoutError):
        what = "TLS with" if stage == "tls" else "connecting to"
        return AttemptFailed("CONNECT_TIMEOUT", f"{what} {label} took longer than {timeout:g} s", NOT_CONNECTED)
    if stage == "tls" or isinstance(error, ssl.SSLError):
        why = getattr(error, "reason", None) or error
        failed = AttemptFailed("TLS_FAILURE", f"TLS with {label} failed: {why}", NOT_CONNECTED)
        failed.momentary = not isinstance(error, ssl.SSLError) or "EOF" in str(why)
        return failed
    # asyncio puts the address where the words should be.
    why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    if isinstance(error, UnicodeError):
        return AttemptFailed("DNS_FAILURE", f"{origin.host!r} is not a name that can be resolved", NOT_CONNECTED)
    return AttemptFailed("CONNECTION_REFUSED", f"no connection to {label}: {why}", NOT_CONNECTED)
