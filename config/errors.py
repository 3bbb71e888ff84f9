"""The registry of error codes: `errors.yaml` as checked, immutable data.

Law: a code means the same everywhere it is shown, so it is written down once, in the data file, and this module
adds nothing to it but what the user's configuration says. A registry with a hole in it is refused as a whole: that
is a broken installation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import yaml

from config.codes import Category, ErrorCodeEntry, Retry, Severity

if TYPE_CHECKING:
    from config.model import Settings

NEEDED_FOR_A_NEW_CODE = ("category", "retry", "description")

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times faster, where it was built


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One way a call can go wrong."""

    code: str
    category: Category
    severity: Severity
    retry: Retry
    status: int
    """What the application gets when there is no answer of the upstream to pass on."""
    description: str
    causes: tuple[str, ...]
    resolution: str
    """What to do next, with a command where there is one."""
    examples: tuple[str, ...]
    """What it looks like on the wire."""
    related: tuple[str, ...]
    policy: str | None
    """The policy that follows on it where nobody chose another."""


class BrokenRegistry(Exception):
    """The data file of the error codes is not as it was shipped."""


@functools.cache
def registry() -> Mapping[str, ErrorCode]:
    """Every known code, by its name, read once."""
    return parse_registry(Path(__file__).with_name("errors.yaml").read_text(encoding="utf-8"))


def registry_of(settings: Settings) -> Mapping[str, ErrorCode]:
    """The built-in codes with the configuration's additions and changes. Made anew each time: keep it."""
    if not settings.error_codes:
        return registry()
    merged = dict(registry())
    for code, entry in settings.error_codes.items():
        given = {key: getattr(entry, key) for key in ErrorCodeEntry.model_fields if getattr(entry, key) is not None}
        merged[code] = replace(merged.get(code) or _new_code(code), **given)
    return MappingProxyType(merged)


def _new_code(code: str) -> ErrorCode:
    return ErrorCode(
        code=code,
        category="PERMANENT",
        severity="medium",
        retry="fatal",
        status=502,
        description="",
        causes=(),
        resolution="Look the code up in the documentation of the upstream that it was made for.",
        examples=(),
        related=(),
        policy=None,
    )


def parse_registry(text: str) -> Mapping[str, ErrorCode]:
    """The codes in a registry's text; raises BrokenRegistry with everything that is wrong with it."""
    # Safe: both candidates for the loader construct plain values only.
    try:
        given = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise BrokenRegistry(f"config/errors.yaml is not valid YAML; install the sidecar again: {error}") from None
    if not isinstance(given, dict):
        raise BrokenRegistry("config/errors.yaml holds no error codes; install the sidecar again")
    problems = [
        f"{code}: {problem}" for code, entry in given.items() for problem in _problems_of(str(code), entry, given)
    ]
    if problems:
        raise BrokenRegistry("config/errors.yaml cannot be used:\n" + "\n".join(problems))
    return MappingProxyType({code: _error_code(code, entry) for code, entry in given.items()})


_KEYS = frozenset(field.name for field in fields(ErrorCode)) - {"code"}
_WORDS = {"category": get_args(Category), "severity": get_args(Severity), "retry": get_args(Retry)}


def _problems_of(code: str, entry: Any, known: Mapping[Any, Any]) -> list[str]:
    """What is wrong with one entry, in words."""
    if not (code.isascii() and code.isupper() and code.replace("_", "").isalnum()):
        return ["a code is written in capitals, digits and underscores"]
    if not isinstance(entry, dict):
        return ["holds no keys; it needs " + ", ".join(sorted(_KEYS))]
    found = [f"`{key}` is missing" for key in sorted(_KEYS - entry.keys())]
    found += [f"`{key}` is not a key of an error code" for key in sorted(map(str, entry.keys() - _KEYS))]
    if found:
        return found
    for key, words in _WORDS.items():
        if entry[key] not in words:
            found.append(f"`{key}` must be one of {', '.join(words)}")
    if type(entry["status"]) is not int or not 400 <= entry["status"] <= 599:
        found.append("`status` must be a number from 400 to 599")
    for key in ("description", "resolution"):
        if not _is_text(entry[key]):
            found.append(f"`{key}` must be text")
    if entry["policy"] is not None and not _is_text(entry["policy"]):
        found.append("`policy` must be the name of a policy, or null")
    lists = {key: entry[key] for key in ("causes", "examples", "related") if _is_list_of_text(entry[key])}
    found += [f"`{key}` must be a list of text" for key in ("causes", "examples", "related") if key not in lists]
    found += [f"`{key}` is empty" for key in ("causes", "examples") if lists.get(key) == []]
    related = lists.get("related", [])
    found += [f"`related` names {other}, which is not a code" for other in related if other not in known]
    if code in related:
        found.append("`related` names the code itself")
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _error_code(code: str, entry: Mapping[str, Any]) -> ErrorCode:
    return ErrorCode(
        code=code,
        category=entry["category"],
        severity=entry["severity"],
        retry=entry["retry"],
        status=entry["status"],
        description=entry["description"],
        causes=tuple(entry["causes"]),
        resolution=entry["resolution"],
        examples=tuple(entry["examples"]),
        related=tuple(entry["related"]),
        policy=entry["policy"],
    )
