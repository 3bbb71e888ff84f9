"""One signal on its way to a collector: an exporter of OpenTelemetry's, counted.

Law: an export either arrives or is counted as failed; whatever an exporter raises ends here. A collector that did not
take the last batch is not waited for at the end.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from telemetry.export import Surroundings
from telemetry.names import Event, Field

_DEAD_COLLECTOR = 0.5  # seconds that an end waits for one


class Delivery:
    """Wraps an exporter."""

    def __init__(self, signal: str, exporter: Any, surroundings: Surroundings) -> None:
        self.signal = signal
        self._exporter = exporter
        self._surroundings = surroundings
        self._failed_last = False
        for result in ("success", "failure"):
            surroundings.metrics.exports[signal, result] += 0  # a line at 0, so that the first failure is an increase

    def export(self, batch: Any) -> bool:
        """In the courier's thread; may take as long as the exporter's timeout."""
        try:
            arrived: bool = self._exporter.export(batch).name == "SUCCESS"
        except Exception as error:  # an exporter that raises has failed like one that says so
            tell(self._surroundings, "error", f"export of {self.signal} failed: {error!r}")
            arrived = False
        self._failed_last = not arrived
        self._surroundings.metrics.exported(self.signal, arrived, self._surroundings.wall_now())
        return arrived

    def patience(self, timeout: float) -> float:
        """How long the end may wait for the rest to arrive."""
        return min(timeout, _DEAD_COLLECTOR) if self._failed_last else timeout

    def close(self) -> None:
        try:
            self._exporter.shutdown()
        except Exception as error:  # it is the end anyway; say what it was
            tell(self._surroundings, "warn", f"the exporter of {self.signal} did not shut down cleanly: {error!r}")


def tell(surroundings: Surroundings, level: str, body: str) -> None:
    said = surroundings.redactor.text(body)
    surroundings.log.event(level, Event.TELEMETRY, body[:40], time.monotonic(), lambda: {Field.BODY: said})


class Listening(logging.Handler):
    """What the exporters tell Python's logging goes to our log; without this it would appear on standard error."""

    _LEVELS = ((logging.ERROR, "error"), (logging.WARNING, "warn"), (logging.NOTSET, "debug"))

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(logging.WARNING)
        self._surroundings = surroundings
        self._logger = logging.getLogger("opentelemetry")
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        level = next(word for least, word in self._LEVELS if record.levelno >= least)
        tell(self._surroundings, level, record.getMessage())

    def close(self) -> None:
        """An export that is still under way has nobody left to tell."""
        self._logger.addHandler(logging.NullHandler())
        self._logger.removeHandler(self)
        super().close()
