"""A parsed request → where it goes and what to ask for there, or why not.

Law: everything that can be said about a request before anything is sent is said here (R5, R6, R10, R12, R17):
after this the request is well formed, has a destination and is not a loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.failures import AnsweredHere, Malformed, Refused
from sidecar.routing import Origin, no_route, origin_path, split_absolute
from sidecar.tunnel import connect_target
from sidecar.upstream.destination import Destination
from sidecar.upstream.directory import Directory

if TYPE_CHECKING:
    from sidecar.proxy import Proxy
    from sidecar.request import Request

_SECRET_FIELDS = frozenset({b"authorization", b"cookie", b"x-api-key", b"idempotency-key"})


def find_destination(request: Request, proxy: Proxy) -> tuple[Destination, bytes]:
    """The destination, and the target to ask it for."""
    if request.unusual:
        check_unusual(request, proxy)
    directory = proxy.directory
    # Host must be well formed even where the target makes it irrelevant (R5, R12).
    try:
        by_host = directory.hosts[request.host]
    except KeyError:
        by_host = _look_up_host(request, directory)
    path = request.target
    if b"#" in path:
        raise Malformed("MALFORMED_REQUEST", "a request target cannot carry a fragment", reason="target")
    if not path.startswith(b"/"):
        if path != b"*":
            end = path.find(b"/", 7)
            if end > 0 and path.startswith(b"http://"):
                known = directory.authorities.get(path[7:end])
                if known is not None:
                    return known, path[end:]
            scheme, authority, rest = split_absolute(path)
            return directory.forward(scheme, authority), origin_path(rest, request.method)
        if request.method != "OPTIONS":
            raise Malformed("MALFORMED_REQUEST", "`*` can only be asked about with OPTIONS", reason="target")
    if by_host is not None:
        return by_host, path
    routed = directory.by_route(path)
    if routed is None:
        raise no_route((request.host or b"").decode("latin-1"))
    if routed[1].startswith(b"/") or path == b"*":
        return routed
    return routed[0], b"/" + routed[1]  # also of OPTIONS: its path was named, by the route


def _look_up_host(request: Request, directory: Directory) -> Destination | None:
    if request.host is not None:
        return directory.by_host(request.host)
    if request.http10:
        return None
    raise _no_host()


def check_unusual(request: Request, proxy: Proxy) -> None:
    if request.error is not None:
        raise request.error
    if request.transfer_encoding is not None:
        _check_codings(request.transfer_encoding, http10=request.http10)
    if request.upgrade is not None:
        _check_upgrade(request)
    if request.via is not None and proxy.pseudonym in request.via:
        raise Refused("LOOP_DETECTED", "this request has already passed through this sidecar", reason="loop")
    if request.max_forwards is not None:
        _count_forwards(request)


def find_tunnel(request: Request, proxy: Proxy) -> Origin:
    """The same for CONNECT. Bytes behind its head belong to the tunnel, so a body would be read as one thing by us and
    as another by whoever sent it."""
    if request.error is not None:
        raise request.error
    if request.content_length or request.transfer_encoding is not None:
        raise Malformed("MALFORMED_REQUEST", "a CONNECT request cannot have a body", reason="framing")
    _look_up_host(request, proxy.directory)
    return connect_target(proxy, request.path)


def _check_codings(coding: bytes, *, http10: bool) -> None:
    """R10 beyond what llhttp refuses by itself."""
    if http10:
        raise Malformed("MALFORMED_REQUEST", "an HTTP/1.0 request cannot have Transfer-Encoding", reason="framing")
    codings = [word.strip() for word in coding.lower().split(b",")]
    if codings == [b"chunked"]:
        return
    if codings[-1] != b"chunked" or b"chunked" in codings[:-1]:
        raise Malformed("MALFORMED_REQUEST", "'chunked' must be the last transfer coding", reason="framing")
    raise Malformed(
        "NOT_IMPLEMENTED",
        f"transfer coding {coding.decode('latin-1')!r} is not supported; send the body as plain 'chunked'",
        reason="transfer_coding",
    )


def _no_host() -> Malformed:
    return Malformed("MALFORMED_REQUEST", "an HTTP/1.1 request needs a Host field", reason="host")


def _check_upgrade(request: Request) -> None:
    """Only WebSocket is switched to; any other Upgrade is not passed on and the request goes as an ordinary one."""
    if not request.switches:
        request.upgrade = None
    elif request.content_length or request.transfer_encoding is not None:
        raise Malformed("MALFORMED_REQUEST", "an Upgrade request cannot have a body", reason="upgrade_body")


def _count_forwards(request: Request) -> None:
    """R6. At zero we are the final recipient."""
    value = request.max_forwards
    assert value is not None
    if request.method not in ("TRACE", "OPTIONS"):
        request.lines.append(b"Max-Forwards: " + value)
        return
    if not value.isdigit() or len(value) > 10:
        raise Malformed("MALFORMED_REQUEST", "Max-Forwards is not a number", reason="max_forwards")
    hops = int(value)
    if hops == 0:
        raise _final_recipient(request)
    request.lines.append(b"Max-Forwards: %d" % (hops - 1))


def _final_recipient(request: Request) -> AnsweredHere:
    """RFC 9110: OPTIONS is told what the proxy can do, TRACE gets its request back without what is secret."""
    if request.method == "OPTIONS":
        return AnsweredHere(
            b"Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE, CONNECT\r\n", b"", "max_forwards"
        )
    shown = [line for line in request.lines if line.partition(b":")[0].lower() not in _SECRET_FIELDS]
    host = b"Host: " + (request.host or b"")
    body = b"\r\n".join([b"TRACE %b HTTP/1.1" % request.target, host, *shown, b"Max-Forwards: 0", b"", b""])
    return AnsweredHere(b"Content-Type: message/http\r\n", body, "max_forwards")
