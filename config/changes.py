"""What differs between two configurations, and which of it can be put in force while the sidecar runs.

Pure. Values are shown as the models show them, with secrets masked; two that differ only in what is masked are told
as changed all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from config.checks import contradictions
from config.contradiction import Contradiction, KeyPath
from config.fields import Section
from config.model import Settings
from config.problems import dotted

# Sockets are bound, the directory is locked, descriptors are shared out and the file is open: these are read when the
# sidecar starts.
_AT_START: tuple[KeyPath, ...] = (
    ("listen", "host"),
    ("listen", "port"),
    ("listen", "reuse_port"),
    ("admin", "host"),
    ("admin", "port"),
    ("probes",),
    ("state_dir",),
    ("limits", "admin_connections"),
    ("telemetry", "events"),
)
# What a listener speaks, and whether it asks who comes, is settled when it is opened. Which certificate it shows and
# whom it lets in is not.
_PRESENCE_AT_START: tuple[KeyPath, ...] = (("listen", "tls"), ("listen", "auth"), ("admin", "tls"))
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One key that is another now. A value that is not there is None."""

    key: str
    before: Any
    after: Any


def changes(before: Settings, after: Settings) -> tuple[Change, ...]:
    """Every key with another value, in the order of the models."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    shown_old, shown_new = before.model_dump(mode="json"), after.model_dump(mode="json")
    found = []
    filled = {key[:depth] for key in (*old, *new) for depth in range(len(key))}
    for key in dict.fromkeys((*old, *new)):
        if key in filled:
            continue  # nothing in it on one side: what is in it on the other is told key by key
        if old.get(key, _ABSENT) != new.get(key, _ABSENT):
            found.append(Change(dotted(key), _shown(shown_old, key), _shown(shown_new, key)))
    return tuple(found)


def at_start(before: Settings, after: Settings) -> tuple[KeyPath, ...]:
    """What stays as it was `before`, whatever `after` has there."""
    come_or_gone = (
        path for path in _PRESENCE_AT_START if (_value(before, path) is None) != (_value(after, path) is None)
    )
    return (*_AT_START, *come_or_gone)


def at_start_only(before: Settings, after: Settings) -> tuple[str, ...]:
    """The keys that differ and need a restart."""
    prefixes = tuple(dotted(path) for path in at_start(before, after))
    return tuple(
        change.key
        for change in changes(before, after)
        if any(change.key == prefix or change.key.startswith(f"{prefix}.") for prefix in prefixes)
    )


def without_restart(before: Settings, after: Settings) -> tuple[Settings, list[Contradiction]]:
    """`after`, but with what cannot change as it was `before`; and what is wrong with that, which neither of the two
    need have: an open proxy may be safe on the new address and not on the old one."""
    mixed = after
    for path in at_start(before, after):
        mixed = _with_value(mixed, path, _value(before, path))
    return mixed, contradictions(mixed) if mixed != after else []


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Section):
        for key in type(value).model_fields:
            yield from _leaves(getattr(value, key), (*path, key))
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _shown(dumped: Any, path: KeyPath) -> Any:
    for part in path:
        if not isinstance(dumped, dict) or part not in dumped:
            return None
        dumped = dumped[part]
    return dumped


def _value(section: Any, path: KeyPath) -> Any:
    for part in path:
        section = getattr(section, str(part))
    return section


def _with_value(section: Any, path: KeyPath, value: Any) -> Any:
    key, rest = str(path[0]), path[1:]
    inner = value if not rest else _with_value(getattr(section, key), rest, value)
    return section.model_copy(update={key: inner})
