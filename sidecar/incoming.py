"""A parsed request → where it goes and what to ask for there, or why not.

Law: everything that can be said about a request before anything is sent is said here (R5, R6, R10, R12, R17):
after this the request is well formed, has a destination and is not a loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion10
from aiohttp.http_parser import RawRequestMessage

from sidecar.failures import Malformed, Refused
from sidecar.headers import RequestFields, check_request_codings
from sidecar.routing import no_route, origin_path, split_absolute
from sidecar.upstream.endpoints import Destination, Directory

if TYPE_CHECKING:
    from sidecar.proxy import Proxy


def find_destination(
    message: RawRequestMessage, fields: RequestFields, proxy: Proxy, http10: bool
) -> tuple[Destination, bytes]:
    """The destination, and the target to ask it for."""
    if http10 and message.version != HttpVersion10:
        raise _other_version(message)
    if fields.transfer_encoding is not None:
        check_request_codings(fields, http10=http10, chunked=message.chunked)
    if fields.upgrade is not None:
        _check_upgrade(message, fields)
    by_host = _by_host_field(fields, proxy.directory, http10)
    path = message.path
    if path.startswith("/") or path == "*":
        if "#" in path:
            raise Malformed("MALFORMED_REQUEST", "a request target cannot carry a fragment", reason="target")
        if by_host is not None:
            destination = by_host
        else:
            routed = proxy.directory.by_route(path)
            if routed is None:
                raise no_route((fields.host or b"").decode("latin-1"))
            destination, rest = routed
            if not rest.startswith("/") and path != "*":
                rest = origin_path(rest, message.method)
            path = rest
    else:
        scheme, authority, rest = split_absolute(path)
        destination = proxy.directory.forward(scheme, authority)
        path = origin_path(rest, message.method)
    if fields.via is not None and proxy.pseudonym in fields.via:
        raise Refused("LOOP_DETECTED", "this request has already passed through this sidecar", reason="loop")
    if fields.max_forwards is not None:
        _count_forwards(fields, message.method)
    return destination, path.encode("utf-8", "surrogateescape")


def check_connect(message: RawRequestMessage, fields: RequestFields, proxy: Proxy, http10: bool) -> None:
    """The same for CONNECT, whose target is looked at elsewhere: bytes behind its head belong to the tunnel, so a
    body would be read as one thing by us and as another by whoever sent it."""
    if http10 and message.version != HttpVersion10:
        raise _other_version(message)
    if fields.content_length or fields.transfer_encoding is not None:
        raise Malformed("MALFORMED_REQUEST", "a CONNECT request cannot have a body", reason="framing")
    _by_host_field(fields, proxy.directory, http10)


def _other_version(message: RawRequestMessage) -> Malformed:
    return Malformed(
        "VERSION_NOT_SUPPORTED",
        f"HTTP/{message.version.major}.{message.version.minor} is not supported; use HTTP/1.1",
        reason="version",
    )


def _by_host_field(fields: RequestFields, directory: Directory, http10: bool) -> Destination | None:
    """Host must be there (HTTP/1.1) and well formed even where the target makes it irrelevant (R5, R12)."""
    if fields.host is not None:
        return directory.by_host(fields.host)
    if http10:
        return None
    raise Malformed("MALFORMED_REQUEST", "an HTTP/1.1 request needs a Host field", reason="host")


def _check_upgrade(message: RawRequestMessage, fields: RequestFields) -> None:
    """Only WebSocket is switched to; any other Upgrade is not passed on and the request goes as an ordinary one."""
    if not message.upgrade or fields.upgrade is None or fields.upgrade.lower() != b"websocket":
        fields.upgrade = None
    elif fields.content_length or fields.transfer_encoding is not None:
        raise Malformed("MALFORMED_REQUEST", "an Upgrade request cannot have a body", reason="upgrade_body")


def _count_forwards(fields: RequestFields, method: str) -> None:
    """R6. At zero we are the final recipient."""
    value = fields.max_forwards
    assert value is not None
    if method not in ("TRACE", "OPTIONS"):
        fields.lines.append(b"Max-Forwards: " + value)
        return
    if not value.isdigit() or len(value) > 10:
        raise Malformed("MALFORMED_REQUEST", "Max-Forwards is not a number", reason="max_forwards")
    hops = int(value)
    if hops == 0:
        raise Refused(
            "NO_ROUTE",
            "Max-Forwards is 0, so the request ends at this sidecar and is not forwarded",
            reason="max_forwards",
            status=200,
        )
    fields.lines.append(b"Max-Forwards: %d" % (hops - 1))
