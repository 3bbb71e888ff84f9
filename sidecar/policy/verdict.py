"""What the upstream itself says about trying again: whether, and when.

Law: pure, and hostile values do no harm. A header that cannot be read is as if it were not there; a wait is never
negative, never infinite, and never longer than `LONGEST_WAIT`. Nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

Fields = Sequence[tuple[bytes, bytes]]
"""Header fields as they came: name and value, in any case."""

LONGEST_WAIT = 31_536_000.0
"""A year, in seconds. Policies cut a wait much earlier, but must be handed a number they can add."""

_VERDICTS = {b"true": True, b"false": False}
_NUMBER = re.compile(rb"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_CLOCK = rb"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_DATES = (
    # Sun, 06 Nov 1994 08:49:37 GMT
    re.compile(rb"[A-Za-z]{3}, (?P<day>[0-9]{2}) (?P<month>[A-Za-z]{3}) (?P<year>[0-9]{4}) " + _CLOCK + rb" GMT"),
    # Sunday, 06-Nov-94 08:49:37 GMT
    re.compile(rb"[A-Za-z]{6,9}, (?P<day>[0-9]{2})-(?P<month>[A-Za-z]{3})-(?P<year>[0-9]{2}) " + _CLOCK + rb" GMT"),
    # Sun Nov  6 08:49:37 1994
    re.compile(rb"[A-Za-z]{3} (?P<month>[A-Za-z]{3}) (?P<day>[ 0-9][0-9]) " + _CLOCK + rb" (?P<year>[0-9]{4})"),
)
_MONTHS = {name: number for number, name in enumerate(b"jan feb mar apr may jun jul aug sep oct nov dec".split(), 1)}


def fields_of(lines: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Lines as they are sent (`name: value`) → fields."""
    return [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]


def values(fields: Fields, name: bytes) -> list[bytes]:
    """Every value of this lower-case name, without the spaces around it."""
    return [value.strip(b" \t") for given, value in fields if given.lower() == name]


def server_verdict(fields: Fields) -> bool | None:
    """`x-should-retry` or `stripe-should-retry`: the upstream's own word, or None. Of contradicting ones, no."""
    said = {
        _VERDICTS.get(value.lower())
        for name in (b"x-should-retry", b"stripe-should-retry")
        for value in values(fields, name)
    }
    return False if False in said else (True if True in said else None)


def retry_after(fields: Fields, now_wall: float) -> float | None:
    """How many seconds the upstream asks to wait, or None. `retry-after-ms` is the more exact one and wins; a date is
    measured against the answer's own `Date`, so that the two clocks need not agree."""
    for value in values(fields, b"retry-after-ms"):
        if _NUMBER.fullmatch(value):
            return min(float(value) / 1000.0, LONGEST_WAIT)
    for value in values(fields, b"retry-after"):
        if _NUMBER.fullmatch(value):
            return min(float(value), LONGEST_WAIT)
        until = http_date(value, now_wall)
        if until is not None:
            return min(max(until - _sent_at(fields, now_wall), 0.0), LONGEST_WAIT)
    return None


def _sent_at(fields: Fields, now_wall: float) -> float:
    """When the answer was made, by the clock of who made it; by ours when it does not say."""
    for value in values(fields, b"date"):
        date = http_date(value, now_wall)
        if date is not None:
            return date
    return now_wall


def http_date(text: bytes, now_wall: float) -> float | None:
    """A date in one of HTTP's three formats → seconds since 1970, or None."""
    for form in _DATES:
        found = form.fullmatch(text)
        if found is None:
            continue
        month = _MONTHS.get(found["month"].lower())
        if month is None:
            return None
        year = int(found["year"])
        if len(found["year"]) == 2:
            year = _full_year(year, now_wall)
        try:
            # A leap second is read as the one before it.
            clock = int(found["hour"]), int(found["minute"]), min(int(found["second"]), 59)
            return datetime(year, month, int(found["day"]), *clock, tzinfo=UTC).timestamp()
        except ValueError:
            return None  # 31 February, 25 o'clock
    return None


def _full_year(two_digits: int, now_wall: float) -> int:
    """A year that seems to lie more than 50 years ahead is the last one that ended so (RFC 9110, 5.6.7)."""
    this_year = datetime.fromtimestamp(now_wall, UTC).year
    year = this_year - this_year % 100 + two_digits
    return year - 100 if year > this_year + 50 else year
