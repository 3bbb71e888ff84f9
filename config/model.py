"""Everything that may be set, with its default and its meaning.

The models are frozen and refuse unknown keys; the text below each attribute is the documentation, and is what
`sidecar schema` prints. No file is opened and no name resolved here: a `Settings` that exists is consistent
in itself, and whether the files it names exist is `config/loader.py`'s question.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from config.checks import Contradiction, contradictions, exposure_problems
from config.fields import (
    BindHost,
    BindPort,
    Bytes,
    Count,
    EgressEntry,
    FilePath,
    Name,
    Port,
    Seconds,
    Section,
    Version,
)
from config.upstream import ClientCertificate, Timeouts, Upstream

__all__ = [
    "Admin",
    "ClientCertificate",
    "Contradiction",
    "Egress",
    "Limits",
    "Listen",
    "Policy",
    "Probes",
    "Settings",
    "Timeouts",
    "Upstream",
    "exposure_problems",
]

DEFAULT_POLICY = "default"
_NO_OTHER_NAMES: dict[str, JsonValue] = {"additionalProperties": False}  # for the schema, which only has a pattern


class Listen(Section):
    """The listener that applications send their requests to."""

    host: BindHost = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `egress.mode: configured_only`, so that the sidecar
    does not become an open proxy."""
    port: BindPort = 4140
    """Port to listen on; 0 takes any free one."""


class Admin(Section):
    """The listener for people and tools: health, metrics and the effective configuration."""

    host: BindHost = "127.0.0.1"
    """Address to listen on; it must be loopback. Use `probes` for what others have to reach."""
    port: BindPort = 4141
    """Port to listen on; 0 takes any free one."""


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
    auto_upstreams: Bytes = 50
    """How many hosts without an upstream of their own get a label of their own in metrics; later ones share
    `_other`."""
    connections: Count = 10_000
    """How many connections from applications may be open at once."""
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


class Policy(Section):
    """How the attempts of one request are made."""

    attempt_timeout: Seconds = 30.0
    """How long one attempt may take until the head of the response is complete, in seconds."""


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
    """How long requests under way may take to finish after a request to stop, in seconds."""
    limits: Limits = Field(default_factory=Limits)
    egress: Egress = Field(default_factory=Egress)
    policies: Mapping[Name, Policy] = Field(
        default_factory=lambda: {DEFAULT_POLICY: Policy()}, json_schema_extra=_NO_OTHER_NAMES
    )
    """Named policies that upstreams refer to. `default` always exists and can be changed here."""
    upstreams: Mapping[Name, Upstream] = Field(default_factory=dict, json_schema_extra=_NO_OTHER_NAMES)
    """The services the application calls, by name. The name is their label in metrics, traces and logs."""

    @field_validator("policies", mode="after")
    @classmethod
    def _default_always_exists(cls, given: Mapping[str, Policy]) -> Mapping[str, Policy]:
        return given if DEFAULT_POLICY in given else {DEFAULT_POLICY: Policy(), **given}

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Settings:
        """Refuse contradictions between keys, or hand them to the loader, which knows their lines."""
        found = contradictions(self)
        if isinstance(info.context, list):
            info.context.extend(found)
        elif found:
            raise ValueError("; ".join(f"{problem.key}: {problem.message}" for problem in found))
        return self
