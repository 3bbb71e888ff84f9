"""The record → spans, after the fact.

Law: one SERVER span per session, one CLIENT span per attempt below it, with the times the record holds and the ids that
were already sent upstream; nothing internal. Names never hold a path, addresses are redacted, `error.type` is the
error code of the metrics. A recovered session is not an error, its failed attempts are. A tunnel is one span.

Spans are plain values here, made whole: there is no sampling left to do and no id to invent, so no tracer is needed,
which would take five times as long. Runs in the export thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from telemetry.names import OTHER_METHOD, RETRY_SCHEDULED, Attribute
from telemetry.record import BAD, NOT_CONNECTED, PHASE_WORDS, Attempt, Errand, Session, Trace
from telemetry.redact import Redactor
from telemetry.sessions import Wall

# Kinds of OTLP.
INTERNAL, SERVER, CLIENT = 1, 2, 3
_GONE = "CLIENT_DISCONNECTED"

Attributes = dict[str, str | int | float | bool]


class SpanEvent(NamedTuple):
    """Something that happened during a span."""

    name: str
    at: int
    attributes: Mapping[str, str | int | float | bool]


class Span(NamedTuple):
    """One span. Times are nanoseconds since 1970; `parent_id` 0 means a root."""

    name: str
    kind: int
    trace_id: int
    span_id: int
    parent_id: int
    parent_is_remote: bool
    tracestate: bytes
    start: int
    end: int
    attributes: Attributes
    failed: bool
    events: tuple[SpanEvent, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """(trace id, span id) of spans elsewhere."""


def span_count(session: Session) -> int:
    """How many spans a session becomes."""
    return 1 if session.method == "CONNECT" else 1 + len(session.attempts)


class Materialiser:
    """Makes the spans of a session."""

    def __init__(self, wall: Wall, redactor: Redactor, known_methods: frozenset[str]) -> None:
        self._wall = wall
        self._redactor = redactor
        self._known = known_methods

    def spans_of(self, session: Session) -> list[Span]:
        trace = session.trace
        if trace is None:
            return []
        if session.method == "CONNECT":
            return [self._tunnel(session, trace)]
        method = session.method if session.method in self._known else OTHER_METHOD
        called = method if method != OTHER_METHOD else "HTTP"
        name = f"{called} {session.operation}" if session.operation else called
        scheme, authority, path, query = self._target(session)
        spans = [self._server(session, trace, name, method, (scheme, authority, path, query))]
        if session.forwarded:
            path, _, query = self._redactor.url(session.forwarded).partition("?")
        sent = path + (f"?{query}" if query else "")
        scheme = session.scheme or scheme
        for number, attempt in enumerate(session.attempts):
            spans.append(self._client(session, trace, number, attempt, name, method, scheme, sent))
        return spans

    # ---- one span ------------------------------------------------------------------------------------------------

    def _server(
        self, session: Session, trace: Trace, name: str, method: str, target: tuple[str, str, str, str]
    ) -> Span:
        attributes = self._of_session(session, trace)
        attributes[Attribute.METHOD] = method
        if method == OTHER_METHOD:
            attributes[Attribute.METHOD_ORIGINAL] = session.method[:32]
        scheme, authority, path, query = target
        attributes[Attribute.URL_PATH] = path
        attributes[Attribute.URL_SCHEME] = scheme
        if query:
            attributes[Attribute.URL_QUERY] = query
        _address(attributes, session.host or authority, Attribute.SERVER_ADDRESS, Attribute.SERVER_PORT)
        errand = session.errand if isinstance(session, Errand) else None
        origin = session.origin
        return self._root(
            name if errand is None else f"{errand} {session.upstream}",
            SERVER if errand is None else INTERNAL,
            session,
            trace,
            attributes,
            self._scheduled(session),
            () if origin is None else ((origin.trace_id, origin.span_id),),
        )

    def _client(
        self,
        session: Session,
        trace: Trace,
        number: int,
        attempt: Attempt,
        name: str,
        method: str,
        scheme: str,
        sent: str,
    ) -> Span:
        endpoint = self._redactor.url(attempt.endpoint)
        attributes: Attributes = {
            Attribute.METHOD: method,
            Attribute.URL_FULL: (endpoint if "://" in endpoint else f"{scheme}://{endpoint}") + sent,
            Attribute.UPSTREAM: attempt.upstream or session.upstream,
            Attribute.POLICY: attempt.policy_id,
            Attribute.BREAKER_STATE: attempt.breaker,
            Attribute.SEND_PHASE: PHASE_WORDS[attempt.phase],
            Attribute.ATTEMPT_KIND: attempt.kind,
        }
        _address(attributes, endpoint.rpartition("://")[2], Attribute.SERVER_ADDRESS, Attribute.SERVER_PORT)
        _peer(attributes, attempt)
        if attempt.phase != NOT_CONNECTED:
            attributes[Attribute.PROTOCOL_VERSION] = "1.1"
        if attempt.status:
            attributes[Attribute.STATUS] = attempt.status
        if number:
            attributes[Attribute.RESEND_COUNT] = number
            attributes[Attribute.RETRY_REASON] = session.attempts[number - 1].code or attempt.kind
            attributes[Attribute.RETRY_BACKOFF] = round(attempt.delay, 6)
        failed = attempt.code is not None and attempt.code != _GONE
        if attempt.code is not None and failed:
            attributes[Attribute.ERROR_TYPE] = attempt.code
        return Span(
            name,
            CLIENT,
            trace.trace_id,
            attempt.span_id,
            trace.span_id,
            False,
            trace.tracestate,
            self._nanoseconds(attempt.started),
            self._nanoseconds(max(attempt.ended, attempt.started)),
            attributes,
            failed,
        )

    def _tunnel(self, session: Session, trace: Trace) -> Span:
        attributes = self._of_session(session, trace)
        attributes[Attribute.METHOD] = "CONNECT"
        attributes[Attribute.TUNNEL_SENT] = session.request_bytes
        attributes[Attribute.TUNNEL_RECEIVED] = session.response_bytes
        _address(attributes, self._redactor.url(session.target), Attribute.SERVER_ADDRESS, Attribute.SERVER_PORT)
        if session.attempts:
            attempt = session.attempts[-1]
            attributes[Attribute.TUNNEL_CONNECT] = round(attempt.ended - attempt.started, 6)
            _peer(attributes, attempt)
        return self._root("CONNECT", SERVER, session, trace, attributes)

    def _root(
        self,
        name: str,
        kind: int,
        session: Session,
        trace: Trace,
        attributes: Attributes,
        events: tuple[SpanEvent, ...] = (),
        links: tuple[tuple[int, int], ...] = (),
    ) -> Span:
        return Span(
            name,
            kind,
            trace.trace_id,
            trace.span_id,
            trace.parent_id,
            trace.parent_id != 0,
            trace.tracestate,
            self._nanoseconds(session.started),
            self._nanoseconds(session.ended),
            attributes,
            is_error(session),
            events,
            links,
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
        if session.route:
            attributes[Attribute.ROUTE] = session.route
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

    def _scheduled(self, session: Session) -> tuple[SpanEvent, ...]:
        events = []
        for attempt in session.attempts:
            decision = attempt.decision
            if decision is not None and decision.delay is not None:
                attributes: Attributes = {
                    Attribute.REASON: decision.reason,
                    Attribute.DELAY: round(decision.delay, 6),
                }
                events.append(SpanEvent(RETRY_SCHEDULED, self._nanoseconds(attempt.ended), attributes))
        return tuple(events)


def is_error(session: Session) -> bool:
    """Whether the SERVER span is one: what the app saw as a failure of the server side."""
    if session.outcome == "cancelled":
        return False
    if session.outcome in ("failed_streaming", "internal") or session.status >= 500:
        return True
    if session.outcome == "tunnelled":
        return session.code is not None  # it was opened with a 200, and broke
    return session.outcome in BAD and session.status < 400


def _address(attributes: Attributes, authority: str, host_name: str, port_name: str) -> None:
    authority = authority.rpartition("@")[2]
    host, colon, port = authority.rpartition(":")
    if not (colon and port.isdigit()) or (":" in host and not host.endswith("]")):  # or an IPv6 address alone
        host, port = authority, ""
    if host:
        attributes[host_name] = host.strip("[]")
    if port:
        attributes[port_name] = int(port)


def _peer(attributes: Attributes, attempt: Attempt) -> None:
    """Who was connected to. The record may hold the address alone; the port is then that of the endpoint, or proxy."""
    if attempt.address:
        _address(attributes, attempt.address, Attribute.PEER_ADDRESS, Attribute.PEER_PORT)
        port = (attempt.egress_proxy or attempt.endpoint).rpartition(":")[2]
        if port.isdigit():
            attributes.setdefault(Attribute.PEER_PORT, int(port))
