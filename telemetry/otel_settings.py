"""What the standard `OTEL_*` variables say.

Law: read from the mapping given, never from the process, and without OpenTelemetry's SDK, whose private configurator
is the only other reader of most of them. A variable that makes no sense is named, with what it may be, and switches
export off: a wrong guess would send traces somewhere. Values are not repeated in messages where they can be secrets.

`OTEL_EXPORTER_OTLP_TIMEOUT` (and that of a signal) is in seconds, as Python's SDK reads it; the specification says
milliseconds, so 1000 and more is taken for those. The other times are in milliseconds, as in both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import isfinite
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from telemetry.names import METHODS, SIGNALS
from telemetry.traces import Sampler

_PORTS = {"grpc": 4317, "http/protobuf": 4318}
_PROPAGATORS = ("tracecontext", "baggage")
_SAMPLERS = ("always_on", "always_off", "traceidratio")


class BadVariable(Exception):
    """Which variable, and what it may be."""


class Destination(NamedTuple):
    """Where one signal goes."""

    signal: str
    protocol: str  # grpc | http/protobuf
    endpoint: str
    headers: Mapping[str, str]
    timeout: float
    """Seconds."""
    compression: str  # none | gzip
    ca_file: str | None
    """Whom to trust over TLS; None: whom the library trusts."""
    certificate_file: str | None
    """Shown to the collector, with `key_file`."""
    key_file: str | None


class OtelSettings(NamedTuple):
    """Everything about export. `traces`, `logs` and `metrics` are None when that signal is not exported."""

    traces: Destination | None
    logs: Destination | None
    metrics: Destination | None
    sampler: Sampler
    resource: Mapping[str, str]
    known_methods: frozenset[str]
    queue_size: int
    batch_size: int
    schedule_delay: float
    metric_interval: float


def read(environ: Mapping[str, str]) -> OtelSettings | None:
    """None when nothing is exported. Raises BadVariable."""
    if _word(environ, "OTEL_SDK_DISABLED", ("true", "false"), "false") == "true":
        return None
    traces, logs, metrics = (_destination(environ, signal) for signal in SIGNALS)
    if traces is None and logs is None and metrics is None:
        return None
    queue_size = _whole(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 8192)
    batch_size = _whole(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 256)
    if batch_size > queue_size:
        raise BadVariable("OTEL_BSP_MAX_EXPORT_BATCH_SIZE must not be larger than OTEL_BSP_MAX_QUEUE_SIZE")
    methods = environ.get("OTEL_INSTRUMENTATION_HTTP_KNOWN_METHODS", "").strip()
    return OtelSettings(
        traces,
        logs,
        metrics,
        _sampler(environ),
        _resource(environ),
        frozenset(method.strip() for method in methods.split(",")) if methods else METHODS,
        queue_size,
        batch_size,
        _whole(environ, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000,
        _whole(environ, "OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1000,
    )


def unknown_propagators(environ: Mapping[str, str]) -> list[str]:
    """What `OTEL_PROPAGATORS` asks for and is not done."""
    asked = (word.strip().lower() for word in environ.get("OTEL_PROPAGATORS", "").split(","))
    return [word for word in asked if word and word not in _PROPAGATORS]


def _destination(environ: Mapping[str, str], signal: str) -> Destination | None:
    upper = signal.upper()
    chosen = environ.get(f"OTEL_{upper}_EXPORTER", "").strip().lower()
    if chosen not in ("", "otlp", "none"):
        raise BadVariable(f"OTEL_{upper}_EXPORTER must be otlp or none")
    own = environ.get(f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT", "").strip()
    general = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    # Traces follow an endpoint; logs and metrics have other ways out already and are asked for by name.
    if chosen != "otlp" and (chosen == "none" or signal != "traces" or not (own or general)):
        return None
    name = f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT" if own else "OTEL_EXPORTER_OTLP_ENDPOINT"
    protocol = _protocol(environ, upper, own or general, name)
    endpoint = own or general or f"http://localhost:{_PORTS[protocol]}"
    _check_url(name, endpoint)
    if protocol != "grpc" and not own:
        endpoint = f"{endpoint.rstrip('/')}/v1/{signal}"
    return Destination(
        signal,
        protocol,
        endpoint,
        _headers(environ, upper),
        _timeout(environ, upper),
        _either(environ, upper, "COMPRESSION", ("none", "gzip"), "none"),
        *(_file(environ, upper, what) for what in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")),
    )


def _protocol(environ: Mapping[str, str], upper: str, endpoint: str, name: str) -> str:
    said = _either(environ, upper, "PROTOCOL", tuple(_PORTS), "")
    if said:
        return said
    try:
        return "http/protobuf" if urlsplit(endpoint).port == _PORTS["http/protobuf"] else "grpc"
    except ValueError:
        raise BadVariable(f"{name} must be a URL such as http://collector:4317") from None


def _check_url(name: str, endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise BadVariable(f"{name} must be a URL such as http://collector:4317")


def _file(environ: Mapping[str, str], upper: str, what: str) -> str | None:
    """The exporters of the SDK would go on without TLS's certainty when they cannot read one."""
    for name in (f"OTEL_EXPORTER_OTLP_{upper}_{what}", f"OTEL_EXPORTER_OTLP_{what}"):
        if path := environ.get(name, "").strip():
            if not os.access(path, os.R_OK):
                raise BadVariable(f"{name} must name a file that can be read")
            return path  # the signal's own goes before the general one
    return None


def _headers(environ: Mapping[str, str], upper: str) -> dict[str, str]:
    for name in (f"OTEL_EXPORTER_OTLP_{upper}_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"):
        if given := environ.get(name, "").strip():
            return {key.lower(): value for key, value in _pairs(name, given).items()}
    return {}


def _timeout(environ: Mapping[str, str], upper: str) -> float:
    """In seconds; see the law."""
    name = f"OTEL_EXPORTER_OTLP_{upper}_TIMEOUT"
    if not environ.get(name, "").strip():
        name = "OTEL_EXPORTER_OTLP_TIMEOUT"
    given = _number(environ, name, 10.0)
    if given <= 0:
        raise BadVariable(f"{name} must be greater than 0")
    return given / 1000 if given >= 1000 else given


def _sampler(environ: Mapping[str, str]) -> Sampler:
    chosen = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    plain = chosen.removeprefix("parentbased_")
    if plain not in _SAMPLERS:
        raise BadVariable(
            f"OTEL_TRACES_SAMPLER must be one of {', '.join(_SAMPLERS)}, or one of them with parentbased_"
        )
    ratio = 0.0 if plain == "always_off" else 1.0
    if plain == "traceidratio":
        ratio = _number(environ, "OTEL_TRACES_SAMPLER_ARG", 1.0)
        if not 0 <= ratio <= 1:
            raise BadVariable("OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1")
    return Sampler(ratio, parent_based=chosen != plain)


def _resource(environ: Mapping[str, str]) -> dict[str, str]:
    given = environ.get("OTEL_RESOURCE_ATTRIBUTES", "").strip()
    resource = _pairs("OTEL_RESOURCE_ATTRIBUTES", given) if given else {}
    if name := environ.get("OTEL_SERVICE_NAME", "").strip():
        resource["service.name"] = name
    return resource


# ---- kinds of values ---------------------------------------------------------------------------------------------


def _pairs(name: str, given: str) -> dict[str, str]:
    found = {}
    for part in given.split(","):
        key, equals, value = part.partition("=")
        if not part.strip():
            continue
        if not equals or not key.strip():
            raise BadVariable(f"{name} must be a list of key=value, separated by commas")
        found[unquote(key.strip())] = unquote(value.strip())
    return found


def _either(environ: Mapping[str, str], upper: str, what: str, words: tuple[str, ...], default: str) -> str:
    """The signal's own variable, else the general one."""
    own = f"OTEL_EXPORTER_OTLP_{upper}_{what}"
    return _word(environ, own if environ.get(own, "").strip() else f"OTEL_EXPORTER_OTLP_{what}", words, default)


def _word(environ: Mapping[str, str], name: str, words: tuple[str, ...], default: str) -> str:
    given = environ.get(name, "").strip().lower()
    if given and given not in words:
        raise BadVariable(f"{name} must be {' or '.join(words)}")
    return given or default


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    given = environ.get(name, "").strip()
    try:
        number = float(given) if given else default
    except ValueError:
        number = float("nan")
    if not isfinite(number):
        raise BadVariable(f"{name} must be a number")
    return number


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    number = _number(environ, name, default)
    if number < 1 or number != int(number):
        raise BadVariable(f"{name} must be a whole number greater than 0")
    return int(number)
