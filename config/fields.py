"""The kinds of value a setting can have, and the model every section is made from.

Values are taken strictly: a quoted number or a `yes` where a number belongs is an error, because a value that
is silently converted is a value nobody meant. Every error raised here reads as the end of the sentence
"this setting …", and the loader puts file, line and key in front of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from config.addresses import (
    canonical_bind_host,
    canonical_egress_entry,
    canonical_route,
    parse_endpoint,
    parse_host_entry,
)
from config.durations import PATTERN, setting

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_VERSION = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)")
_CODE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Section(BaseModel):
    """A group of settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _an_emptied_collection_means_its_default(cls, given: Any) -> Any:
        """`egress:` with every line below it commented out arrives as null, and clearly means no change."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or not cls._is_collection(key)}

    @classmethod
    def _is_collection(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is not None and isinstance(
            field.get_default(call_default_factory=True, validated_data={}), (tuple, dict, Section)
        )


def _name(text: str) -> str:
    if text.startswith("_"):
        raise ValueError("a name may not begin with `_`; those are reserved for the sidecar's own")
    if not _NAME.fullmatch(text):
        raise ValueError("a name has 1 to 63 letters, digits, `.`, `_` or `-`, and begins with a letter or digit")
    return text


def _version(given: Any) -> Any:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        raise ValueError('the version is text; write it in quotes, as in "1.0.0"')
    if not isinstance(given, str):
        return given
    match = _VERSION.fullmatch(given)
    if match is None:
        raise ValueError('the version has three numbers, as in "1.0.0"')
    if int(match[1]) != 1:
        raise ValueError("this sidecar reads configuration of version 1; convert the file or use a matching release")
    return given


def _path(given: Any) -> Any:
    if isinstance(given, str) and (given == "" or "\0" in given):
        raise ValueError("a path may not be empty or contain a NUL character")
    return given


def _tls(given: Any) -> Any:
    # YAML 1.1 reads a bare `off` as false and a bare `on` as true.
    if given is False:
        return "off"
    if given is True or given == "on":
        raise ValueError("`on` is not a choice; write `originate` to speak TLS to the upstream, or `off`")
    return given


def _code(text: str) -> str:
    if not _CODE.fullmatch(text):
        raise ValueError("an error code is written in capitals, digits and single underscores, as in CARD_DECLINED")
    return text


def _header_name(text: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise ValueError("the name of a header has letters, digits and hyphens only, as in Idempotency-Key")
    return text


def _method(text: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise ValueError("a method is one word, as in POST")
    return text.upper()


def one_or_many(given: Any) -> Any:
    """A single value stands for a list of one; the model only ever sees lists."""
    return given if isinstance(given, (list, tuple)) else [given]


def _duration(bound: dict[str, float]) -> WithJsonSchema:
    """A number of seconds within the bound, or text with its unit."""
    text = {"type": "string", "pattern": f"^{PATTERN.pattern.removesuffix('?')}$"}
    return WithJsonSchema({"anyOf": [{"type": "number", **bound}, text]})


class _NoOtherNames:
    """For the schema, which would only check the entries whose names fit the pattern."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "additionalProperties": False}


NO_OTHER_NAMES = _NoOtherNames()
Rate = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Seconds = Annotated[
    float, Field(strict=True, gt=0, allow_inf_nan=False), BeforeValidator(setting), _duration({"exclusiveMinimum": 0})
]
Delay = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False), BeforeValidator(setting), _duration({"minimum": 0})
]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Bytes = Annotated[int, Field(strict=True, ge=0)]
Length = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
BindPort = Annotated[int, Field(strict=True, ge=0, le=65535)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
FilePath = Annotated[Path, BeforeValidator(_path, json_schema_input_type=str)]
Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})]
Version = Annotated[
    str, BeforeValidator(_version), WithJsonSchema({"type": "string", "pattern": r"^1\.[0-9]+\.[0-9]+$"})
]
CodeName = Annotated[str, AfterValidator(_code), WithJsonSchema({"type": "string", "pattern": f"^{_CODE.pattern}$"})]
HeaderName = Annotated[
    str, AfterValidator(_header_name), WithJsonSchema({"type": "string", "pattern": f"^{_TOKEN.pattern}$"})
]
Method = Annotated[str, AfterValidator(_method), WithJsonSchema({"type": "string", "pattern": f"^{_TOKEN.pattern}$"})]
BindHost = Annotated[str, AfterValidator(canonical_bind_host)]
HostEntryText = Annotated[str, AfterValidator(lambda text: str(parse_host_entry(text)))]
EndpointText = Annotated[str, AfterValidator(lambda text: str(parse_endpoint(text)))]
EgressEntry = Annotated[str, AfterValidator(canonical_egress_entry)]
Route = Annotated[str, AfterValidator(canonical_route)]
OffInYaml = BeforeValidator(_tls)
