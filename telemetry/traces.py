"""The trace a request belongs to: W3C `traceparent` in and out, ids, head sampling.

Law: nothing here touches OpenTelemetry's SDK. While a request runs, only ids and one flag exist; spans are made
afterwards from the record (telemetry/spans.py). A header that is broken in any way is treated as absent, and so is
the `tracestate` beside it: it never fails a request and never travels on under our ids. Parsed and written by hand,
because the generic propagator costs four times as much.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from telemetry.record import Attempt, Trace

Ids = Callable[[int], int]
"""So many random bits, for example `random.Random(seed).getrandbits`; given in, so that tests know the ids."""

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    rb"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MEMBERS = 32
_LONGEST_STATE = 8_192  # beyond the 512 bytes that must be passed on; more is not a trace state
_SPREAD = 1 << 64


class Sampler:
    """OTEL_TRACES_SAMPLER: which new traces are sampled, and whether a parent's word goes before."""

    __slots__ = ("_bound", "parent_based")

    def __init__(self, ratio: float = 1.0, *, parent_based: bool = True) -> None:
        self._bound = round(ratio * _SPREAD)
        self.parent_based = parent_based

    def samples(self, trace_id: int) -> bool:
        """The same answer for the same trace in every process, as the SDK's ratio sampler gives it."""
        return trace_id & (_SPREAD - 1) < self._bound


class Traces:
    """Begins traces. Without a sampler (no exporter) it does nothing: headers are forwarded as they came."""

    __slots__ = ("_ids", "_sampler", "begin")

    def __init__(self, ids: Ids, sampler: Sampler | None = None) -> None:
        self._ids = ids
        self._sampler = sampler
        self.begin: Callable[[bytes | None, bytes | None, str], Trace | None] = (
            _forward if sampler is None else self._participate
        )

    @property
    def participating(self) -> bool:
        return self._sampler is not None

    def _participate(self, traceparent: bytes | None, tracestate: bytes | None, propagation: str) -> Trace:
        """The trace of a new session: the caller's, when it sent a good header, else a new one.

        Several fields of one name are given joined by commas: two `traceparent`s are then invalid, as they should
        be. `propagation` says what goes upstream and is the caller's business; the session is traced either way.
        """
        sampler, ids = self._sampler, self._ids
        assert sampler is not None
        parent = None if traceparent is None else parse(traceparent)
        if parent is None:
            trace_id = ids(128) or 1
            return Trace(trace_id, ids(64) or 1, 0, sampler.samples(trace_id))
        trace_id, parent_id, flagged = parent
        sampled = flagged if sampler.parent_based else sampler.samples(trace_id)
        state = b"" if tracestate is None else checked_state(tracestate)
        return Trace(trace_id, ids(64) or 1, parent_id, sampled, state)

    def header(self, trace: Trace, attempt: Attempt) -> bytes:
        """The value of `traceparent` for one attempt, which gets its span id here."""
        span_id = attempt.span_id = self._ids(64) or 1
        return b"00-%032x-%016x-%02x" % (trace.trace_id, span_id, trace.sampled)

    def new_span_id(self) -> int:
        return self._ids(64) or 1


def _forward(traceparent: bytes | None, tracestate: bytes | None, propagation: str) -> Trace | None:
    return None


def parse(header: bytes) -> tuple[int, int, bool] | None:
    """(trace id, parent span id, sampled), or None for anything the specification does not allow."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None:
        return None
    version, trace_hex, span_hex, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    trace_id, span_id = int(trace_hex, 16), int(span_hex, 16)
    if not trace_id or not span_id:
        return None
    return trace_id, span_id, bool(int(flags, 16) & 1)


def checked_state(state: bytes) -> bytes:
    """A `tracestate` as it may be passed on; empty when any of it is broken."""
    if len(state) > _LONGEST_STATE:
        return b""
    members = [member for part in state.split(b",") if (member := part.strip(b" \t"))]
    if not members or len(members) > _MEMBERS:
        return b""
    keys = set()
    for member in members:
        if _MEMBER.fullmatch(member) is None:
            return b""
        keys.add(member.partition(b"=")[0])
    return b",".join(members) if len(keys) == len(members) else b""
