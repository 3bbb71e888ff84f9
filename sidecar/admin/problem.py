"""A refusal of the admin port: what is wrong, in which field, and what to do.

Law: one shape for every refusal, the one the app gets from the proxy too; the code is one of the registry, so that
`documentation_url` leads somewhere. Every problem of a request is told at once. Values are shown redacted and short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from config.explain import explain
from config.keys import nearest
from sidecar.durable.trouble import BadInput, Trouble
from telemetry.redact import Redactor

_LONGEST_VALUE = 100


class FieldError(BaseModel):
    """What is wrong with one field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    field: str
    """The query parameter, the part of the path, the header, or the dotted key of the body."""
    value: str | None
    """What was given, redacted and shortened; null when nothing was."""
    constraint: str
    """A word for what it breaks, as in `unknown`, `missing` or `less_than_equal`."""
    message: str
    """The same for a person, with what to write instead."""


class ErrorAnswer(BaseModel):
    """Every answer that is a refusal."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    error_code: str
    """One of `GET /errors`."""
    message: str
    details: Mapping[str, Any]
    """`errors` and `total_errors` when fields are at fault."""
    request_id: str
    timestamp: str
    documentation_url: str
    """The page that explains the code."""


class Problem(Exception):
    """Raised by a handler, answered by the guard."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        errors: Iterable[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.errors = tuple(errors)
        self.headers = headers or {}

    def details(self, redactor: Redactor) -> dict[str, Any]:
        if not self.errors:
            return {}
        shown = [
            error.model_dump() | {"value": None if error.value is None else redactor.text(error.value)}
            for error in self.errors
        ]
        return {"errors": shown, "total_errors": len(shown)}


def unknown(field: str, given: str, known: Iterable[str], what: str, see: str) -> Problem:
    """404: the thing that a name stands for is not there. `see` says where the names are."""
    error = _not_among(field, given, known, f"{what}; see {see}")
    return Problem(404, "NOT_FOUND", error.message, [error])


def wrong(field: str, given: str | None, message: str, constraint: str = "value_error") -> Problem:
    """400 about one field."""
    return invalid([FieldError(field=field, value=shortened(given), constraint=constraint, message=message)])


def wrong_choice(field: str, given: str, known: Iterable[str], message: str) -> Problem:
    """400: not one of the names that are possible here; the nearest is told."""
    return invalid([_not_among(field, given, known, message)])


def invalid(errors: Iterable[FieldError]) -> Problem:
    """400 about several fields at once."""
    found = tuple(errors)
    told = "; ".join(f"{error.field}: {error.message}" for error in found)
    return Problem(400, "VALIDATION_ERROR", told, found)


def from_validation(refused: ValidationError, model: type[BaseModel]) -> Problem:
    """What a model of a query or a body refused."""
    return invalid(_field_error(error, model) for error in refused.errors(include_url=False))


def from_trouble(trouble: Trouble) -> Problem:
    """What the durable layers refused, with their own words on what to do."""
    if isinstance(trouble, BadInput):
        return wrong(trouble.field, None, str(trouble).removeprefix(f"{trouble.field}: "))
    return Problem(trouble.status, trouble.code, str(trouble))


def shortened(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _not_among(field: str, given: str, known: Iterable[str], message: str) -> FieldError:
    return FieldError(
        field=field, value=shortened(given), constraint="unknown", message=message + _suggestion(given, known)
    )


def _suggestion(given: object, known: Iterable[str]) -> str:
    near = nearest(given, known)
    return f'; did you mean "{near}"?' if near is not None else ""


def _field_error(error: ErrorDetails, model: type[BaseModel]) -> FieldError:
    field = ".".join(str(part) for part in error["loc"]) or "body"
    kind = error["type"]
    if kind == "extra_forbidden":
        known = sorted(_inside(model, error["loc"][:-1]))
        offered = f"there is {', '.join(known)}" if known else "nothing may be given here"
        message = f"is not known; {offered}{_suggestion(error['loc'][-1], known)}"
        return FieldError(field=field, value=shortened(error["input"]), constraint="unknown", message=message)
    if kind == "missing":
        return FieldError(field=field, value=None, constraint="missing", message="is required")
    wording = _WORDING.get(kind)
    if wording is not None:
        message = wording(error["input"])
    else:
        told = explain(error)
        message = told.message + (f'; did you mean "{told.nearest}"?' if told.nearest else "")
    return FieldError(field=field, value=shortened(error["input"]), constraint=kind, message=message)


def _inside(model: type[BaseModel], path: tuple[int | str, ...]) -> Iterable[str]:
    """The keys there are where a path leads."""
    for part in path:
        if isinstance(part, str):
            found = model.model_fields.get(part)
            inner = next(filter(_is_model, _kinds(None if found is None else found.annotation)), None)
            if inner is None:
                return ()
            model = inner
    return model.model_fields


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


_WORDING: dict[str, Callable[[Any], str]] = {
    "int_parsing": lambda _: "must be a whole number",
    "model_type": lambda _: 'must be a JSON object, as in {"reason": "…"}',
    "model_attributes_type": lambda _: 'must be a JSON object, as in {"reason": "…"}',
    "string_too_long": lambda given: f"is too long ({len(given)} characters)",
}
