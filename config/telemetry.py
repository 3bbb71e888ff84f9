"""What is recorded and shown, beside the metrics, which are always there.

Exporting traces is configured by the standard `OTEL_*` variables, not here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from config.fields import Bytes, Count, FilePath, Flag, Length, Seconds, Section
from config.operations import SecretPath


class Log(Section):
    """Log lines, on standard error."""

    format: Literal["json", "ecs", "text"] = "json"
    """`json`: one object per line with OpenTelemetry's field names. `ecs`: the same with Elastic's. `text`: for
    people."""
    level: Literal["debug", "info", "warn", "error"] = "info"
    """The least severe lines that are written. `debug` adds a line for each attempt (how far it came, over which
    connection, what was decided), for connections opened and closed, and for the steps of a reload, and puts stack
    traces into error records and dead letters: for an hour of looking, not for every day. Faults of the sidecar itself
    have their stack at every level. Secrets are hidden everywhere."""
    access: Flag = False
    """One line for every request, healthy ones too. Without it, only retried, failed and slow ones are logged."""


class Events(Section):
    """Events about retries, breakers and configuration, as JSON Lines in a file. They are always available live."""

    file: FilePath | None = None
    """The file to append to. Not set: none. Relative paths start at the working directory."""
    max_bytes: Annotated[Bytes, Field(ge=4096)] = 104_857_600
    """A file that has reached this size is compressed and put aside, and a new one is begun."""
    keep: Length = 5
    """How many compressed files are kept; the oldest are deleted."""
    ttl: Seconds | None = None
    """Compressed files older than this are deleted, in seconds. Not set: only their number counts."""


class Telemetry(Section):
    """What is recorded and shown about the traffic."""

    slow_threshold: Seconds = 1.0
    """A request that takes longer than this, in seconds, is kept and traced like a failed one."""
    sessions: Count = 10_000
    """How many retried, failed and slow sessions are kept in memory for looking at."""
    sessions_ttl: Seconds = 86_400.0
    """How long such a session is kept at most, in seconds."""
    healthy_sample: Length = 100
    """One in so many healthy sessions is shown in the live view; 0 shows none."""
    redact_query: tuple[str, ...] = ()
    """Names of query parameters whose values are hidden in logs, traces and listings, besides the usual ones such as
    `token`, `key` and `signature`. Case does not matter."""
    redact_paths: tuple[SecretPath, ...] = ()
    """Paths that are a credential themselves: segments with a `{…}` are hidden in logs, traces and listings, as in
    /hooks/{secret}/deliver, and with `/{**}` at the end all that follow. What `*` stands for is shown."""
    own_otlp: Flag = False
    """Whether the application's own telemetry (OTLP over HTTP: /v1/traces, /v1/metrics, /v1/logs) is retried, kept and
    traced like any other request. Without it, it just passes: telemetry about telemetry has no end."""
    log: Log = Field(default_factory=Log)
    events: Events = Field(default_factory=Events)
