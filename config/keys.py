"""The tree of valid keys, read off the models: which keys exist where, and which is nearest to a wrong
one."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from config.checks import KeyPath
from config.fields import Section
from config.model import Settings

CHOSEN_NAME = "<name>"
LIST_ITEM = "[]"


def section_at(path: KeyPath) -> type[Section] | None:
    """The section a path leads to; None when it leads to a single value, to named entries or nowhere."""
    return next((kind for kind in _kinds_at(path) if _is_section(kind)), None)


def holds_named_entries(path: KeyPath) -> bool:
    """Whether the keys below are names the user chooses, as in `upstreams`."""
    return any(_is_mapping(kind) for kind in _kinds_at(path))


def every_key() -> Iterator[tuple[str, ...]]:
    """All keys, chosen names written as `<name>` and items of a list as `[]`:
    `("upstreams", "<name>", "operations", "[]", "path")`."""
    return _keys_below(Settings, ())


def nearest(wrong: object, candidates: Iterable[str]) -> str | None:
    """The candidate that was probably meant, if one is near enough."""
    from difflib import get_close_matches  # only needed once something is wrong

    by_folded = {_folded(candidate): candidate for candidate in candidates}
    close = get_close_matches(_folded(str(wrong)), by_folded, n=1, cutoff=0.61)  # `tls` is not near to `tunnels`
    return by_folded[close[0]] if close else None


def elsewhere(key: str) -> list[str]:
    """The dotted places where a key of this name would be right."""
    wanted = _folded(key)
    return [".".join(path).replace(f".{LIST_ITEM}", LIST_ITEM) for path in every_key() if path[-1] == wanted]


def _folded(key: str) -> str:
    """Case and the kind of hyphen are the likeliest mistakes, so they never count."""
    return key.lower().replace("-", "_")


def _kinds_at(path: KeyPath) -> list[Any]:
    """The types a value at this path may have."""
    kinds: list[Any] = [Settings]
    for part in path:
        kinds = [below for kind in kinds for below in _kinds_below(kind, part)]
    return kinds


def _kinds_below(kind: Any, part: str | int) -> list[Any]:
    if _is_section(kind):
        field = kind.model_fields.get(str(part))
        return _alternatives(field.annotation) if field is not None else []
    if _is_mapping(kind):
        return _alternatives(get_args(kind)[1])
    if _is_list(kind) and isinstance(part, int):
        return _alternatives(get_args(kind)[0])
    return []


def _keys_below(kind: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if _is_section(kind):
        for key, field in kind.model_fields.items():
            yield (*above, key)
            for below in _alternatives(field.annotation):
                yield from _keys_below(below, (*above, key))
    elif _is_mapping(kind) or _is_list(kind):
        step, inner = (CHOSEN_NAME, get_args(kind)[1]) if _is_mapping(kind) else (LIST_ITEM, get_args(kind)[0])
        for below in _alternatives(inner):
            yield from _keys_below(below, (*above, step))


def _alternatives(annotation: Any) -> list[Any]:
    """The plain types behind `Annotated`, `Optional` and unions."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(arguments[0])
    if origin in (Union, types.UnionType):
        return [kind for argument in arguments for kind in _alternatives(argument)]
    return [annotation]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple
