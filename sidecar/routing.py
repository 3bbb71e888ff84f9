"""Request target → which upstream, and what to ask it for.

Law: pure. Works on the raw target, never on a parsed URL object: path and query stay byte for byte (R7). An
authority is validated once, strictly (R5, R12), and remembered by the caller.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from config.model import Settings
from sidecar.failures import Malformed, Refused

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*\.?\Z")
DEFAULT_PORTS = {"http": 80, "https": 443}
_HANDSHAKES = {"ws": "http", "wss": "https"}  # the other names of the same, which WebSocket clients use (RFC 6455, 3)
_BORDERS = frozenset((b"", b"/", b"?"))  # what may follow a route
_FEW_ROUTES = 8  # are tried one by one, which is faster than looking for the right one


class Authority(NamedTuple):
    """A validated `host[:port]`: the host lower-case and without brackets, the port 0 when none was given."""

    host: str
    port: int


class Origin(NamedTuple):
    """Where a connection goes."""

    scheme: str
    host: str
    port: int

    @property
    def label(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse_authority(text: str, *, what: str = "target") -> Authority:
    """Refuses userinfo, empty hosts and anything a resolver or an upstream could read differently from us."""
    if "@" in text:
        raise Malformed("MALFORMED_REQUEST", f"credentials in the {what} are refused", reason="target")
    host, port_text = text, ""
    if text.startswith("["):
        inside, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise _bad_authority(text, what)
        if "%" in inside:  # a zone means something on the app's machine only
            raise _bad_authority(text, what)
        try:
            host = str(ipaddress.IPv6Address(inside))
        except ValueError:
            raise _bad_authority(text, what) from None
        port_text = rest[1:]
        had_colon = rest.startswith(":")
    else:
        host, colon, port_text = text.partition(":")
        had_colon = bool(colon)
        if not _NAME.match(host) or len(host) > 255:
            raise _bad_authority(text, what)
        host = host.lower().rstrip(".")
    port = 0
    if had_colon and port_text:
        digits = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
        if not digits or not 0 < int(port_text) < 65536:
            raise _bad_authority(text, what)
        port = int(port_text)
    return Authority(host, port)


def _bad_authority(text: str, what: str) -> Malformed:
    """Repeats the text, but nothing behind a colon that is no port: it may be a password that was cut at a slash."""
    shown = text[:100]
    name, colon, port = shown.rpartition(":") if shown.startswith("[") else shown.partition(":")
    if colon and not port.isdigit():
        shown = f"{name}:…"
    return Malformed("MALFORMED_REQUEST", f"{shown!r} is not a valid {what} (host or host:port)", reason="target")


def split_absolute(target: bytes) -> tuple[str, bytes, bytes]:
    """`http://host/path?query` → scheme (http or https), authority, the rest untouched (possibly empty)."""
    written, separator, rest = target.partition(b"://")
    scheme = scheme_of(written)
    if not separator or scheme not in DEFAULT_PORTS:
        raise Malformed(
            "MALFORMED_REQUEST",
            f"{target[:100].decode('latin-1')!r} is not a request target this proxy understands (http:// or https://)",
            reason="target",
        )
    end = len(rest)
    for mark in (b"/", b"?", b"#"):
        found = rest.find(mark, 0, end)
        if found >= 0:
            end = found
    return scheme, rest[:end], rest[end:]


def scheme_of(written: bytes) -> str:
    """In lower case. What a WebSocket client calls ws is http until the upstream has agreed to more."""
    scheme = written.decode("latin-1").lower()
    return _HANDSHAKES.get(scheme, scheme)


def origin_path(rest: bytes, method: str) -> bytes:
    """What to ask the upstream for: an empty path becomes `/`, or `*` for OPTIONS (R6, R7)."""
    if rest.startswith(b"/"):
        return rest
    if not rest:
        return b"*" if method == "OPTIONS" else b"/"
    return b"/" + rest


class Router:
    """The configured `hosts`, ready to be asked."""

    def __init__(self, settings: Settings) -> None:
        self._exact: dict[Authority, str] = {}
        self._suffixes: list[tuple[str, int, str]] = []
        for name, upstream in settings.upstreams.items():
            for entry in upstream.hosts:
                if entry.startswith("*."):
                    suffix, _, port = entry[1:].partition(":")
                    self._suffixes.append((suffix, int(port or 0), name))
                else:
                    self._exact[parse_authority(entry, what="host")] = name
        # Most specific first: longer suffixes, then those that name a port.
        self._suffixes.sort(key=lambda entry: (-len(entry[0]), -entry[1]))

    def by_host(self, host: str, port: int) -> str | None:
        """`port` is the real one, defaults filled in. An entry without a port matches every port."""
        name = self._exact.get(Authority(host, port)) or self._exact.get(Authority(host, 0))
        if name is not None:
            return name
        for suffix, wanted, candidate in self._suffixes:
            if host.endswith(suffix) and wanted in (0, port):
                return candidate
        return None


T = TypeVar("T")


class Routes(Generic[T]):
    """What the `route`s lead to. The longest that ends at a segment border wins."""

    def __init__(self, leading_to: Mapping[str, T]) -> None:
        routes = [(route.encode("ascii").rstrip(b"/"), there) for route, there in leading_to.items()]
        routes.sort(key=lambda route: -len(route[0]))
        self._routes = [(route, len(route), there) for route, there in routes]
        self._by_first_segment: dict[bytes, list[tuple[bytes, int, T]]] | None = None
        if len(routes) > _FEW_ROUTES:
            self._by_first_segment = {}
            for ready in self._routes:
                self._by_first_segment.setdefault(ready[0][1:].partition(b"/")[0], []).append(ready)

    def find(self, path: bytes) -> tuple[T, bytes] | None:
        """Where a path leads, and the rest of it behind the route."""
        routes = self._routes if self._by_first_segment is None else self._likely(path)
        for route, size, there in routes:
            if path.startswith(route):
                rest = path[size:]
                if rest[:1] in _BORDERS:
                    return there, rest
        return None

    def _likely(self, path: bytes) -> list[tuple[bytes, int, T]]:
        """Among many routes, those that begin with the same segment, and the one that catches everything."""
        assert self._by_first_segment is not None
        first = path[1:].partition(b"/")[0].partition(b"?")[0]
        return [*self._by_first_segment.get(first, ()), *self._by_first_segment.get(b"", ())]


def no_route(host: str) -> Refused:
    return Refused(
        "NO_ROUTE",
        f"no upstream has a route for this path, and none lists the host {host[:100]!r}; "
        "add `route:` or `hosts:` to an upstream, or send the absolute form (HTTP_PROXY)",
        reason="no_route",
    )
