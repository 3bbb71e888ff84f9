"""Encoded spans on their way to a collector: OTLP over gRPC or HTTP.

Law: what is sent are the bytes of one ExportTraceServiceRequest, as `protobuf.py` made them; nothing decodes or encodes
them again, which is why this is not the exporter of OpenTelemetry's SDK. What a collector may take a moment later
(RFC 9110's 429, 502, 503, 504; the codes of gRPC that the protocol calls retryable) is sent again until the time for
one export is up. Runs in the courier's thread. No connection goes through a proxy: telemetry would otherwise go
through the sidecar itself.
"""

from __future__ import annotations

import gzip
import threading
import time
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from telemetry.otel_settings import Destination

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_FIRST_WAIT = 1.0
_MAY_PASS = frozenset({429, 502, 503, 504})
_MAY_PASS_GRPC = frozenset(
    "CANCELLED DEADLINE_EXCEEDED RESOURCE_EXHAUSTED ABORTED OUT_OF_RANGE UNAVAILABLE DATA_LOSS".split()
)


class Result(Enum):
    """As exporters of the SDK call it."""

    SUCCESS = 0
    FAILURE = 1


class Undelivered(Exception):
    """The collector did not take it. `passes`: it may take it later; `wait`: it said when, in seconds."""

    def __init__(self, message: str, *, passes: bool, wait: float | None = None) -> None:
        super().__init__(message)
        self.passes = passes
        self.wait = wait


class Transport(Protocol):
    """One way to a collector."""

    def send(self, request: bytes, timeout: float) -> None:
        """Raises Undelivered."""

    def close(self) -> None:
        """What is under way may be cut off."""


class SpanExporter:
    """Sends requests, again where that may help."""

    def __init__(self, destination: Destination, agent: str) -> None:
        self._transport: Transport = (
            GrpcTransport(destination, agent) if destination.protocol == "grpc" else HttpTransport(destination, agent)
        )
        self._timeout = destination.timeout
        self._ending = threading.Event()

    def export(self, request: bytes) -> Result:
        """Raises Undelivered with the last reason."""
        ends, wait = time.monotonic() + self._timeout, _FIRST_WAIT
        while True:
            try:
                self._transport.send(request, ends - time.monotonic())
                return Result.SUCCESS
            except Undelivered as failed:
                pause = wait if failed.wait is None else failed.wait
                if not failed.passes or time.monotonic() + pause >= ends or self._ending.wait(pause):
                    raise
            wait *= 2

    def shutdown(self) -> None:
        self._ending.set()
        self._transport.close()


class GrpcTransport:
    """A channel without messages: bytes in, bytes out."""

    def __init__(self, destination: Destination, agent: str) -> None:
        import grpc  # type: ignore[import-untyped]  # its stubs would be one more package for one name

        where = urlsplit(destination.endpoint)
        options = (("grpc.primary_user_agent", agent), ("grpc.enable_http_proxy", 0))
        compression = grpc.Compression.Gzip if destination.compression == "gzip" else None
        if where.scheme == "https":
            credentials = grpc.ssl_channel_credentials(
                *(_read(path) for path in (destination.ca_file, destination.key_file, destination.certificate_file))
            )
            self._connect = partial(grpc.secure_channel, where.netloc, credentials, options, compression)
        else:
            self._connect = partial(grpc.insecure_channel, where.netloc, options, compression)
        self._metadata = tuple(destination.headers.items())
        self._failure = grpc.RpcError
        self._endpoint = destination.endpoint
        self._channel = self._connect()

    def send(self, request: bytes, timeout: float) -> None:
        call = self._channel.unary_unary(_METHOD)  # no serialisers: bytes as they are
        try:
            call(request, timeout=timeout, metadata=self._metadata)
        except self._failure as error:
            failed: Any = error
            code = failed.code().name
            if code == "UNAVAILABLE":
                # A channel that could not connect waits for up to two minutes before it tries again; a new one does not
                self._channel.close()
                self._channel = self._connect()
            told = f"{self._endpoint} answered {code}: {failed.details()}"
            raise Undelivered(told, passes=code in _MAY_PASS_GRPC) from None
        except ValueError as error:  # the channel was closed: it is the end
            raise Undelivered(str(error), passes=False) from None

    def close(self) -> None:
        self._channel.close()


class HttpTransport:
    """POST, over one kept connection."""

    def __init__(self, destination: Destination, agent: str) -> None:
        import requests

        self._session = requests.Session()
        self._session.trust_env = False
        self._session.verify = destination.ca_file or True
        if destination.certificate_file is not None:
            own, key = destination.certificate_file, destination.key_file
            self._session.cert = own if key is None else (own, key)
        self._session.headers.update(
            {"User-Agent": agent, **destination.headers, "Content-Type": "application/x-protobuf"}
        )
        self._gzip = destination.compression == "gzip"
        if self._gzip:
            self._session.headers["Content-Encoding"] = "gzip"
        self._failure = requests.RequestException
        self._endpoint = destination.endpoint

    def send(self, request: bytes, timeout: float) -> None:
        data = gzip.compress(request) if self._gzip else request
        try:
            answer = self._session.post(self._endpoint, data, timeout=timeout, allow_redirects=False)
        except self._failure as error:
            raise Undelivered(f"{self._endpoint} could not be asked: {error}", passes=True) from None
        if not 200 <= answer.status_code < 300:
            told = f"{self._endpoint} answered {answer.status_code} {answer.reason}"
            after = answer.headers.get("Retry-After", "")
            wait = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else None
            raise Undelivered(told, passes=answer.status_code in _MAY_PASS, wait=wait)

    def close(self) -> None:
        self._session.close()


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
