"""Fallbacks from one upstream to another: they must exist, end somewhere, and never leak what was encrypted.

Pure, like `config/checks.py`, whose list it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from config.contradiction import Contradiction

if TYPE_CHECKING:
    from config.model import Settings
    from config.upstream import Upstream


def fallback_problems(settings: Settings) -> Iterator[Contradiction]:
    """Every `fallback` that cannot do its work."""
    upstreams = settings.upstreams
    for name, upstream in upstreams.items():
        path = ("upstreams", name, "fallback")
        if upstream.fallback is None:
            continue
        target = upstreams.get(upstream.fallback)
        if upstream.fallback == name:
            yield Contradiction(path, "an upstream cannot be its own fallback; name another one", (path,))
        elif target is None:
            known = tuple(other for other in upstreams if other != name)
            message = f"there is no upstream of this name (there is: {', '.join(known) or 'no other one'})"
            yield Contradiction(path, message, (path, ("upstreams", upstream.fallback)), known)
        else:
            yield from _unsuitable(path, upstream, upstream.fallback, target)
    for cycle in _cycles(upstreams):
        paths = tuple(("upstreams", name, "fallback") for name in cycle)
        shown = " → ".join((*cycle, cycle[0]))
        yield Contradiction(paths[0], f"the fallbacks go round in a circle: {shown}; remove one of them", paths)


def _unsuitable(path: tuple[str, ...], upstream: Upstream, name: str, target: Upstream) -> Iterator[Contradiction]:
    own = ((*path[:-1], "tls"), (*path[:-1], "intercept"))
    looked_at = (path, *(("upstreams", name, key) for key in ("endpoints", "hosts", "tls")), *own)
    if not target.endpoints and not any("*" not in entry for entry in target.hosts):
        message = f"`{name}` does not say where to send to; give it `endpoints`, or a `hosts` entry without `*`"
        yield Contradiction(path, message, looked_at)
    elif (upstream.tls == "originate" or upstream.intercept) and not always_encrypted(target):
        key = "tls: originate" if upstream.tls == "originate" else "intercept: true"
        message = (
            f"this upstream is never spoken to in clear (`{key}`), but `{name}` would be; "
            f"give `{name}` https:// endpoints or `tls: originate`"
        )
        yield Contradiction(path, message, looked_at)


def always_encrypted(upstream: Upstream) -> bool:
    """Whatever is sent to it without its host being named is sent over TLS."""
    if upstream.tls == "originate":
        return True
    return bool(upstream.endpoints) and all(endpoint.startswith("https://") for endpoint in upstream.endpoints)


def _cycles(upstreams: Mapping[str, Upstream]) -> Iterator[tuple[str, ...]]:
    """Each circle of at least two once, from its first member in the file on."""
    settled: set[str] = set()
    for start in upstreams:
        way: list[str] = []
        here: str | None = start
        while here is not None and here in upstreams and here not in settled and here not in way:
            way.append(here)
            here = upstreams[here].fallback
        if here in way and len(way) - way.index(here) > 1:
            yield tuple(way[way.index(here) :])
        settled.update(way)
