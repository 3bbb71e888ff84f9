"""Where a host leads under a configuration, and why: which upstream, which entry of which key, over what, how.

Law: pure, but for the question whether an address is this machine's. Which upstream it is, is asked of the router
itself; the rest is read off the settings. Nothing is resolved or dialled, so what a name resolves to is not judged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field

from config.errors import registry_of
from config.model import Settings, Upstream
from sidecar.egress import Egress
from sidecar.failures import Refused
from sidecar.policy.choice import Chosen, PolicyChoice
from sidecar.routing import DEFAULT_PORTS, Authority, Router, bracketed, parse_authority
from sidecar.upstream.endpoints import AUTOMATIC, endpoint_origin


class NotAHost(Exception):
    """What was given cannot be called."""


@dataclass(frozen=True, slots=True)
class Now:
    """What the running sidecar says about an intercepted host."""

    answered: bool
    intercepted: bool | None
    """None: it did not answer."""
    demoted: tuple[str, ...]
    """Ids of clients that are let through unopened, as `sidecar interception list` has them."""
    told: str


@dataclass(frozen=True, slots=True)
class Way:
    """One way an app can call the host, and what becomes of it."""

    url: str
    means: str
    upstream: str | None
    upstream_because: str
    policy: str
    policy_because: str
    goes_to: tuple[str, ...]
    tls: str
    """originated · intercepted: ended here and begun anew · app: between the app and the upstream · none."""
    seen: str
    """all · connection: nothing inside the tunnel."""
    how: str
    refused: str | None = None
    operations: tuple[str, ...] = field(default=())
    now: Now | None = None
    """None: nothing about this changes while a sidecar runs."""

    def lines(self) -> Iterator[tuple[str, str]]:
        name = self.upstream if self.upstream is not None else "none"
        yield "upstream", f"{name}, because {self.upstream_because}"
        if self.refused is not None:
            yield "refused", self.refused
            return
        yield "goes to", f"{', '.join(self.goes_to)}; {self.how}"
        if self.now is not None:
            yield "now", self.now.told
        yield "policy", f"{self.policy}, because {self.policy_because}"
        for operation in self.operations:
            yield "operation", operation


def ways_to(text: str, settings: Settings) -> list[Way]:
    """For `host`, `host:port` or a url. Without a scheme both ways are told."""
    scheme, separator, rest = text.strip().partition("://")
    wanted = (scheme.lower(),) if separator else ("http", "https")
    if not set(wanted) <= DEFAULT_PORTS.keys():
        spoken = f"{scheme!r} is not" if scheme.isalnum() else "that is not what is"
        raise NotAHost(f"{spoken} spoken here; give a host, host:port, or an http:// or https:// url")
    authority = (rest if separator else text.strip()).partition("/")[0].partition("?")[0]
    try:
        host, port = parse_authority(authority)
    except Refused as refused:
        raise NotAHost(refused.message) from None
    looking = _Looking(settings)
    return [looking.way(scheme, host, port or DEFAULT_PORTS[scheme]) for scheme in wanted]


class _Looking:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._router = Router(settings)
        self._egress = Egress(settings)
        for role, listener in (("proxy", settings.listen), ("admin", settings.admin), ("probes", settings.probes)):
            if listener is not None and listener.port and _is_address(listener.host):
                self._egress.add_listener(listener.host, listener.port, role)

    def way(self, scheme: str, host: str, port: int) -> Way:
        name = self._router.by_host(host, port)
        upstream = self._settings.upstreams[name] if name is not None else AUTOMATIC
        chosen = PolicyChoice(self._settings, name or "", upstream, registry_of(self._settings)).before(None)
        tunnel = scheme == "https"
        shown = f"{bracketed(host)}{'' if port == DEFAULT_PORTS[scheme] else f':{port}'}"
        if tunnel and upstream.intercept:
            goes_to, tls, how = _intercepted(upstream, name, host, port)
        elif tunnel:
            goes_to, tls, how = _tunnelled(name, host, port)
        else:
            goes_to, tls, how = _sent(upstream, name, host, port)
        return Way(
            url=f"{scheme}://{shown}/",
            means=f"HTTPS_PROXY: CONNECT {bracketed(host)}:{port}" if tunnel else "HTTP_PROXY, or this Host",
            upstream=name,
            upstream_because=self._why_upstream(name, upstream, host, port),
            policy=chosen.id,
            policy_because=_why_policy(chosen, name, upstream),
            goes_to=goes_to,
            tls=tls,
            seen="connection" if tls == "app" else "all",
            how=how,
            refused=self._refused(name, host, port, tunnel=tunnel),
            operations=() if tls == "app" else tuple(_operations(name, upstream)),
        )

    def _why_upstream(self, name: str | None, upstream: Upstream, host: str, port: int) -> str:
        if name is None:
            label = f"{bracketed(host)}:{port}"
            return f"no upstream lists {host} in its `hosts`; the defaults apply, its label is {label}"
        index, entry = most_specific(upstream.hosts, host, port)
        every_port = "" if ":" in entry.rpartition("]")[2] else ", which matches every port"
        return f'upstreams.{name}.hosts[{index}] is "{entry}"{every_port}'

    def _refused(self, name: str | None, host: str, port: int, *, tunnel: bool) -> str | None:
        if name is None and self._egress.configured_only:
            return "EGRESS_DENIED: egress.mode is configured_only; add the host to an upstream"
        if tunnel and port not in self._connect_ports():
            return f"EGRESS_DENIED: CONNECT to port {port} is not allowed; list it in egress.connect_ports"
        try:
            self._egress.check_name(host)
            if _is_address(host):
                self._egress.check_address(host, port, host)
        except Refused as refused:
            return f"{refused.code}: {refused.message}"
        return None

    def _connect_ports(self) -> set[int]:
        ports = set(self._settings.egress.connect_ports)
        for upstream in self._settings.upstreams.values():
            ports.update(endpoint_origin(url, upstream).port for url in upstream.endpoints)
            ports.update(_entry(entry)[1].port for entry in upstream.hosts)
        return ports


def most_specific(hosts: tuple[str, ...], host: str, port: int) -> tuple[int, str]:
    """Which entry hit, as (index, entry): exact before suffix, longer before shorter, with a port before without."""
    matching = []
    for index, entry in enumerate(hosts):
        suffix, wanted = _entry(entry)
        hit = host.endswith(f".{wanted.host}") if suffix else host == wanted.host
        if hit and wanted.port in (0, port):
            matching.append((not suffix, len(wanted.host), wanted.port, -index))
    best = max(matching)
    return -best[3], hosts[-best[3]]


def _entry(entry: str) -> tuple[bool, Authority]:
    return entry.startswith("*."), parse_authority(entry.removeprefix("*."), what="host")


def _sent(upstream: Upstream, name: str | None, host: str, port: int) -> tuple[tuple[str, ...], str, str]:
    """Where a plain request goes, over which TLS, and how that is told."""
    key = f"upstreams.{name}"
    if upstream.endpoints:
        origins = [endpoint_origin(url, upstream) for url in upstream.endpoints]
        goes_to = tuple(origin.label for origin in origins)
        encrypted = any(origin.scheme == "https" for origin in origins)
        why = f"{key}.tls is originate" if upstream.tls == "originate" else f"{key}.endpoints says https"
        where = f"as {key}.endpoints says"
    else:
        encrypted, why = upstream.tls == "originate", f"{key}.tls is originate"
        goes_to = (f"{bracketed(host)}:{443 if encrypted and port == 80 else port}",)
        where = "where the app said"
    if encrypted:
        return goes_to, "originated", f"{where}, over TLS that the sidecar originates, because {why}; seen whole"
    return goes_to, "none", f"{where}, in clear; seen whole"


def _intercepted(upstream: Upstream, name: str | None, host: str, port: int) -> tuple[tuple[str, ...], str, str]:
    key = f"upstreams.{name}"
    goes_to: tuple[str, ...] = (f"{bracketed(host)}:{port}",)
    where = "where the app said"
    if upstream.endpoints:
        goes_to = tuple(endpoint_origin(url, upstream).label for url in upstream.endpoints)
        where = f"as {key}.endpoints says"
    how = (
        f"{where}; intercepted, because {key}.intercept is true: TLS of the app ends here with a certificate of the "
        "local authority (`sidecar ca show`), and verified TLS goes on to the upstream; seen whole. A client that "
        "refuses the certificate is tunnelled for a while"
    )
    return goes_to, "intercepted", how


def _tunnelled(name: str | None, host: str, port: int) -> tuple[tuple[str, ...], str, str]:
    why = f"upstreams.{name}.intercept is false" if name is not None else "no upstream intercepts it"
    how = (
        f"tunnelled, because {why}: the TLS is between the app and the upstream, connecting is retried and measured, "
        "nothing inside is seen. For all of it set `intercept: true`, or let the app call http:// and set "
        "`tls: originate`"
    )
    return (f"{bracketed(host)}:{port}",), "app", how


def _why_policy(chosen: Chosen, name: str | None, upstream: Upstream) -> str:
    attempts = f"{chosen.policy.max_attempts} attempt" + ("s" if chosen.policy.max_attempts != 1 else "")
    if upstream.chosen_policy is not None:
        return f"upstreams.{name}.policy says so ({attempts} at most)"
    return f"nothing else is chosen ({attempts} at most); after a failure its error code's own policy, if it has one"


def _operations(name: str | None, upstream: Upstream) -> Iterator[str]:
    for operation in upstream.operations:
        methods = ", ".join(operation.methods) or "any method"
        policy = f", policy {operation.policy}" if operation.policy is not None else ""
        yield f"{operation.name} ({methods} {operation.path}){policy}, by upstreams.{name}.operations"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
