"""Everything that may be set, with its default and its meaning.

The models are frozen and refuse unknown keys; the text below each attribute is the documentation, and is what
`sidecar schema` prints. No file is opened and no name resolved here: a `Settings` that exists is consistent
in itself, and whether the files it names exist is `config/loader.py`'s question.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from config.checks import Contradiction, contradictions, exposure_problems
from config.codes import ErrorCodeEntry
from config.durable import DeadLetter, DeadLetterStore, Outbox, Replay
from config.fields import (
    NO_OTHER_NAMES,
    BindHost,
    BindPort,
    Bytes,
    CodeName,
    Count,
    EgressEntry,
    FilePath,
    Flag,
    Name,
    Port,
    Seconds,
    Section,
    Version,
)
from config.policy import DEFAULT_POLICY, DEFAULT_STAGE_ATTEMPTS, SHIPPED, Policy, complete_policies
from config.proxy_auth import ProxyAuth
from config.telemetry import Events, Log, Telemetry
from config.upstream import (
    Breaker,
    ClientCertificate,
    EgressProxy,
    Idempotency,
    Operation,
    RateLimitGate,
    RetryBudget,
    Rule,
    Timeouts,
    Upstream,
    When,
)

__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_STAGE_ATTEMPTS",
    "SHIPPED",
    "Admin",
    "Breaker",
    "ClientCertificate",
    "Contradiction",
    "DeadLetter",
    "DeadLetterStore",
    "Egress",
    "EgressProxy",
    "ErrorCodeEntry",
    "Events",
    "Idempotency",
    "Limits",
    "Listen",
    "Log",
    "Operation",
    "Outbox",
    "Policy",
    "Probes",
    "ProxyAuth",
    "RateLimitGate",
    "Replay",
    "RetryBudget",
    "Rule",
    "ServerCertificate",
    "Settings",
    "Telemetry",
    "Timeouts",
    "Upstream",
    "When",
    "exposure_problems",
]

_Mappings = Annotated[Mapping[Name, str], NO_OTHER_NAMES]
_Operations = Annotated[Mapping[Name, _Mappings], NO_OTHER_NAMES]


class ServerCertificate(Section):
    """What a listener of the sidecar shows to those who connect to it over TLS."""

    cert: FilePath
    """PEM file with the certificate, followed by its chain. A renewed one is noticed and shown to new connections."""
    key: FilePath
    """PEM file with the private key; it may be the same file."""


class Listen(Section):
    """The listener that applications send their requests to."""

    host: BindHost = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `auth` or `egress.mode: configured_only`, so that the
    sidecar does not become an open proxy."""
    port: BindPort = 4140
    """Port to listen on; 0 takes any free one."""
    reuse_port: Flag = False
    """Whether other processes of this user may listen on the same address (SO_REUSEPORT), another sidecar with a
    `state_dir` of its own: the kernel spreads connections over them, and one that stops may lose some that it had not
    accepted yet. `sidecar run --takeover` needs no such thing, and loses none."""
    tls: ServerCertificate | None = None
    """Applications speak TLS to the sidecar itself (HTTPS_PROXY=https://…). Not set: in clear."""
    auth: ProxyAuth | None = None
    """Who may use the listener. Not set: whoever reaches it."""


class Admin(Section):
    """The listener for people and tools: health, metrics, what happened, and orders."""

    host: BindHost = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `token_file`. Use `probes` for the kubelet and Prometheus."""
    port: BindPort = 4141
    """Port to listen on; 0 takes any free one."""
    token_file: FilePath | None = None
    """File with one token per line, `NAME ROLE sha256:DIGEST`, role `read` or `operate`; `sidecar tokens new` writes
    them. Then whoever asks needs one. It is read again when it changes. Not set: no token, loopback only."""
    tls: ServerCertificate | None = None
    """Not set: plain http, in which a token can be overheard beyond this machine."""
    audit_reads: Flag = False
    """Whether the audit also has who looked at sessions, retry metrics, dead letters and jobs, once a minute for each;
    changes are always in it."""
    audit_keep: Seconds = 31_536_000.0
    """How long the audit keeps what was done, in seconds: a year unless set."""


class Probes(Section):
    """A listener with /livez, /readyz and /metrics only, for the kubelet and Prometheus."""

    host: BindHost
    """Address to listen on; it may be off loopback, for example 0.0.0.0."""
    port: BindPort
    """Port to listen on, for example 4142; 0 takes any free one."""


class Limits(Section):
    """Bounds on memory, connections and patience. Together they bound what a misbehaving peer can cost."""

    replay_body_bytes: Bytes = 1_048_576
    """A request body is kept for resending up to this size. A larger one still streams through, but cannot be
    sent a second time."""
    buffer_response_bytes: Bytes = 65_536
    """A response with a known length up to this size is completed before its first byte is passed on, so that
    a connection that breaks in the middle can still be hidden from the application."""
    memory_bytes: Annotated[Bytes, Field(ge=1_048_576)] = 268_435_456
    """How much memory may be held for requests under way: bodies, answers that wait for their application, and what
    waits to be written to disk. Near it the largest bodies give up the copy for another attempt, then new ones are
    not kept; at it a new request with a body gets 503."""
    auto_upstreams: Bytes = 50
    """How many hosts without an upstream of their own get a label of their own in metrics; later ones share
    `_other`."""
    connections: Count = 10_000
    """How many connections from applications may be open at once. The process needs about twice as many open files
    (`ulimit -n`); where fewer are to be had, the start says so."""
    admin_connections: Count = 128
    """How many connections the admin port may have at once, and as many the probes listener. When all are taken, the
    one that has been silent longest makes room. They have `head_timeout` and `keepalive_timeout` too."""
    tunnels: Count = 1_000
    """How many CONNECT and Upgrade tunnels may be open at once."""
    head_bytes: Annotated[Bytes, Field(ge=1024)] = 65_536
    """The largest request or response head (first line and headers) that is accepted."""
    head_timeout: Seconds = 10.0
    """How long an application may take to send a request head, in seconds."""
    keepalive_timeout: Seconds = 75.0
    """How long an idle connection from an application is kept open, in seconds."""
    tunnel_idle_timeout: Seconds = 300.0
    """How long a tunnel may be silent in both directions before it is closed, in seconds."""
    tunnel_total_timeout: Seconds | None = None
    """How long a tunnel may last, however much is said in it, in seconds. Not set: as long as it is used."""
    workflow_ttl: Seconds = 3_600.0
    """How long the attempts of a workflow's stages are remembered after its last request, in seconds."""
    workflows: Count = 10_000
    """How many workflows are remembered at once; the least recently used are forgotten first."""


class Egress(Section):
    """Where requests may go. Link-local and metadata addresses and the sidecar's own ports are always
    refused."""

    mode: Literal["open", "configured_only"] = "open"
    """`open`: any host may be called. `configured_only`: only hosts that an upstream names; others get
    403."""
    allow: tuple[EgressEntry, ...] = ()
    """Exceptions to the refusal of link-local and metadata addresses: IP addresses, networks (10.0.0.0/8),
    hosts or `*.suffix`."""
    deny: tuple[EgressEntry, ...] = ()
    """Destinations that are refused in addition: IP addresses, networks, hosts or `*.suffix`."""
    connect_ports: tuple[Port, ...] = (443,)
    """Ports that CONNECT may reach, besides the ports of configured upstreams."""


class Settings(Section):
    """The whole configuration of a sidecar. Every key is optional: with no file at all it is a local
    proxy."""

    version: Version = "1.0.0"
    """Version of this file's format. Any 1.x.y is read."""
    listen: Listen = Field(default_factory=Listen)
    admin: Admin = Field(default_factory=Admin)
    probes: Probes | None = None
    """Not set: no third listener."""
    state_dir: FilePath = Path("sidecar-data")
    """Directory for what must survive a restart; one sidecar owns it at a time. Relative paths start at the
    working directory."""
    shutdown_grace: Seconds = 20.0
    """How long requests under way may take to finish after a request to stop, in seconds. What has not ended by then is
    cut off, answered and kept, which takes up to 16 seconds more."""
    limits: Limits = Field(default_factory=Limits)
    egress: Egress = Field(default_factory=Egress)
    retries_enabled: Flag = True
    """false: nothing is ever sent a second time, whatever the policies say."""
    global_defaults: Policy = Field(default_factory=Policy)
    """What policies leave out: any of their keys, for all of them. A shipped policy keeps the keys it says itself."""
    policies: Annotated[Mapping[Name, Policy], NO_OTHER_NAMES] = Field(default_factory=dict, validate_default=True)
    """Named policies that upstreams, operations and error codes refer to. `default`, `patient`, `NETWORK_TIMEOUT`,
    `DATABASE_CONNECTION_ERROR` and `RATE_LIMIT_EXCEEDED` always exist; what is given here changes them key by
    key."""
    stages: Annotated[Mapping[Name, Count], NO_OTHER_NAMES] = Field(default_factory=dict)
    """How many attempts each stage of a workflow gets, by the stage's name. Stages not named here get 5."""
    rules: tuple[Rule, ...] = ()
    """Rules that give answers and failures an error code, for all upstreams; tried after the upstream's own."""
    error_codes: Annotated[Mapping[CodeName, ErrorCodeEntry], NO_OTHER_NAMES] = Field(default_factory=dict)
    """Error codes in addition to the built-in ones, and changes to those, by their name."""
    dead_letter: DeadLetterStore = Field(default_factory=DeadLetterStore)
    telemetry: Telemetry = Field(default_factory=Telemetry)
    upstreams: Annotated[Mapping[Name, Upstream], NO_OTHER_NAMES] = Field(default_factory=dict)
    """The services the application calls, by name. The name is their label in metrics, traces and logs."""
    subsystem_mappings: Annotated[Mapping[Name, _Operations], NO_OTHER_NAMES] = Field(default_factory=dict)
    """Which policy follows on which error code: by subsystem (an upstream, or its `subsystem`), then by operation, then
    by error code or `default`. Wins over the policies of operations and upstreams."""

    @field_validator("policies", mode="after")
    @classmethod
    def _complete(cls, given: Mapping[str, Policy], info: ValidationInfo) -> Mapping[str, Policy]:
        return complete_policies(given, info.data.get("global_defaults"))

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Settings:
        """Refuse contradictions between keys, or hand them to the loader, which knows their lines."""
        found = contradictions(self)
        if isinstance(info.context, list):
            info.context.extend(found)
        elif found:
            raise ValueError("; ".join(f"{problem.key}: {problem.message}" for problem in found))
        return self
