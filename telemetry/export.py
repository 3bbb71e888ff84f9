"""What leaves the process: spans, and log records and metrics when asked for.

Law: OpenTelemetry's SDK and exporters are imported below this file and only when something is exported: they cost
memory and start-up time that nobody without a collector should pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from telemetry.logs import Log
from telemetry.metrics import Metrics
from telemetry.names import Event
from telemetry.otel_settings import OtelSettings
from telemetry.record import Session
from telemetry.redact import Redactor
from telemetry.sessions import Wall

Fields = Callable[[], Mapping[str, Any]]


class Surroundings(NamedTuple):
    """What an export needs of the rest."""

    metrics: Metrics
    log: Log
    redactor: Redactor
    wall: Wall
    wall_now: Callable[[], float]
    server_id: str


class Export(Protocol):
    """What `Signals` needs of an export."""

    def spans(self, session: Session) -> None:
        """The trace of this session is kept."""
        ...

    def log(self, level: str, event: str, at: float, fields: Fields) -> None:
        """A line about traffic, for whoever collects logs."""
        ...

    def tick(self, now: float) -> None:
        """Once a second."""
        ...

    def gather_last(self) -> None:
        """The last metrics, on the event loop's thread; then `close`."""
        ...

    def close(self, timeout: float) -> None:
        """Hand over what is queued, for at most so long."""
        ...


def begin_export(wanted: OtelSettings, surroundings: Surroundings) -> Export | None:
    """Connects to nothing yet. None, and a line in the log, when an exporter cannot be made."""
    from telemetry.otlp import Otlp

    try:
        return Otlp(wanted, surroundings)
    except Exception as error:  # a certificate file that is not there, a variable only the exporter reads, …
        message = surroundings.redactor.text(str(error))
        surroundings.log.error(
            Event.TELEMETRY,
            f"export over OTLP cannot begin: {type(error).__name__}: {message}; check the OTEL_EXPORTER_OTLP_* "
            "variables and restart. Everything else goes on without it.",
        )
        return None
