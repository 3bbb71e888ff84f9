"""The tree of valid keys, read off the models: which keys exist where, and which is nearest to a wrong
one."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from config.checks import KeyPath
from config.fields import Section
from config.model import Settings


def section_at(path: KeyPath) -> type[Section] | None:
    """The section a path leads to; None when it leads to a single value, to named entries or nowhere."""
    section, named = _walk(path)
    return None if named else section


def holds_named_entries(path: KeyPath) -> bool:
    """Whether the keys below are names the user chooses, as in `upstreams`."""
    return _walk(path)[1]


def every_key() -> Iterator[tuple[str, ...]]:
    """All keys, chosen names written as `<name>`: `("upstreams", "<name>", "timeouts", "connect")`."""
    return _keys_below(Settings, ())


def nearest(wrong: object, candidates: Iterable[str]) -> str | None:
    """The candidate that was probably meant, if one is near enough."""
    from difflib import get_close_matches  # only needed once something is wrong

    by_folded = {_folded(candidate): candidate for candidate in candidates}
    close = get_close_matches(_folded(str(wrong)), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def elsewhere(key: str) -> list[str]:
    """The dotted places where a key of this name would be right."""
    wanted = _folded(key)
    return [".".join(path) for path in every_key() if path[-1] == wanted]


def _folded(key: str) -> str:
    """Case and the kind of hyphen are the likeliest mistakes, so they never count."""
    return key.lower().replace("-", "_")


def _walk(path: KeyPath) -> tuple[type[Section] | None, bool]:
    section: type[Section] | None = Settings
    named = False
    for part in path:
        if named:
            named = False
            continue
        if section is None or str(part) not in section.model_fields:
            return None, False
        section, named = _section_in(section.model_fields[str(part)].annotation)
    return section, named


def _keys_below(section: type[Section], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, field in section.model_fields.items():
        path = (*above, key)
        yield path
        below, named = _section_in(field.annotation)
        if below is not None:
            yield from _keys_below(below, (*path, "<name>") if named else path)


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section inside a field's type, and whether it is one of many named ones."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _section_in(arguments[0])
    if origin in (Union, types.UnionType):
        inner = [_section_in(argument) for argument in arguments if argument is not types.NoneType]
        return next((found for found in inner if found[0] is not None), (None, False))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _section_in(arguments[1])[0], True
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    return None, False
