"""The record → OpenTelemetry spans, after the fact.

Law: one SERVER span per session, one CLIENT span per attempt below it, with the times the record holds and the ids that
were already sent upstream; nothing internal. Names never hold a path, addresses are redacted, `error.type` is the
error code of the metrics. A recovered session is not an error, its failed attempts are. A tunnel is one span.

The spans are built as finished objects, not through a tracer: there is no sampling left to do and no id to invent,
and a tracer takes five times as long. Runs in the export thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from telemetry.names import OTHER_METHOD, RETRY_SCHEDULED, Attribute
from telemetry.record import BAD, PHASE_WORDS, Attempt, Session, Trace
from telemetry.redact import Redactor
from telemetry.sessions import Wall

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_GONE = "CLIENT_DISCONNECTED"

Attributes = dict[str, str | int | float | bool]


def span_count(session: Session) -> int:
    """How many spans a session becomes."""
    return 1 if session.method == "CONNECT" else 1 + len(session.attempts)


class Materialiser:
    """Makes the spans of a session."""

    def __init__(
        self, resource: Mapping[str, str], version: str, wall: Wall, redactor: Redactor, known_methods: frozenset[str]
    ) -> None:
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("sidecar", version)
        self._wall = wall
        self._redactor = redactor
        self._known = known_methods

    def spans_of(self, session: Session) -> list[ReadableSpan]:
        trace = session.trace
        if trace is None:
            return []
        state = _state(trace)
        context = SpanContext(trace.trace_id, trace.span_id, False, _SAMPLED, state)
        method = session.method if session.method in self._known else OTHER_METHOD
        if session.method == "CONNECT":
            return [self._tunnel(session, trace, context)]
        called = method if method != OTHER_METHOD else "HTTP"
        name = f"{called} {session.operation}" if session.operation else called
        spans = [self._server(session, trace, context, name, method)]
        for number, attempt in enumerate(session.attempts):
            own = SpanContext(trace.trace_id, attempt.span_id, False, _SAMPLED, state)
            spans.append(self._client(session, number, attempt, own, context, name, method))
        return spans

    # ---- one span ------------------------------------------------------------------------------------------------

    def _server(self, session: Session, trace: Trace, context: SpanContext, name: str, method: str) -> ReadableSpan:
        attributes = self._of_session(session, trace)
        attributes[Attribute.METHOD] = method
        if method == OTHER_METHOD:
            attributes[Attribute.METHOD_ORIGINAL] = session.method[:32]
        scheme, authority, path, query = self._target(session)
        attributes[Attribute.URL_PATH] = path
        attributes[Attribute.URL_SCHEME] = scheme
        if query:
            attributes[Attribute.URL_QUERY] = query
        _address(attributes, session.host or authority, Attribute.SERVER_ADDRESS, Attribute.SERVER_PORT)
        replaying = any(attempt.kind == "replay" for attempt in session.attempts)
        return self._span(
            f"replay {session.upstream}" if replaying else name,
            SpanKind.INTERNAL if replaying else SpanKind.SERVER,
            context,
            _parent(trace),
            (session.started, session.ended),
            attributes,
            _ERROR if is_error(session) else _UNSET,
            events=self._scheduled(session),
            links=[] if session.origin is None else [Link(_context_of(session.origin))],
        )

    def _client(
        self,
        session: Session,
        number: int,
        attempt: Attempt,
        context: SpanContext,
        parent: SpanContext,
        name: str,
        method: str,
    ) -> ReadableSpan:
        scheme, _, path, query = self._target(session)
        if session.forwarded:
            path, _, query = self._redactor.url(session.forwarded).partition("?")
        endpoint = self._redactor.url(attempt.endpoint)
        address = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
        attributes: Attributes = {
            Attribute.METHOD: method,
            Attribute.URL_FULL: address + path + (f"?{query}" if query else ""),
            Attribute.PROTOCOL_VERSION: "1.1",
            Attribute.UPSTREAM: session.upstream,
            Attribute.POLICY: attempt.policy_id,
            Attribute.BREAKER_STATE: attempt.breaker,
            Attribute.SEND_PHASE: PHASE_WORDS[attempt.phase],
            Attribute.ATTEMPT_KIND: attempt.kind,
        }
        _address(attributes, endpoint.rpartition("://")[2], Attribute.SERVER_ADDRESS, Attribute.SERVER_PORT)
        if attempt.address:
            _address(attributes, attempt.address, Attribute.PEER_ADDRESS, Attribute.PEER_PORT)
        if attempt.status:
            attributes[Attribute.STATUS] = attempt.status
        if number:
            attributes[Attribute.RESEND_COUNT] = number
            attributes[Attribute.RETRY_REASON] = session.attempts[number - 1].code or attempt.kind
            attributes[Attribute.RETRY_BACKOFF] = round(attempt.delay, 6)
        failed = attempt.code is not None and attempt.code != _GONE
        if attempt.code is not None and failed:
            attributes[Attribute.ERROR_TYPE] = attempt.code
        ended = max(attempt.ended, attempt.started)
        status = _ERROR if failed else _UNSET
        return self._span(name, SpanKind.CLIENT, context, parent, (attempt.started, ended), attributes, status)

    def _tunnel(self, session: Session, trace: Trace, context: SpanContext) -> ReadableSpan:
        attributes = self._of_session(session, trace)
        attributes[Attribute.METHOD] = "CONNECT"
        attributes[Attribute.TUNNEL_SENT] = session.request_bytes
        attributes[Attribute.TUNNEL_RECEIVED] = session.response_bytes
        _address(attributes, self._redactor.url(session.target), Attribute.SERVER_ADDRESS, Attribute.SERVER_PORT)
        if session.attempts:
            attempt = session.attempts[-1]
            attributes[Attribute.TUNNEL_CONNECT] = round(attempt.ended - attempt.started, 6)
            if attempt.address:
                _address(attributes, attempt.address, Attribute.PEER_ADDRESS, Attribute.PEER_PORT)
        status = _ERROR if is_error(session) else _UNSET
        times = (session.started, session.ended)
        return self._span("CONNECT", SpanKind.SERVER, context, _parent(trace), times, attributes, status)

    def _span(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Attributes,
        status: Status,
        *,
        events: list[Event] | None = None,
        links: list[Link] | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=events or (),
            links=links or (),
            kind=kind,
            status=status,
            start_time=self._nanoseconds(times[0]),
            end_time=self._nanoseconds(times[1]),
            instrumentation_scope=self._scope,
        )

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _nanoseconds(self, monotonic: float) -> int:
        return int(self._wall(monotonic) * 1_000_000) * 1_000  # a float of today holds microseconds, not more

    def _of_session(self, session: Session, trace: Trace) -> Attributes:
        attributes: Attributes = {
            Attribute.SESSION_ID: session.session_id.decode(),
            Attribute.SESSION_ATTEMPTS: len(session.attempts),
            Attribute.SESSION_OUTCOME: session.outcome,
            Attribute.UPSTREAM: session.upstream,
            Attribute.POLICY: session.policy_id,
            Attribute.SAMPLING: "head" if trace.sampled else "tail",
        }
        if session.operation:
            attributes[Attribute.OPERATION] = session.operation
        if session.client:
            attributes[Attribute.CLIENT_ADDRESS] = session.client
        if session.user_agent:
            attributes[Attribute.USER_AGENT] = self._redactor.text(session.user_agent)
        if session.status:
            attributes[Attribute.STATUS] = session.status
        if session.dlq_id:
            attributes[Attribute.DLQ_ID] = session.dlq_id
        if session.code and is_error(session):
            attributes[Attribute.ERROR_TYPE] = session.code
        return attributes

    def _target(self, session: Session) -> tuple[str, str, str, str]:
        """(scheme, authority, path, query) of what was asked for, redacted."""
        url, _, query = self._redactor.url(session.target).partition("?")
        scheme, slashes, rest = url.partition("://")
        if slashes:
            authority, slash, path = rest.partition("/")
            path = slash + path or "/"
        else:
            scheme, authority, path = "http", "", url
        return scheme, authority, path, query

    def _scheduled(self, session: Session) -> list[Event]:
        events = []
        for attempt in session.attempts:
            decision = attempt.decision
            if decision is not None and decision.delay is not None:
                attributes: Mapping[str, Any] = {
                    Attribute.REASON: decision.reason,
                    Attribute.DELAY: round(decision.delay, 6),
                }
                events.append(Event(RETRY_SCHEDULED, attributes, self._nanoseconds(attempt.ended)))
        return events


def is_error(session: Session) -> bool:
    """Whether the SERVER span is one: what the app saw as a failure of the server side."""
    if session.outcome == "cancelled":
        return False
    if session.outcome in ("failed_streaming", "internal") or session.status >= 500:
        return True
    return session.outcome in BAD and session.status < 400


def _address(attributes: Attributes, authority: str, host_name: str, port_name: str) -> None:
    host, colon, port = authority.rpartition("@")[2].rpartition(":")
    if not (colon and port.isdigit()):
        host, port = authority, ""
    if host:
        attributes[host_name] = host.strip("[]")
    if port:
        attributes[port_name] = int(port)


def _state(trace: Trace) -> TraceState:
    return TraceState.from_header([trace.tracestate.decode("ascii")]) if trace.tracestate else TraceState()


def _parent(trace: Trace) -> SpanContext | None:
    return SpanContext(trace.trace_id, trace.parent_id, True, _SAMPLED) if trace.parent_id else None


def _context_of(trace: Trace) -> SpanContext:
    return SpanContext(trace.trace_id, trace.span_id, True, _SAMPLED)
