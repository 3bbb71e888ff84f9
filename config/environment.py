"""`SIDECAR__SECTION__KEY` variables laid over the file.

Names are matched whatever their case; the name of an upstream or policy also matches when its `-` and `.` are
written as `_`. Values are YAML, so `5000`, `true`, `[a.test]` and `{port: 5000}` mean what they mean in the
file. A mapping is merged into what is there, anything else replaces it. The given values are never changed in
place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from config.checks import KeyPath
from config.document import UnreadableDocument, parse
from config.errors import registry
from config.keys import holds_named_entries, section_at
from config.policy import SHIPPED
from config.problems import Problem, dotted

PREFIX = "SIDECAR__"
_MISSPELT = re.compile(r"SIDECAR_[A-Z][A-Z0-9]*(_[A-Z0-9]+)*__", re.IGNORECASE)


@dataclass(slots=True)
class Overlay:
    """The merged values, and which variable gave which of them."""

    data: dict[Any, Any]
    variables: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def variable_for(self, path: KeyPath) -> str | None:
        """The variable that gave the value at this path, or the value that contains it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.variables:
                return self.variables[path[:length]]
        return None

    def variable_below(self, path: KeyPath) -> str | None:
        """A variable that gave some value inside the section at this path."""
        return next((name for given, name in self.variables.items() if given[: len(path)] == path), None)


def overlay(data: Mapping[Any, Any], environ: Mapping[str, str]) -> Overlay:
    """Lay every `SIDECAR__…` variable over the file's values."""
    result = Overlay(dict(data))
    for name in environ:
        if _MISSPELT.match(name):
            message = f"no such variable; behind SIDECAR stand two underscores: {PREFIX}{name[8:]}"
            result.problems.append(Problem(message, variable=name))
    named = [name for name in environ if name.upper().startswith(PREFIX)]
    owners: dict[KeyPath, str] = {}
    # Sections before the keys inside them, so that the more precise variable wins.
    for name in sorted(named, key=lambda name: (name.count("__"), name)):
        segments = name[len(PREFIX) :].split("__")
        if "" in segments:
            message = f"the name is incomplete; write {PREFIX}SECTION__KEY, as in SIDECAR__LISTEN__PORT"
            result.problems.append(Problem(message, variable=name))
            continue
        path = _path(segments, result.data)
        if path in owners:
            message = f"{owners[path]} sets the same key; remove one of the two"
            result.problems.append(Problem(message, dotted(path), variable=name))
            continue
        owners[path] = name
        try:
            document = parse(environ[name], aliases=False)
        except UnreadableDocument as unreadable:
            result.problems.append(Problem(unreadable.fault.message, dotted(path), variable=name))
            continue
        for fault in document.faults:
            result.problems.append(Problem(fault.message, dotted((*path, *fault.path)), variable=name))
        _set(result.data, path, document.data)
        _remember(result.variables, path, document.data, name)
    return result


def _path(segments: list[str], data: Mapping[Any, Any]) -> KeyPath:
    path: KeyPath = ()
    here: Any = data
    for segment in segments:
        if holds_named_entries(path):
            known = [key for key in here if isinstance(key, str)] if isinstance(here, dict) else []
            known += _names_that_exist_anyway(path)
        else:
            section = section_at(path)
            known = list(section.model_fields) if section is not None else []
        key = _same_name(segment, known) or segment.lower()
        path = (*path, key)
        here = here.get(key) if isinstance(here, dict) else None
    return path


def _names_that_exist_anyway(path: KeyPath) -> list[str]:
    """Names with capitals that a variable may mean although the file does not have them."""
    if path == ("policies",):
        return list(SHIPPED)
    if path == ("error_codes",) or (len(path) == 3 and path[0] == "subsystem_mappings"):
        return list(registry())
    return []


def _same_name(segment: str, known: list[str]) -> str | None:
    if segment in known:
        return segment
    folded = _folded(segment)
    return next((name for name in known if _folded(name) == folded), None)


def _folded(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _set(data: dict[Any, Any], path: KeyPath, value: Any) -> None:
    here = data
    for part in path[:-1]:
        below = here.get(part)
        # Copied on the way down: the file's values stay as they are, and so does an alias elsewhere.
        here[part] = dict(below) if isinstance(below, dict) else {}
        here = here[part]
    here[path[-1]] = _merged(here.get(path[-1]), value)


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _remember(variables: dict[KeyPath, str], path: KeyPath, value: Any, name: str) -> None:
    """Note the variable at every single value it gave, since a mapping is shared with the file."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _remember(variables, (*path, key), inner, name)
    else:
        variables[path] = name
