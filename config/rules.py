"""Rules that turn an answer or a failure into an error code.

Plain data. Rules are tried in order, those of the upstream before the global ones, and the first that matches
gives the code. All keys of a `when` must match; the words of each key's documentation are the exact meaning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, PlainValidator, WithJsonSchema, model_validator

from config.fields import CodeName, Section, one_or_many

NetworkCode = Literal[
    "DNS_FAILURE",
    "CONNECTION_REFUSED",
    "CONNECT_TIMEOUT",
    "TLS_FAILURE",
    "CONNECTION_RESET",
    "NETWORK_TIMEOUT",
    "PROTOCOL_ERROR",
]
"""The codes of calls that ended without an answer."""
NETWORK_CODES: tuple[str, ...] = get_args(NetworkCode)

ANY_VALUE = "*"
Scalar = str | int | float | bool | None

_CLASS = re.compile(r"[1-9]xx", re.IGNORECASE)
_JSON_PATH = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _status(given: Any) -> int | str:
    if type(given) is int and 100 <= given <= 999:
        return given
    if isinstance(given, str) and _CLASS.fullmatch(given):
        return given.lower()
    raise ValueError("a status is a number from 100 to 999, or a class of them, as in 5xx")


def _scalar(given: Any) -> Scalar:
    if given is None or isinstance(given, (str, int, float, bool)):
        return given
    raise ValueError("must be text, a number, true, false or null, or a list of these")


def _json_path(text: str) -> str:
    if not _JSON_PATH.fullmatch(text):
        raise ValueError("a place in a JSON body is written as keys joined by dots, as in error.type or errors.0.code")
    return text


def _header(text: str) -> str:
    if not _HEADER_NAME.fullmatch(text):
        raise ValueError("the name of a header has letters, digits and hyphens only, as in retry-after")
    return text.lower()


_Status = Annotated[int | str, PlainValidator(_status)]
_Scalar = Annotated[Scalar, PlainValidator(_scalar)]
_NUMBER_OR_CLASS: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 100, "maximum": 999}, {"type": "string", "pattern": "^[1-9][xX][xX]$"}]
}
_ANY_SCALAR: dict[str, Any] = {"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]}


def _or_list(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*item.get("anyOf", [item]), {"type": "array", "items": item}]}


Statuses = Annotated[tuple[_Status, ...], BeforeValidator(one_or_many), WithJsonSchema(_or_list(_NUMBER_OR_CLASS))]
Scalars = Annotated[tuple[_Scalar, ...], BeforeValidator(one_or_many), WithJsonSchema(_or_list(_ANY_SCALAR))]
NetworkCodes = Annotated[
    tuple[NetworkCode, ...],
    BeforeValidator(one_or_many),
    WithJsonSchema(_or_list({"type": "string", "enum": list(NETWORK_CODES)})),
]

with warnings.catch_warnings():
    # BaseModel has a deprecated method `json`; the key is called so because that is what a user looks for.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class When(Section):
        """What a rule matches. Every key that is given must match, and at least one must be given."""

        status: Statuses = ()
        """The status of the answer: a number, a class such as 5xx, or a list of these, any of which may match. Not
        set: every status, successes too."""
        header: Mapping[Annotated[str, AfterValidator(_header)], str] = {}
        """Headers of the answer, by name, all of which must match. The whole value is compared, without regard to
        case and to spaces around it; `*` matches every value, so it only asks whether the header is there. Of a
        header that is sent several times, one match is enough."""
        json: Mapping[Annotated[str, AfterValidator(_json_path)], Scalars] = {}  # type: ignore[assignment]  # see above
        """Values in the JSON body of the answer, by their place, all of which must match: keys joined by dots, a
        number for a place in a list (`error.type`, `errors.0.code`). Text is compared exactly, numbers by value; of a
        list of values any may match. Looks only into bodies that are complete before they are passed on
        (`limits.buffer_response_bytes`)."""
        exception: NetworkCodes = ()
        """How the call failed when there was no answer: one of the network codes such as CONNECTION_RESET, or a list
        of them. Cannot stand beside the other keys, which need an answer."""

        @model_validator(mode="after")
        def _says_something_that_can_be(self) -> When:
            about_an_answer = bool(self.status or self.header or self.json)
            if self.exception and about_an_answer:
                raise ValueError("`exception` means there was no answer, so the other keys can never match beside it")
            if not self.exception and not about_an_answer:
                raise ValueError("says nothing; give at least one of status, header, json, exception")
            return self

        @property
        def statuses(self) -> frozenset[int]:
            """Every status that matches, classes written out; empty for all. Made anew each time: keep it."""
            found: set[int] = set()
            for status in self.status:
                if isinstance(status, int):
                    found.add(status)
                else:
                    first = int(status[0]) * 100
                    found.update(range(first, first + 100))
            return frozenset(found)


class Rule(Section):
    """One rule of classification: what it matches, and which error code that is."""

    when: When
    code: CodeName
    """The error code, one of the registry or of `error_codes`."""
