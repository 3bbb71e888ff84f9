"""What queries and bodies of the admin port are made of: durations, moments, limits.

Law: a value is taken in the forms a person would write (`15m`, `2026-01-29T12:00:00Z`) and refused with those forms
in the message. Nothing here asks for the time: a moment that is relative stays so until somebody says what now is.
Models are built when they are first used: most processes are never asked most questions.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from config.durations import PATTERN as DURATION
from config.durations import seconds_of
from telemetry.redact import Redactor

_PLUS_LOST = re.compile(r"(.*\d\d:\d\d(?::\d\d(?:\.\d+)?)?) (\d\d:\d\d)")  # `+` in a query is a space

MOST_ITEMS = 1_000


class Query(BaseModel):
    """The parameters of a query; an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


class NoQuery(Query):
    """None are known."""


class Body(BaseModel):
    """A JSON object; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


class NoBody(Body):
    """Nothing is sent."""


class Answer(BaseModel):
    """What is answered. A shape that grows stays compatible, one that loses a key does not."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


class Since(NamedTuple):
    """A moment: `at` in wall time, or `ago` in seconds before now."""

    at: float | None
    ago: float | None

    def wall(self, now: float) -> float:
        return self.at if self.at is not None else now - (self.ago or 0.0)


def without_secrets(text: str, info: ValidationInfo) -> str:
    """What an operator writes, as it may be kept. The context of a validation is the redactor that is in force."""
    redactor = info.context if isinstance(info.context, Redactor) else Redactor()
    return redactor.prose(text)


def _since(given: Any) -> Since:
    if isinstance(given, str):
        text = given.strip()
        duration = DURATION.fullmatch(text)
        if duration is not None and duration[2] is not None:
            return Since(None, seconds_of(text))
        lost = _PLUS_LOST.fullmatch(text)
        try:
            moment = datetime.fromisoformat(f"{lost[1]}+{lost[2]}" if lost is not None else text)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is not None:
            return Since(moment.timestamp(), None)
        if moment is not None:
            raise ValueError("is a time without a zone; add Z for UTC, as in 2026-01-29T12:00:00Z")
    raise ValueError("must say how long ago (15m, 2h, 1d) or when (2026-01-29T12:00:00Z)")


_DURATION_SCHEMA = {
    "anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^{DURATION.pattern}$"}],
    "examples": ["15m", 90],
}
Duration = Annotated[float, BeforeValidator(seconds_of), WithJsonSchema(_DURATION_SCHEMA)]
Moment = Annotated[
    Since, PlainValidator(_since), WithJsonSchema({"type": "string", "examples": ["15m", "2026-01-29T12:00:00Z"]})
]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[int, Field(strict=True)]
Limit = Annotated[int, Field(ge=1, le=MOST_ITEMS)]
Text = Annotated[str, Field(max_length=500)]
Prose = Annotated[str, Field(max_length=500), AfterValidator(without_secrets)]
"""A reason: it is kept, shown and logged, so a secret in it goes nowhere from here."""
BreakerState = Literal["closed", "open", "half_open"]
StateShown = Annotated[str, WithJsonSchema({"enum": list(get_args(BreakerState))})]
