"""Our encoding of spans is the library's: every span, whatever it holds, is read back as what the library would write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from telemetry.protobuf import SpanEncoder, varint
from telemetry.spans import Span, SpanEvent

RESOURCE = {"service.name": "sidecar", "service.version": "1.2.3"}
KINDS = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER, 3: SpanKind.CLIENT}
SAMPLED = TraceFlags(1)


def theirs(spans: list[Span]) -> Any:
    """The same spans through the SDK's types and the library's encoder."""
    made = []
    for span in spans:
        state = TraceState.from_header([span.tracestate.decode()]) if span.tracestate else TraceState()
        parent = SpanContext(span.trace_id, span.parent_id, span.parent_is_remote, SAMPLED) if span.parent_id else None
        made.append(
            ReadableSpan(
                name=span.name,
                context=SpanContext(span.trace_id, span.span_id, False, SAMPLED, state),
                parent=parent,
                resource=Resource(RESOURCE),
                attributes=span.attributes,
                events=[Event(event.name, event.attributes, event.at) for event in span.events],
                links=[Link(SpanContext(trace_id, span_id, True, SAMPLED)) for trace_id, span_id in span.links],
                kind=KINDS[span.kind],
                status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
                start_time=span.start,
                end_time=span.end,
                instrumentation_scope=InstrumentationScope("sidecar", "1.2.3"),
            )
        )
    return encode_spans(made)


def ours(spans: list[Span]) -> Any:
    encoder = SpanEncoder(RESOURCE, "sidecar", "1.2.3")
    twice = [encoder.request([encoder.span(span) for span in spans]) for _ in range(2)]
    assert twice[0] == twice[1], "what is kept of a first encoding serves the second"
    return ExportTraceServiceRequest.FromString(twice[0])


values = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)
attribute_sets = st.dictionaries(st.text("abc._", min_size=1, max_size=40), values, max_size=8)
ids = st.integers(1, 2**64 - 1)
times = st.integers(1, 2**63)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    parent = draw(st.one_of(st.just(0), ids))
    return Span(
        draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)),
        draw(st.sampled_from(sorted(KINDS))),
        draw(st.integers(1, 2**128 - 1)),
        draw(ids),
        parent,
        bool(parent) and draw(st.booleans()),
        draw(st.sampled_from([b"", b"a=1", b"a=1,b=2"])),
        draw(times),
        draw(times),
        draw(attribute_sets),
        draw(st.booleans()),
        tuple(draw(st.lists(st.builds(SpanEvent, st.text("ev", min_size=1), times, attribute_sets), max_size=2))),
        tuple(draw(st.lists(st.tuples(st.integers(1, 2**128 - 1), ids), max_size=2))),
    )


@settings(deadline=None)
@given(st.lists(spans(), min_size=1, max_size=3))
def test_any_span_is_read_back_as_the_library_would_have_written_it(made: list[Span]) -> None:
    assert theirs(made) == ours(made)


def test_equal_values_of_different_types_stay_different() -> None:
    encoder = SpanEncoder(RESOURCE, "sidecar", "1")
    shown = []
    for value in (1, 1.0, True):
        span = Span("x", 2, 1, 1, 0, False, b"", 1, 2, {"v": value}, False)
        request = ExportTraceServiceRequest.FromString(encoder.request([encoder.span(span)]))
        (attribute,) = request.resource_spans[0].scope_spans[0].spans[0].attributes
        shown.append(attribute.value.WhichOneof("value"))
    assert ["int_value", "double_value", "bool_value"] == shown


def test_what_is_kept_is_bounded() -> None:
    encoder = SpanEncoder(RESOURCE, "sidecar", "1")
    for number in range(10_000):
        encoder.span(Span("x", 2, 1, 1, 0, False, b"", 1, 2, {"id": str(number), "long": "x" * 500}, False))
    assert len(encoder._kept) <= 4_096


def test_text_that_is_no_unicode_is_replaced_and_does_not_lose_the_span() -> None:
    span = Span("\ud800", 2, 1, 1, 0, False, b"", 1, 2, {"v": "\ud800"}, False)
    encoder = SpanEncoder(RESOURCE, "sidecar", "1")
    request = ExportTraceServiceRequest.FromString(encoder.request([encoder.span(span)]))
    assert "?" == request.resource_spans[0].scope_spans[0].spans[0].attributes[0].value.string_value


@pytest.mark.parametrize(
    ("number", "encoded"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (-1, "ffffffffffffffffff01")]
)
def test_numbers_have_as_many_bytes_as_they_need(number: int, encoded: str) -> None:
    assert encoded == varint(number).hex()
