"""What the app gets from the sidecar itself: the error shape, as bytes ready to be written.

Law: one place knows the shape. Every error has a code from the registry, a sentence for a person, the request's
id and a link to the page that explains the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import orjson

from config.errors import ErrorCode
from sidecar import clock
from telemetry.timestamps import rfc3339


def _status_lines() -> dict[int, bytes]:
    named = {status.value: status.phrase for status in HTTPStatus}
    named |= {413: "Content Too Large", 422: "Unprocessable Content", 499: "Client Closed Request"}
    return {code: b"HTTP/1.1 %d %b\r\n" % (code, phrase.encode()) for code, phrase in named.items()}


STATUS_LINES = _status_lines()
_CONTROL = bytes({*range(0x20), 0x7F} - {0x09})
_REASONS = {code: line[13:-2] for code, line in STATUS_LINES.items()}


def status_line(status: int, reason: bytes) -> bytes:
    """The upstream's own reason phrase, from the table when it is the usual one, or when its own has bytes that do not
    belong there (RFC 9112, 4): control characters, which llhttp lets through, do things to terminals and logs."""
    usual = _REASONS.get(status)
    if usual == reason:
        return STATUS_LINES[status]
    if reason.translate(None, _CONTROL) != reason:
        reason = usual or b""
    return b"HTTP/1.1 %d %b\r\n" % (status, reason)


class Answers:
    """Builds error answers. `documentation` is where the pages of the error codes are served."""

    def __init__(self, documentation: str, registry: Mapping[str, ErrorCode]) -> None:
        self.documentation = documentation
        self.registry = registry

    def error(
        self,
        code: str,
        message: str,
        *,
        request_id: str,
        wall: float,
        details: Mapping[str, object],
        trace_id: str | None = None,
        status: int | None = None,
        retry_after: int | None = None,
        lines: bytes = b"",
        close: bool = False,
        without_body: bool = False,
        registry: Mapping[str, ErrorCode] | None = None,
    ) -> tuple[int, bytes]:
        """The status and the whole answer. `registry`: the one that the request began with, if it is another."""
        entry = (registry or self.registry)[code]
        shown = status or entry.status
        body = orjson.dumps(
            {
                "error_code": code,
                "message": message,
                "details": details,
                "request_id": request_id,
                "trace_id": trace_id,
                "timestamp": rfc3339(wall),
                "retry_after": retry_after,
                "documentation_url": f"{self.documentation}/errors/{code}",
            }
        )
        head = [
            STATUS_LINES.get(shown) or b"HTTP/1.1 %d \r\n" % shown,
            b"Content-Type: application/json\r\nContent-Length: %d\r\nDate: %b\r\n"
            % (len(body), clock.http_date(wall)),
            lines,
        ]
        if shown == 407:
            head.append(b'Proxy-Authenticate: Basic realm="sidecar", charset="UTF-8"\r\n')
        if retry_after is not None:
            head.append(b"Retry-After: %d\r\n" % retry_after)
        if close:
            head.append(b"Connection: close\r\n")
        head.append(b"\r\n")
        if not without_body:
            head.append(body)
        return shown, b"".join(head)
