"""What must hold between settings, beyond each being valid alone.

Pure: a Settings goes in, a list of contradictions comes out, nothing is raised, so that all can be shown at
once. Each names the keys it was derived from; when one of those is itself wrong the contradiction is not
worth telling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from config.addresses import is_loopback, join_host_port
from config.contradiction import Contradiction, KeyPath
from config.fallbacks import fallback_problems
from config.interception import interception_problems
from config.numbers import number_problems
from config.references import reference_problems

if TYPE_CHECKING:
    from config.model import Settings
    from config.upstream import Upstream

__all__ = ["Contradiction", "KeyPath", "contradictions", "exposure_problems"]

_EVERY_INTERFACE = ("0.0.0.0", "::")


def contradictions(settings: Settings) -> list[Contradiction]:
    """All of them, in the order of the keys they point at."""
    return [
        *exposure_problems(settings),
        *_shared_ports(settings),
        *_unreachable_upstreams(settings),
        *_claimed_twice(settings),
        *_own_parents(settings),
        *number_problems(settings),
        *reference_problems(settings),
        *fallback_problems(settings),
        *interception_problems(settings),
    ]


def exposure_problems(settings: Settings) -> list[Contradiction]:
    """Listeners that others could misuse: an open proxy, or an admin port beyond this machine."""
    found = []
    unguarded = settings.listen.auth is None and settings.egress.mode != "configured_only"
    if not is_loopback(settings.listen.host) and unguarded:
        found.append(
            Contradiction(
                ("listen", "host"),
                "everyone who can reach this address could use the sidecar as an open proxy; "
                "set `egress.mode: configured_only` or `listen.auth`, or listen on 127.0.0.1",
                (("listen", "host"), ("egress", "mode"), ("listen", "auth")),
            )
        )
    if not is_loopback(settings.admin.host) and settings.admin.token_file is None:
        found.append(
            Contradiction(
                ("admin", "host"),
                "everyone who can reach this address could read and change everything; set `admin.token_file` "
                "(`sidecar tokens new NAME --role operate --file FILE` makes one), or keep it on 127.0.0.1 and use "
                "`probes` for the kubelet and Prometheus",
                (("admin", "host"), ("admin", "token_file")),
            )
        )
    return found


def _shared_ports(settings: Settings) -> Iterator[Contradiction]:
    seen: list[tuple[str, str, int]] = []
    for name, listener in (
        ("listen", settings.listen),
        ("admin", settings.admin),
        ("probes", settings.probes),
    ):
        if listener is None or listener.port == 0:
            continue
        for other_name, other_host, other_port in seen:
            if listener.port == other_port and _overlap(listener.host, other_host):
                yield Contradiction(
                    (name, "port"),
                    f"`{other_name}` already takes {join_host_port(other_host, other_port)}; "
                    "give each listener a port of its own (0 takes any free one)",
                    ((name, "port"), (other_name, "port"), (name, "host"), (other_name, "host")),
                )
                break
        seen.append((name, listener.host, listener.port))


def _overlap(one: str, other: str) -> bool:
    """Whether two bind addresses cannot both have the same port."""
    names = {"127.0.0.1" if host == "localhost" else host for host in (one, other)}
    return len(names) == 1 or any(host in names for host in _EVERY_INTERFACE)


def _unreachable_upstreams(settings: Settings) -> Iterator[Contradiction]:
    """Upstreams that no request reaches, or whose requests have nowhere to go."""
    fallbacks = {upstream.fallback for upstream in settings.upstreams.values()}
    for name, upstream in settings.upstreams.items():
        path = ("upstreams", name)
        looked_at = tuple((*path, key) for key in ("hosts", "route", "endpoints"))
        if not upstream.hosts and upstream.route is None and name not in fallbacks:
            message = "no request can ever match this upstream; give it `hosts`, or a `route` with `endpoints`"
            yield Contradiction(path, message, looked_at)
        elif upstream.route is not None and not upstream.endpoints and not _names_a_host(upstream):
            message = (
                "a request that comes in by `route` does not say which host is meant; "
                "add `endpoints`, or a `hosts` entry without `*`"
            )
            yield Contradiction((*path, "route"), message, looked_at)


def _names_a_host(upstream: Upstream) -> bool:
    """Whether one of `hosts` can be called as it is: a pattern such as `*.example.com` cannot."""
    return any("*" not in entry for entry in upstream.hosts)


def _claimed_twice(settings: Settings) -> Iterator[Contradiction]:
    route_owners: dict[str, str] = {}
    host_owners: dict[str, str] = {}
    for name, upstream in settings.upstreams.items():
        if upstream.route is not None:
            owner = route_owners.setdefault(upstream.route, name)
            if owner != name:
                path = ("upstreams", name, "route")
                message = f"upstream `{owner}` already has this route; a route belongs to one upstream"
                yield Contradiction(path, message, (path, ("upstreams", owner, "route")))
        for index, entry in enumerate(upstream.hosts):
            owner = host_owners.setdefault(entry, name)
            if owner != name:
                entry_path = ("upstreams", name, "hosts", index)
                message = f"upstream `{owner}` already has this host; a host belongs to one upstream"
                yield Contradiction(entry_path, message, (("upstreams", name, "hosts"), ("upstreams", owner, "hosts")))


def _own_parents(settings: Settings) -> Iterator[Contradiction]:
    """Parent proxies that are this sidecar itself: every request would come back."""
    listeners = (("listen", settings.listen), ("admin", settings.admin), ("probes", settings.probes))
    for name, upstream in settings.upstreams.items():
        for index, proxy in enumerate(upstream.egress_proxy):
            for key, listener in listeners:
                if listener is not None and listener.port == proxy.port and _leads_to(proxy.host, listener.host):
                    path = ("upstreams", name, "egress_proxy")
                    message = (
                        f"entry {index + 1} is the sidecar's own `{key}` address, so requests would come back to it; "
                        "name the proxy behind it, or leave the key out"
                    )
                    yield Contradiction(path, message, (path, (key, "port"), (key, "host")))


def _leads_to(host: str, bound: str) -> bool:
    """Whether calling a host reaches a listener bound like this, as far as the text tells."""
    if bound in _EVERY_INTERFACE:
        return is_loopback(host) or host in _EVERY_INTERFACE
    return _overlap(host, bound)
