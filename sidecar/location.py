"""`Location` for an app that came by a route: where its upstream points at itself, the way leads back by the route.

Law: pure. An answer of the same upstream is rewritten to a path under the route, which is right whatever address the
app knows the sidecar by; a path that the app would otherwise ask the sidecar itself for gets the prefix that was
stripped. Everything else, another host above all, stays byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sidecar.failures import Malformed
from sidecar.routing import DEFAULT_PORTS, parse_authority, split_absolute

# A path that begins with two slashes names another host. Browsers take a backslash for a slash and read over tabs.
_NAMES_A_HOST = re.compile(rb"\t*[/\\]\t*[/\\]")

IsSameUpstream = Callable[[str, int], bool]
"""Of a host and a port."""


def led_back(value: bytes, route: bytes, *, stripped: bool, same_upstream: IsSameUpstream) -> bytes:
    """`route` is the prefix of the path that the app asked for, without a final slash; `stripped` if the upstream has
    not seen it."""
    if value.startswith(b"/") and not value.startswith(b"//"):
        return route + value if stripped else value
    path = _path_at_upstream(value, same_upstream)
    if path is None:
        return value
    if stripped:
        return _on_this_host(route + path)
    under_route = path.startswith(route) and path[len(route) : len(route) + 1] in (b"", b"/", b"?", b"#")
    return _on_this_host(path) if under_route else value


def _on_this_host(path: bytes) -> bytes:
    """The path as a reference that stays with the host that was asked, written as the URL standard does it."""
    if _NAMES_A_HOST.match(path):
        return b"/." + path
    return path or b"/"


def _path_at_upstream(value: bytes, same_upstream: IsSameUpstream) -> bytes | None:
    """What it asks the upstream for; None when it names another one, or is relative to what was asked."""
    if value.startswith(b"//"):
        value = b"https:" + value
    elif b"://" not in value:
        return None
    try:
        scheme, authority, rest = split_absolute(value)
        host, port = parse_authority(authority.decode("latin-1"))
    except Malformed:
        return None
    if not same_upstream(host, port or DEFAULT_PORTS[scheme]):
        return None
    return rest if rest.startswith(b"/") else b"/" + rest
