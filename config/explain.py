"""Validation errors in words a person can act on.

Pydantic knows what is wrong; this file says it in the product's language, names the nearest valid key or
choice, and points out where a misplaced key belongs. It never repeats the offending value: showing that,
masked where needed, is `config/problems.py`'s work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

from config.checks import KeyPath
from config.keys import elsewhere, nearest, section_at

_MOST_PLACES = 3
_KEY_ITSELF = "[key]"  # pydantic's last path element when the key of a mapping is wrong, not its value


class Explanation(NamedTuple):
    """One validation error, explained."""

    path: KeyPath
    message: str
    nearest: str | None
    value: Any
    known_key: bool


def explain(error: ErrorDetails) -> Explanation:
    """Put one of pydantic's errors into words."""
    kind, value = error["type"], error["input"]
    path: KeyPath = tuple(part for part in error["loc"] if part != _KEY_ITSELF)
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, value)
    if kind == "missing":
        return Explanation(path, "this key is required here; add it", None, {}, True)
    if kind == "literal_error":
        choices = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(value, choices) if isinstance(value, str) else None
        return Explanation(path, f"must be one of {', '.join(choices)}", near, value, True)
    if kind == "value_error":
        return Explanation(path, str(context.get("error", error["msg"])), None, value, True)
    if value is None:
        return Explanation(path, "has no value; give one, or leave it out", None, {}, True)
    wording = _WORDING.get(kind)
    return Explanation(path, wording(value, context) if wording else error["msg"], None, value, True)


def _unknown_key(path: KeyPath, value: Any) -> Explanation:
    section = section_at(path[:-1])
    near = nearest(path[-1], section.model_fields) if section is not None else None
    message = "unknown key"
    if near is None:
        places = elsewhere(str(path[-1]))
        if places:
            message += f"; it belongs in {' or '.join(f'`{place}`' for place in places[:_MOST_PLACES])}"
        elif section is not None:
            message += f"; the keys here are {', '.join(section.model_fields)}"
    return Explanation(path, message, near, value, False)


def _whole_number(value: Any, _: dict[str, Any]) -> str:
    return "must be a whole number" + _without_quotes(value)


def _number(value: Any, _: dict[str, Any]) -> str:
    return "must be a number" + _without_quotes(value)


def _without_quotes(value: Any) -> str:
    if isinstance(value, str) and value.replace(".", "", 1).isdigit():
        return ", written without quotes"
    if isinstance(value, str) and value[:1].isdigit():
        return ", without a unit (sizes are in bytes)"
    return ""


def _list(value: Any, _: dict[str, Any]) -> str:
    if isinstance(value, str):
        return "must be a list; put the text in brackets, as in [first, second]"
    return "must be a list, as in [first, second]"


def _text(value: Any, _: dict[str, Any]) -> str:
    if isinstance(value, list):
        return "must be text; text that begins with `[` must be in quotes"
    return "must be text" + ("" if isinstance(value, dict) else "; put it in quotes")


def _flag(value: Any, _: dict[str, Any]) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "must be true or false, written without quotes"
    return "must be true or false"


def _mapping(_: Any, __: dict[str, Any]) -> str:
    return "must hold keys of its own, indented below it (`key: value`)"


def _bound(text: str, key: str) -> Callable[[Any, dict[str, Any]], str]:
    def wording(_: Any, context: dict[str, Any]) -> str:
        limit = context.get(key, "")
        return text.format(int(limit) if isinstance(limit, float) and limit.is_integer() else limit)

    return wording


_WORDING: dict[str, Callable[[Any, dict[str, Any]], str]] = {
    "int_type": _whole_number,
    "int_from_float": _whole_number,
    "int_parsing_size": lambda _, __: "is far too large a number",
    "float_type": _number,
    "finite_number": lambda _, __: "must be a finite number",
    "bool_type": _flag,
    "string_type": _text,
    "path_type": _text,
    "tuple_type": _list,
    "model_type": _mapping,
    "mapping_type": _mapping,
    "dict_type": _mapping,
    "greater_than": _bound("must be greater than {}", "gt"),
    "greater_than_equal": _bound("must be at least {}", "ge"),
    "less_than_equal": _bound("must be at most {}", "le"),
}
