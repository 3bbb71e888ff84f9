"""What an attempt ended with → success, or exactly one error code of the registry.

Law: pure, and nothing an upstream sends makes it raise. In this order: the rules of the upstream, then the global
ones, first match wins; an `error_code` that the registry knows, in a JSON error body; an overload header on a 503;
the status. A body is looked into only when it is there whole and not larger than `LARGEST_JSON`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from config.errors import ErrorCode
from config.rules import ANY_VALUE, Rule, Scalar
from sidecar.policy.verdict import Fields, values

LARGEST_JSON = 1_048_576
"""A longer body is not parsed: it is an answer, not the description of an error."""

_BY_STATUS = {
    400: "VALIDATION_ERROR",
    401: "INVALID_API_KEY",
    403: "INSUFFICIENT_PERMISSIONS",
    404: "NOT_FOUND",
    408: "EXTERNAL_SERVICE_TIMEOUT",
    409: "CONFLICT",
    410: "NOT_FOUND",
    413: "PAYLOAD_TOO_LARGE",
    415: "UNSUPPORTED_CONTENT_TYPE",
    422: "VALIDATION_ERROR",
    429: "RATE_LIMIT_EXCEEDED",
    451: "CONTENT_POLICY",
    501: "NOT_IMPLEMENTED",
    502: "BAD_GATEWAY",
    503: "TEMPORARY_UNAVAILABLE",
    504: "EXTERNAL_SERVICE_TIMEOUT",
    505: "VERSION_NOT_SUPPORTED",
    529: "SERVICE_OVERLOADED",
}
# 4xx statuses that speak of the moment, not of the request: a failure of the upstream, not its verdict.
_TRANSIENT_4XX = frozenset({408, 429})
# 5xx statuses that speak of the request: what the upstream does not do now it will not do at the next attempt either.
_LASTING_5XX = frozenset({501, 505})
# What servers and meshes add to a 503 that means "too much at once". A value of false or 0 says the opposite.
_OVERLOAD_HEADERS = frozenset(
    {b"x-envoy-overloaded", b"x-envoy-local-overloaded", b"x-overloaded", b"x-service-overloaded", b"x-overload"}
)
_SAYS_NO = frozenset({b"false", b"0", b"no"})


def code_of(status: int) -> str | None:
    """By the status alone; None for success. Beyond 599 there are no classes, and an invalid status is treated as a
    server error (RFC 9110, 15)."""
    if status < 400:
        return None
    return _BY_STATUS.get(status) or ("CLIENT_ERROR" if status < 500 else "UPSTREAM_ERROR")


def is_verdict(status: int) -> bool:
    """The upstream understood the request and said no: the caller's business, not a failure."""
    return (400 <= status < 500 and status not in _TRANSIENT_4XX) or status in _LASTING_5XX


class _AnswerRule(NamedTuple):
    """A rule about answers, ready to be asked."""

    statuses: frozenset[int]
    """Empty: every status."""
    headers: tuple[tuple[bytes, bytes | None], ...]
    """Lower-case name and value; None for any value."""
    places: tuple[tuple[tuple[str, ...], tuple[Scalar, ...]], ...]
    code: str

    def may_match(self, status: int) -> bool:
        return not self.statuses or status in self.statuses


class Classifier:
    """The classification of one upstream's attempts. On a healthy answer, and without a rule that could match one,
    nothing here is called: see `needs_fields_for_success`."""

    __slots__ = ("_by_failure", "_known", "_rules", "needs_body_for_success", "needs_fields_for_success")

    def __init__(
        self,
        registry: Mapping[str, ErrorCode],
        upstream_rules: Sequence[Rule] = (),
        global_rules: Sequence[Rule] = (),
    ) -> None:
        self._known = registry
        self._rules: list[_AnswerRule] = []
        self._by_failure: dict[str, str] = {}
        for rule in (*upstream_rules, *global_rules):
            for code in rule.when.exception:
                self._by_failure.setdefault(code, rule.code)
            if not rule.when.exception:
                self._rules.append(_prepared(rule))
        successes = [rule for rule in self._rules if any(map(rule.may_match, range(100, 400)))]
        self.needs_fields_for_success = bool(successes)
        """Whether some rule might call a status below 400 an error: then such answers go through `classify`."""
        self.needs_body_for_success = any(rule.places for rule in successes)
        """Whether such a rule looks into the body."""

    def of_failure(self, code: str) -> str:
        """A network code → the code that a rule gives it, usually itself."""
        return self._by_failure.get(code, code)

    def classify(self, status: int, fields: Fields, body: bytes | None) -> str | None:
        """None is success. `body` is None when the answer is not there whole."""
        document = _Document(body)
        for rule in self._rules:
            if rule.may_match(status) and _headers_match(rule, fields) and _places_match(rule, document):
                return rule.code
        if status < 400:
            return None
        if body and _is_json(fields):
            said = document.at(("error_code",))
            if isinstance(said, str) and said in self._known:
                return said
        if status == 503 and _overloaded(fields):
            return "SERVICE_OVERLOADED"
        return code_of(status)


def _prepared(rule: Rule) -> _AnswerRule:
    when = rule.when
    return _AnswerRule(
        statuses=when.statuses,
        headers=tuple(
            (name.lower().encode(), None if value == ANY_VALUE else value.strip().lower().encode())
            for name, value in when.header.items()
        ),
        places=tuple((tuple(place.split(".")), tuple(wanted)) for place, wanted in when.json.items()),
        code=rule.code,
    )


def _headers_match(rule: _AnswerRule, fields: Fields) -> bool:
    for name, wanted in rule.headers:
        given = values(fields, name)
        if not (given if wanted is None else any(value.lower() == wanted for value in given)):
            return False
    return True


def _places_match(rule: _AnswerRule, document: _Document) -> bool:
    return all(_one_of(document.at(place), wanted) for place, wanted in rule.places)


def _one_of(found: Any, wanted: tuple[Scalar, ...]) -> bool:
    """Text exactly, numbers by value; true is not 1."""
    return any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in wanted)


_NOT_THERE = object()
_PLACE = re.compile(r"[0-9]{1,9}")


class _Document:
    """A body as JSON, parsed when first asked, and at most once."""

    __slots__ = ("_body", "_parsed")

    def __init__(self, body: bytes | None) -> None:
        self._body = body if body is not None and len(body) <= LARGEST_JSON else None
        self._parsed: Any = _NOT_THERE

    def at(self, place: tuple[str, ...]) -> Any:
        """The value at a place: keys, and numbers for places in a list."""
        if self._body is not None:
            try:
                self._parsed = orjson.loads(self._body)
            except ValueError:
                pass  # not JSON, or nested too deeply: then it says nothing
            self._body = None
        found = self._parsed
        for step in place:
            if isinstance(found, dict):
                found = found.get(step, _NOT_THERE)
            elif isinstance(found, list) and _PLACE.fullmatch(step) and int(step) < len(found):
                found = found[int(step)]
            else:
                return _NOT_THERE
        return found


def _is_json(fields: Fields) -> bool:
    for value in values(fields, b"content-type"):
        kind = value.partition(b";")[0].strip().lower()
        if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
            return True
    return False


def _overloaded(fields: Fields) -> bool:
    return any(
        name.lower() in _OVERLOAD_HEADERS and value.strip(b" \t").lower() not in _SAYS_NO for name, value in fields
    )
