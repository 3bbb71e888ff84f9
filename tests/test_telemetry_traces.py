"""The trace of a request: what comes in, what goes out, what is decided. No SDK, no clock, known ids."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.record import Attempt
from telemetry.traces import Sampler, Traces, checked_state, parse

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


def counting() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def traces(sampler: Sampler | None = None) -> Traces:
    numbers = counting()
    return Traces(lambda bits: next(numbers), sampler)


# ---- forwarding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, GOOD, b"rubbish"])
def test_without_an_exporter_there_is_no_trace_and_headers_stay_as_they_are(header: bytes | None) -> None:
    forwarding = traces()
    assert not forwarding.participating
    assert None is forwarding.begin(header, b"a=b", "participate")


# ---- a parent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("02", False), ("ff", True)])
def test_the_session_joins_the_callers_trace_and_respects_its_flag(flags: str, sampled: bool) -> None:
    trace = traces(Sampler(1.0)).begin(f"00-{TRACE}-{SPAN}-{flags}".encode(), b"vendor=1,other=x", "participate")
    assert trace is not None
    assert (int(TRACE, 16), int(SPAN, 16), sampled) == (trace.trace_id, trace.parent_id, sampled)
    assert sampled == trace.sampled
    assert b"vendor=1,other=x" == trace.tracestate
    assert trace.span_id not in (0, trace.parent_id)


def test_a_sampler_that_is_not_parent_based_decides_by_itself() -> None:
    begun = traces(Sampler(0.0, parent_based=False)).begin(GOOD, None, "participate")
    assert begun is not None
    assert not begun.sampled
    begun = traces(Sampler(1.0, parent_based=False)).begin(f"00-{TRACE}-{SPAN}-00".encode(), None, "participate")
    assert begun is not None
    assert begun.sampled


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert (int(TRACE, 16), int(SPAN, 16), True) == parse(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings".encode())
    assert (int(TRACE, 16), int(SPAN, 16), True) == parse(f"cc-{TRACE}-{SPAN}-01".encode())


BROKEN = [
    b"",
    b"00",
    b"-",
    b"00-" + b"0" * 32 + b"-" + SPAN.encode() + b"-01",  # no trace
    b"00-" + TRACE.encode() + b"-" + b"0" * 16 + b"-01",  # no span
    b"ff-" + TRACE.encode() + b"-" + SPAN.encode() + b"-01",  # the version that is never valid
    GOOD.upper(),
    GOOD.replace(b"00-4", b"0-4"),
    GOOD[:-1],
    GOOD + b"1",
    GOOD + b"-",
    GOOD + b"-more",  # version 00 has exactly four parts
    GOOD + b" ",
    b" " + GOOD,
    GOOD + b"\n",
    GOOD.replace(b"-", b"_"),
    GOOD.replace(b"4bf", b"4_f"),
    GOOD.replace(b"4bf", b"+bf"),
    GOOD.replace(b"4bf", b"gbf"),
    GOOD.replace(b"4bf", b"\x00bf"),
    GOOD.replace(b"4bf", b"\xff\xfe\xfd"),
    GOOD + b"," + GOOD,  # two fields of one name
    b"cc-" + TRACE.encode() + b"-" + SPAN.encode() + b"-01x",
    b"00-" + TRACE.encode() + b"-" + SPAN.encode() + b"-zz",
    b"{" + GOOD + b"}",
    b"a" * 100_000,
]


@pytest.mark.parametrize("header", BROKEN)
def test_a_broken_traceparent_starts_a_new_trace_and_its_tracestate_stays_behind(header: bytes) -> None:
    assert None is parse(header)
    begun = traces(Sampler(1.0)).begin(header, b"vendor=1", "participate")
    assert begun is not None
    assert (1, 2, 0, True, b"") == begun


@given(st.binary(max_size=80))
def test_no_header_whatever_its_bytes_raises_or_gives_a_zero_id(header: bytes) -> None:
    begun = traces(Sampler(0.5)).begin(header, header, "participate")
    assert begun is not None
    assert begun.trace_id and begun.span_id


# ---- tracestate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_state", "passed_on"),
    [
        (b"a=1", b"a=1"),
        (b"a=1,b=2", b"a=1,b=2"),
        (b" a=1 , b=2\t", b"a=1,b=2"),
        (b"a=1,,b=2", b"a=1,b=2"),
        (b"tenant@vendor=x", b"tenant@vendor=x"),
        (b"0tenant@vendor=x", b"0tenant@vendor=x"),
        (b"a=with spaces inside", b"a=with spaces inside"),
        (",".join(f"k{n}=v" for n in range(32)).encode(), ",".join(f"k{n}=v" for n in range(32)).encode()),
    ],
)
def test_a_good_tracestate_is_passed_on(given_state: bytes, passed_on: bytes) -> None:
    assert passed_on == checked_state(given_state)


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b",",
        b"a",
        b"=1",
        b"a=",
        b"A=1",
        b"0a=1",
        b"a=1=2",
        b"a=1,a=2",
        b"a=\x00",
        b"a=\xc3\xa9",
        b"a=1\r\nx: y",
        b"a b=1",
        b"a@=1",
        b"@b=1",
        b"a=" + b"v" * 257,
        b"k" * 257 + b"=1",
        ",".join(f"k{n}=v" for n in range(33)).encode(),
        b"a=" + b"v," * 5000,
    ],
)
def test_a_broken_tracestate_is_dropped_whole_and_the_trace_is_kept(state: bytes) -> None:
    assert b"" == checked_state(state)
    begun = traces(Sampler(1.0)).begin(GOOD, state, "participate")
    assert begun is not None
    assert (int(TRACE, 16), b"") == (begun.trace_id, begun.tracestate)


# ---- what goes upstream ------------------------------------------------------------------------------------------


def test_each_attempt_gets_a_span_id_of_its_own_in_a_header_of_55_bytes() -> None:
    begun = traces(Sampler(1.0))
    trace = begun.begin(GOOD, None, "participate")
    assert trace is not None
    first, second = Attempt("first", "a", 0.0), Attempt("retry", "a", 0.0)
    headers = [begun.header(trace, first), begun.header(trace, second)]
    assert [55, 55] == list(map(len, headers))
    assert 2 == len({first.span_id, second.span_id, trace.span_id} - {trace.span_id})
    for header, attempt in zip(headers, (first, second), strict=True):
        assert (trace.trace_id, attempt.span_id, True) == parse(header)


def test_an_unsampled_trace_says_so_upstream() -> None:
    begun = traces(Sampler(0.0))
    trace = begun.begin(None, None, "participate")
    assert trace is not None
    assert begun.header(trace, Attempt("first", "a", 0.0)).endswith(b"-00")


# ---- head sampling -----------------------------------------------------------------------------------------------


def test_a_ratio_samples_about_that_share_and_the_same_trace_always_the_same() -> None:
    source = random.Random(7)
    ids = [source.getrandbits(128) for _ in range(20_000)]
    sampler = Sampler(0.25)
    kept = [trace_id for trace_id in ids if sampler.samples(trace_id)]
    assert 4_700 < len(kept) < 5_300
    assert kept == [trace_id for trace_id in ids if sampler.samples(trace_id)]
    assert len(ids) == sum(map(Sampler(1.0).samples, ids))
    assert 0 == sum(map(Sampler(0.0).samples, ids))


def test_the_ratio_agrees_with_the_sdks() -> None:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    source = random.Random(8)
    for ratio in (0.001, 0.01, 0.3, 0.999):
        ours, theirs = Sampler(ratio), TraceIdRatioBased(ratio)
        for _ in range(500):
            trace_id = source.getrandbits(128)
            assert theirs.should_sample(None, trace_id, "").decision.is_sampled() == ours.samples(trace_id)


def test_ids_are_never_zero() -> None:
    begun = Traces(lambda bits: 0, Sampler(1.0))
    trace = begun.begin(None, None, "participate")
    assert trace is not None
    assert trace.trace_id and trace.span_id and begun.new_span_id()
