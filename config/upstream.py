"""One upstream: which requests belong to it, where they go, and how long each step may take.

Kept apart from the root model only for its length. It is plain data: choosing an upstream for a request is
`sidecar/routing.py`'s work, and what must hold between several upstreams is checked in `config/checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from config.breaker import Breaker, RateLimitGate, RetryBudget
from config.durable import DeadLetter, Outbox, Replay
from config.egress_proxy import EgressProxy, ProxyUrl
from config.fields import (
    Count,
    EndpointText,
    FilePath,
    Flag,
    HeaderName,
    HostEntryText,
    Length,
    Name,
    OffInYaml,
    Route,
    Seconds,
    Section,
    one_or_many,
)
from config.idempotency import Idempotency
from config.operations import Operation
from config.policy import DEFAULT_POLICY
from config.rules import Rule, When

__all__ = [
    "Breaker",
    "ClientCertificate",
    "EgressProxy",
    "Idempotency",
    "Operation",
    "RateLimitGate",
    "RetryBudget",
    "Rule",
    "Timeouts",
    "Upstream",
    "When",
]


class Timeouts(Section):
    """How long the steps of one exchange with an upstream may take, in seconds."""

    connect: Seconds = 5.0
    """From the start of dialing to a connection that can be used: name resolution, TCP and TLS together."""
    body_idle: Seconds = 60.0
    """The longest silence in the middle of a request or response body before the exchange is given up."""
    pool_idle: Seconds = 60.0
    """How long an unused connection is kept for the next request."""


class ClientCertificate(Section):
    """What the sidecar shows to an upstream that asks for a client certificate (mutual TLS)."""

    cert: FilePath
    """PEM file with the certificate, followed by its chain."""
    key: FilePath
    """PEM file with the private key; it may be the same file."""


def _one_file_holds_both(given: Any) -> Any:
    return {"cert": given, "key": given} if isinstance(given, str) else given


class Upstream(Section):
    """A service the application calls. It needs `hosts`, or a `route`, or another upstream that falls back to it. With
    a `route` or as a fallback it must be clear where to send to: by `endpoints`, or by an entry of `hosts` without
    `*`."""

    hosts: tuple[HostEntryText, ...] = ()
    """Requests for these hosts belong to this upstream: `host`, `host:port` or `*.suffix`. Without a port
    every port matches; the most specific entry wins. Quote entries that begin with `*` or `[`."""
    route: Route | None = None
    """Requests sent to the listener itself whose path begins with this prefix belong to this upstream, as in
    /payments. `/` catches every path that nothing else matches."""
    strip_prefix: Flag = True
    """Whether the route's prefix is removed from the path before the request is sent on."""
    rewrite_host: Flag | None = None
    """Whether the `Host` header (and the TLS server name) becomes that of the endpoint. When not set: yes for
    requests that came in by `route`, no for those where the application named the host itself."""
    endpoints: tuple[EndpointText, ...] = ()
    """Where the requests are sent: http://host[:port] or https://host[:port], without a path. Without
    endpoints they go where the application said."""
    tls: Annotated[Literal["off", "originate"], OffInYaml] = "off"
    """`originate`: the application speaks plain http to the sidecar, and the sidecar speaks verified TLS to
    the upstream, never in clear. `off`: as the application or the endpoint says; https:// endpoints always
    use TLS."""
    intercept: Flag = False
    """Whether HTTPS for the listed `hosts` is opened here: the application gets a certificate of the sidecar's own
    authority (`sidecar ca export`), which it has to trust, and the upstream is spoken to over verified TLS. Only for
    hosts listed by name, never for `*.suffix`."""
    ca_bundle: FilePath | None = None
    """PEM file with the authorities to trust for this upstream instead of the system's own. Relative paths
    start at the working directory."""
    client_cert: (
        Annotated[
            ClientCertificate,
            BeforeValidator(_one_file_holds_both, json_schema_input_type=str | ClientCertificate),
        ]
        | None
    ) = None
    """Certificate and key for mutual TLS: either the path of one PEM file that holds both, or {cert, key}."""
    insecure_skip_verify: Flag = False
    """Do not verify the upstream's certificate. Anyone on the way can then read and change the traffic: for
    experiments only. Prefer `ca_bundle`."""
    egress_proxy: Annotated[
        tuple[ProxyUrl, ...], BeforeValidator(one_or_many, json_schema_input_type=ProxyUrl | list[ProxyUrl] | None)
    ] = ()
    """A parent proxy that requests go through, as http://[user:password@]host:port, or a list of them that are used
    in turn. Not set: straight to the upstream."""
    subsystem: Name | None = None
    """The name under which `subsystem_mappings` and the statistics know this upstream; several may share one. Not
    set: the upstream's own name."""
    policy: str = DEFAULT_POLICY
    """The name of the policy, one of `policies`, that this upstream's requests follow. Not set: the policy that goes
    with the error code of a failure, else `default`."""
    timeouts: Timeouts = Field(default_factory=Timeouts)
    max_in_flight: Count | None = None
    """How many requests may be under way to this upstream at once; more wait, or are refused with OVERLOADED. Not set:
    no limit of its own."""
    max_queue: Length = 0
    """How many requests beyond max_in_flight may wait for their turn, in order, until their time is up; more are
    refused with OVERLOADED. 0: none waits."""
    breaker: Breaker = Field(default_factory=Breaker)
    retry_budget: RetryBudget = Field(default_factory=RetryBudget)
    rate_limit_gate: RateLimitGate = Field(default_factory=RateLimitGate)
    idempotency: Idempotency = Field(default_factory=Idempotency)
    dead_letter: DeadLetter = Field(default_factory=DeadLetter)
    replay: Replay = Field(default_factory=Replay)
    outbox: Outbox = Field(default_factory=Outbox)
    propagation: Literal["participate", "forward", "strip"] = "participate"
    """What happens to trace headers. `participate`: each attempt is a span of its own, where traces are exported.
    `forward`: they pass unchanged. `strip`: the upstream does not see them."""
    fallback: str | None = None
    """Another upstream that takes a call when every endpoint of this one is refused by its breaker, if the call may be
    sent again. Not set: the call is refused with CIRCUIT_OPEN."""
    fallback_credentials: Literal["strip", "keep"] = "strip"
    """`strip`: only headers that are known to be harmless go to `fallback` (`Accept`, `Content-Type`, `Range`,
    `User-Agent`, the idempotency key, trace headers and the like) with those of `fallback_headers`, and no query
    parameter that is named like a credential or looks like one. `keep`: all of it, only where both belong to the same
    owner."""
    fallback_headers: tuple[HeaderName, ...] = ()
    """More headers that `fallback` needs and may see, as in [anthropic-version]."""
    rules: tuple[Rule, ...] = ()
    """Rules that give answers and failures of this upstream an error code; tried before the global `rules`, the first
    match counts."""
    operations: tuple[Operation, ...] = ()
    """Kinds of requests with a name and settings of their own; the first match counts."""

    @property
    def chosen_policy(self) -> str | None:
        """The policy somebody chose for this upstream; None when none did, and the error code's own may apply."""
        return self.policy if "policy" in self.model_fields_set else None
