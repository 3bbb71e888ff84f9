"""What leaves the process: spans, and log records and metrics when asked for.

Law: OpenTelemetry's SDK and exporters are imported here and below, and only when something is exported: they cost
memory and start-up time that nobody without a collector should pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from telemetry.otel_settings import OtelSettings
from telemetry.record import Session
from telemetry.traces import Sampler

if TYPE_CHECKING:
    from telemetry.signals import Signals


class Export(Protocol):
    """What `Signals` needs of it."""

    sampler: Sampler
    traces: object | None

    def spans(self, session: Session) -> None:
        """The trace of this session is kept."""
        ...

    def log(self, level: str, event: str, at: float, fields: Callable[[], Mapping[str, Any]]) -> None:
        """A line about traffic, for whoever collects logs."""
        ...

    def tick(self, now: float) -> None:
        """Once a second."""
        ...

    def close(self, timeout: float) -> None:
        """Hand over what is queued, for at most so long."""
        ...


def begin_export(wanted: OtelSettings, signals: Signals, server_id: str) -> Export | None:
    """Connects to nothing yet. None, and a line in the log, when an exporter cannot be made."""
    return None
