"""Spans → the bytes of OTLP's ExportTraceServiceRequest.

Law: fields and numbers are those of opentelemetry-proto, and a test compares every span with the library's own
encoding. By hand, because the library takes 40 µs for a span, holding the interpreter all the while; this takes five
and can be interrupted after each. Attributes repeat from request to request, so their bytes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct

from telemetry.spans import Span, SpanEvent

Value = str | int | float | bool

_FIXED64 = Struct("<Q").pack
_DOUBLE = Struct("<d").pack
_TIMES = Struct("<cQcQ").pack
_MOST_KEPT = 4_096
_LONGEST_KEPT = 128

# Wire types: 0 varint, 1 64 bits, 2 length and bytes, 5 32 bits; a key is number << 3 | type.
_ERROR_STATUS = b"\x7a\x02\x18\x02"  # status { code: ERROR }
_UNSET_STATUS = b"\x7a\x00"
_FLAGS_LOCAL = b"\x85\x01\x00\x01\x00\x00"  # flags: whether the parent is remote is known, and it is not
_FLAGS_REMOTE = b"\x85\x01\x00\x03\x00\x00"
_LINK_FLAGS = b"\x35\x00\x03\x00\x00"


def varint(number: int) -> bytes:
    """A number of at most 64 bits; negative ones as their two's complement."""
    if number < 0:
        number += 1 << 64
    if number < 0x80:
        return _SMALL[number]
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


_SMALL = tuple(bytes((number,)) for number in range(0x80))


def delimited(key: bytes, content: bytes) -> bytes:
    """A field of type 2."""
    length = len(content)
    return key + (_SMALL[length] if length < 0x80 else varint(length)) + content


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return delimited(b"\x0a", value.encode("utf-8", "replace"))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value)
    return b"\x21" + _DOUBLE(value)


def key_value(name: str, value: Value) -> bytes:
    """The content of a KeyValue."""
    return delimited(b"\x0a", name.encode()) + delimited(b"\x12", _any_value(value))


class SpanEncoder:
    """Encodes spans of one resource and scope."""

    def __init__(self, resource: Mapping[str, str], scope: str, version: str) -> None:
        attributes = b"".join(delimited(b"\x0a", key_value(name, value)) for name, value in resource.items())
        self._resource = delimited(b"\x0a", attributes)
        self._scope = delimited(b"\x0a", delimited(b"\x0a", scope.encode()) + delimited(b"\x12", version.encode()))
        self._kept: dict[tuple[str, Value, type], bytes] = {}

    def request(self, spans: Iterable[bytes]) -> bytes:
        """A whole request from encoded spans."""
        scope_spans = self._scope + b"".join(spans)
        return delimited(b"\x0a", self._resource + delimited(b"\x12", scope_spans))

    def span(self, span: Span) -> bytes:
        """One span, as a field of ScopeSpans."""
        parts = [
            b"\x0a\x10" + span.trace_id.to_bytes(16, "big") + b"\x12\x08" + span.span_id.to_bytes(8, "big"),
            delimited(b"\x1a", span.tracestate) if span.tracestate else b"",
            b"\x22\x08" + span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
            delimited(b"\x2a", span.name.encode("utf-8", "replace")),
            b"\x30" + _SMALL[span.kind],
            _TIMES(b"\x39", span.start, b"\x41", span.end),
        ]
        kept = self._kept
        for name, value in span.attributes.items():
            key = (name, value, type(value))  # True, 1 and 1.0 are equal, and three different attributes
            encoded = kept.get(key)
            parts.append(self._attribute(key) if encoded is None else encoded)
        for event in span.events:
            parts.append(delimited(b"\x5a", self._event(event)))
        for trace_id, span_id in span.links:
            link = b"\x0a\x10" + trace_id.to_bytes(16, "big") + b"\x12\x08" + span_id.to_bytes(8, "big") + _LINK_FLAGS
            parts.append(delimited(b"\x6a", link))
        parts.append(_ERROR_STATUS if span.failed else _UNSET_STATUS)
        parts.append(_FLAGS_REMOTE if span.parent_is_remote else _FLAGS_LOCAL)
        return delimited(b"\x12", b"".join(parts))

    def _attribute(self, key: tuple[str, Value, type]) -> bytes:
        name, value, _ = key
        encoded = delimited(b"\x4a", key_value(name, value))
        if len(encoded) < _LONGEST_KEPT:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = encoded
        return encoded

    @staticmethod
    def _event(event: SpanEvent) -> bytes:
        attributes = b"".join(delimited(b"\x1a", key_value(name, value)) for name, value in event.attributes.items())
        return b"\x09" + _FIXED64(event.at) + delimited(b"\x12", event.name.encode()) + attributes
