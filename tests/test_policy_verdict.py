"""What the upstream says about trying again, hostile words included."""

import pytest

from sidecar.policy.verdict import LONGEST_WAIT, Fields, fields_of, http_date, retry_after, server_verdict

NOW = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([], None),
        ([(b"x-should-retry", b"true")], True),
        ([(b"X-Should-Retry", b" False ")], False),
        ([(b"stripe-should-retry", b"TRUE")], True),
        ([(b"Stripe-Should-Retry", b"false")], False),
        ([(b"x-should-retry", b"maybe")], None),
        ([(b"x-should-retry", b"")], None),
        ([(b"x-should-retry", b"1")], None),
        ([(b"x-should-retry", b"\xff\xfe")], None),
        ([(b"x-should-retry", b"true"), (b"stripe-should-retry", b"false")], False),
        ([(b"x-should-retry", b"nonsense"), (b"x-should-retry", b"true")], True),
    ],
)
def test_the_servers_verdict(fields: Fields, expected: bool | None) -> None:
    assert expected is server_verdict(fields)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"0", 0.0),
        (b"7", 7.0),
        (b" 7\t", 7.0),
        (b"1.5", 1.5),
        (b".5", 0.5),
        (b"3.", 3.0),
        (b"007", 7.0),
        (b"99999999999", LONGEST_WAIT),
        (b"9" * 60_000, LONGEST_WAIT),
        (b"0." + b"0" * 5000 + b"1", 0.0),
    ],
)
def test_retry_after_in_seconds(value: bytes, expected: float) -> None:
    assert expected == retry_after([(b"Retry-After", value)], NOW)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b" ", b"-1", b"+5", b"-0.5", b"nan", b"NaN", b"inf", b"-inf", b"Infinity", b"1e3", b"1e309", b"0x10"),
        *(b"1_000", b"1,5", b"5, 7", b"5 seconds", b"soon", b".", b"..", b"1.2.3", b"\x00", b"\xff\xfe", b"5\r\n6"),
        *("\N{ARABIC-INDIC DIGIT FIVE}".encode(), "５".encode(), b"\xb2"),
        *(b"Sun, 06 Nov 1994", b"Sun, 6 Nov 1994 08:49:37 GMT", b"Sun, 06 Nov 1994 08:49:37 CET"),
        *(b"Sun, 06 Xyz 1994 08:49:37 GMT", b"Thu, 31 Feb 2000 00:00:00 GMT", b"Sun, 06 Nov 1994 25:00:00 GMT"),
        *(b"Sun, 00 Nov 1994 08:49:37 GMT", b"Sun, 06 Nov 0000 08:49:37 GMT", b"1994-11-06T08:49:37Z"),
        *(b"Sun, 06 Nov 19940 08:49:37 GMT", b"Sun Nov 66 08:49:37 1994", b"A" * 100_000),
    ],
)
def test_a_retry_after_that_cannot_be_read_is_as_if_it_were_not_there(value: bytes) -> None:
    assert retry_after([(b"retry-after", value)], NOW) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"Sun, 06 Nov 1994 08:50:07 GMT", 30.0),
        (b"Sunday, 06-Nov-94 08:50:07 GMT", 30.0),
        (b"Sun Nov  6 08:50:07 1994", 30.0),
        (b"Sun Nov 06 08:50:07 1994", 30.0),
        (b"Sat, 05 Nov 1994 08:50:07 GMT", 0.0),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_WAIT),
        (b"Mon, 01 Jan 0001 00:00:00 GMT", 0.0),
        (b"Sun, 06 Nov 1994 08:49:60 GMT", 22.0),
    ],
)
def test_retry_after_as_a_date_in_all_three_formats(value: bytes, expected: float) -> None:
    assert expected == retry_after([(b"retry-after", value)], NOW)


def test_a_date_is_measured_against_the_answers_own_clock() -> None:
    fields = [(b"Date", b"Sun, 06 Nov 1994 10:00:00 GMT"), (b"Retry-After", b"Sun, 06 Nov 1994 10:00:20 GMT")]
    assert 20.0 == retry_after(fields, NOW)


def test_a_date_is_measured_against_our_clock_when_the_answer_has_none_to_read() -> None:
    fields = [(b"date", b"yesterday"), (b"retry-after", b"Sun, 06 Nov 1994 08:49:57 GMT")]
    assert 20.0 == retry_after(fields, NOW)


def test_milliseconds_are_the_more_exact_wish() -> None:
    assert 0.25 == retry_after([(b"retry-after", b"1"), (b"Retry-After-Ms", b"250")], NOW)
    assert 0.0005 == retry_after([(b"retry-after-ms", b"0.5")], NOW)
    assert LONGEST_WAIT == retry_after([(b"retry-after-ms", b"9" * 400)], NOW)


def test_seconds_stand_in_for_milliseconds_that_cannot_be_read() -> None:
    assert 2.0 == retry_after([(b"retry-after-ms", b"-3"), (b"retry-after", b"2")], NOW)


def test_of_several_the_first_that_can_be_read_counts() -> None:
    assert 4.0 == retry_after([(b"retry-after", b"soon"), (b"retry-after", b"4"), (b"retry-after", b"9")], NOW)


def test_no_header_no_wait() -> None:
    assert retry_after([(b"content-type", b"text/plain")], NOW) is None


@pytest.mark.parametrize(("year", "expected"), [(b"94", 1994), (b"26", 2026), (b"76", 2076), (b"77", 1977)])
def test_two_digits_of_a_year_mean_the_one_not_far_ahead(year: bytes, expected: int) -> None:
    in_2026 = 1_780_000_000.0
    assert http_date(b"Sun, 06 Nov %d 08:49:37 GMT" % expected, in_2026) == http_date(
        b"Sunday, 06-Nov-%b 08:49:37 GMT" % year, in_2026
    )


def test_lines_become_fields() -> None:
    assert [(b"Retry-After", b"5"), (b"x", b"a: b"), (b"empty", b"")] == fields_of(
        [b"Retry-After: 5", b"x: a: b ", b"empty:"]
    )
