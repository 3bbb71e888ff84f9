"""File and environment in, Settings out, or every mistake at once.

The order: the text is parsed with its positions, variables are laid over it, the models validate, then what
must hold between keys is checked, on what remains when invalid values are set aside, so that one wrong number
does not hide the next mistake. Only this file knows where a value came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from config.checks import Contradiction, KeyPath
from config.document import Document, UnreadableDocument, parse
from config.environment import Overlay, overlay
from config.explain import Explanation, explain
from config.fields import Section
from config.files import UnreadableFile, file_problems, read_file
from config.keys import nearest
from config.model import SHIPPED, Settings
from config.problems import ConfigError, Problem, dotted, shown_value
from config.runtime import NOTHING_SET, Runtime
from config.tokens import token_problems

__all__ = ["ConfigError", "Loaded", "Origin", "Problem", "as_far_as_valid", "load"]

Origin = Literal["default", "file", "environment", "runtime"]
PATH_VARIABLE = "SIDECAR_CONFIG"
_LARGEST_FILE = 4 * 1024 * 1024
_NOT_GIVEN = object()
_WITH_ADDRESSES = re.compile(r"^(?:admin|probes):.*?(?=^[^\s#]|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration and where each of its values came from."""

    settings: Settings
    path: Path | None
    """The file, or None when there was none."""
    origins: Mapping[str, Origin] = field(repr=False)
    """By dotted key: `{"listen.port": "environment", …}`."""
    text: bytes | None = field(default=None, repr=False)
    """The file as it was read."""


def load(
    path: Path | None, environ: Mapping[str, str], runtime: Runtime = NOTHING_SET, text: bytes | None = None
) -> Loaded:
    """Read the file (the given one, else the one `SIDECAR_CONFIG` names, else none), the variables over it, and over
    both what was set at run time. `text` is what the file held when it was read before: then it is not read again.

    Raises ConfigError with every problem found.
    """
    named_by_variable = path is None and environ.get(PATH_VARIABLE, "") != ""
    if named_by_variable:
        path = Path(environ[PATH_VARIABLE])
    if text is None and path is not None:
        text = _read(path, PATH_VARIABLE if named_by_variable else None)
    document = Document() if text is None else _parse(text, str(path))
    merged = overlay(document.data or {}, environ)
    merged.data = runtime.over(merged.data)
    return _Loading(path, text, document, merged, runtime).finish()


def as_far_as_valid(path: Path | None, environ: Mapping[str, str]) -> Settings | None:
    """What is right in a configuration that has mistakes: to find the sidecar that runs on with an earlier one, never
    to start one. Of a file that is not YAML, the sections with its addresses, if they can be read alone. None when
    the mistake may be about the addresses themselves."""
    try:
        text = _read(path or Path(environ.get(PATH_VARIABLE, "")), None).decode("utf-8-sig")
        data = _data_or_addresses(text)
    except (ConfigError, UnicodeDecodeError, UnreadableDocument):
        return None
    if not isinstance(data, dict):
        return None
    settings, explanations, _ = _validated(overlay(data, environ).data)
    doubtful: list[KeyPath] = [("admin",), ("probes",)]
    wrong = {explanation.path[:1] for explanation in explanations}
    if "admin" not in data:  # it may be misspelt
        doubtful += [explanation.path for explanation in explanations if len(explanation.path) == 1]
    return None if wrong.intersection(doubtful) else settings


def _data_or_addresses(text: str) -> Any:
    """Raises UnreadableDocument."""
    try:
        return parse(text).data or {}
    except UnreadableDocument:
        sections = "".join(_WITH_ADDRESSES.findall(text))
        if "admin" in text and "admin:" not in sections:
            raise
        return parse(sections).data or {}


def _read(path: Path, named_by: str | None) -> bytes:
    try:
        return read_file(path, _LARGEST_FILE)
    except UnreadableFile as unreadable:
        hint = f" (the file is named by {named_by})" if named_by else ""
        raise ConfigError([Problem(f"{unreadable}{hint}", file=str(path))]) from None


def _parse(text: bytes, file: str) -> Document:
    try:
        document = parse(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = "the file is not UTF-8 text; save it with that encoding"
        raise ConfigError([Problem(message, file=file, line=line)]) from None
    except UnreadableDocument as unreadable:
        fault = unreadable.fault
        raise ConfigError([Problem(fault.message, file=file, line=fault.line, column=fault.column)]) from None
    if document.data is not None and not isinstance(document.data, dict):
        message = "the file must hold keys with values, as in `listen: {port: 4140}`"
        raise ConfigError([Problem(message, file=file, line=1, column=1)])
    return document


@dataclass(slots=True)
class _Loading:
    """One load under way."""

    path: Path | None
    text: bytes | None
    document: Document
    merged: Overlay
    runtime: Runtime

    def finish(self) -> Loaded:
        problems = [*self._faults_of_the_text(), *self.merged.problems]
        settings, explanations, contradictions = _validated(self.merged.data)
        problems.extend(self._located(explanation) for explanation in explanations)
        if settings is not None:
            wrong = [explanation.path for explanation in explanations]
            for contradiction in (*contradictions, *file_problems(settings), *token_problems(settings)):
                if not any(_overlap(path, used) for path in wrong for used in contradiction.derived_from):
                    problems.append(self._located(self._as_explanation(contradiction), self._blamed(contradiction)))
        if problems or settings is None:
            raise ConfigError(problems)
        origins = {dotted(key): self._origin(key) for key in _keys_in_use(settings)}
        return Loaded(settings, self.path, origins, self.text)

    def _faults_of_the_text(self) -> Iterator[Problem]:
        for fault in self.document.faults:
            yield Problem(fault.message, dotted(fault.path), str(self.path), fault.line, fault.column)

    def _as_explanation(self, contradiction: Contradiction) -> Explanation:
        value = _value_at(self.merged.data, contradiction.path)
        wrong: Any = value
        if contradiction.wrong_name is not None:
            wrong, value = contradiction.wrong_name, _NOT_GIVEN  # the key is shown anyway, and its value is right
        near = nearest(wrong, contradiction.candidates) if contradiction.candidates else None
        return Explanation(contradiction.path, contradiction.message, near, value, True)

    def _blamed(self, contradiction: Contradiction) -> KeyPath:
        """The key to look at: a default cannot be looked at, so then the given key it collides with."""
        candidates = (contradiction.path, *contradiction.derived_from)
        given = (key for key in candidates if _value_at(self.merged.data, key) is not _NOT_GIVEN)
        return next(given, contradiction.path)

    def _located(self, explanation: Explanation, blamed: KeyPath | None = None) -> Problem:
        """Put the place in front: that of the key itself, unless another one is to blame."""
        key, near = dotted(explanation.path), explanation.nearest
        value = None
        if explanation.value is not _NOT_GIVEN:
            value = shown_value(explanation.path, explanation.value, known_key=explanation.known_key)
        path = explanation.path if blamed is None else blamed
        variable = self.merged.variable_for(path)
        position = self.document.position(path)
        depth = position[2] if position is not None else 0
        if variable is None and depth < len(path):
            variable = self.merged.variable_below(path)
        if variable is None and depth < len(path) - 1:  # something missing beside what a variable gave
            variable = self.merged.variable_below(path[:-1])
        if variable is not None or position is None:
            return Problem(explanation.message, key, variable=variable, value=value, nearest=near)
        line, column, _ = position
        return Problem(explanation.message, key, str(self.path), line, column, None, value, near)

    def _origin(self, key: KeyPath) -> Origin:
        origin = self._origin_of_key(key)
        if origin == "default" and len(key) == 3 and key[0] == "policies":
            _, policy, setting = key
            if setting not in SHIPPED.get(str(policy), {}):
                return self._origin_of_key(("global_defaults", setting))
        return origin

    def _origin_of_key(self, key: KeyPath) -> Origin:
        if self.runtime.sets(key):
            return "runtime"
        if self.runtime.replaces(key):
            return "default"
        if self.merged.variable_for(key) is not None:
            return "environment"
        here = self.document.data
        for part in key:
            if isinstance(here, dict):
                if part not in here:
                    return "default"
                here = here[part]
            elif here is None:
                return "default"  # a section left empty
            else:
                break  # a short form that stands for the whole section
        return "file"


def _validated(data: dict[Any, Any]) -> tuple[Settings | None, list[Explanation], list[Contradiction]]:
    """Validate; when values are wrong, also what remains without them, for the sake of the contradictions."""
    explanations: list[Explanation] = []
    while True:
        contradictions: list[Contradiction] = []
        try:
            return Settings.model_validate(data, context=contradictions), explanations, contradictions
        except ValidationError as invalid:
            found = [_as_written(explain(error), data) for error in invalid.errors(include_url=False)]
        # What was set aside is missing now; that is no news.
        told = {explanation.path for explanation in explanations}
        explanations.extend(explanation for explanation in found if explanation.path not in told)
        remaining = data
        for explanation in found:
            remaining = _without(remaining, _set_aside(data, explanation.path))
        if remaining == data:
            return None, explanations, []
        data = remaining


def _as_written(explanation: Explanation, data: Any) -> Explanation:
    """Point at a value that stands for a list of one as it was written, not as an item of that list."""
    path: list[str | int] = []
    here = data
    for part in explanation.path:
        if isinstance(part, int) and here is not _NOT_GIVEN and not isinstance(here, list):
            continue
        path.append(part)
        here = _value_at(here, (part,))
    return explanation._replace(path=tuple(path))


def _set_aside(data: Any, path: KeyPath) -> KeyPath:
    """What has to go so that the error at the path goes: the value, or the list or section around it."""
    here = data
    for depth, part in enumerate(path):
        if not isinstance(here, dict) or part not in here:
            return path[:depth]
        here = here[part]
    return path


def _without(data: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
    """A copy without the value at the path; the path may be gone already."""
    if not path:
        return {}
    key, rest = path[0], path[1:]
    if key not in data:
        return data
    if rest:
        inner = data[key]
        return {**data, key: _without(inner, rest)} if isinstance(inner, dict) else data
    return {kept: value for kept, value in data.items() if kept != key}


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):  # the path leads past what was given
            return _NOT_GIVEN
    return data


def _keys_in_use(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of the settings that holds a single value or a list."""
    if isinstance(value, Section):
        for key in type(value).model_fields:
            yield from _keys_in_use(getattr(value, key), (*path, key))
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _keys_in_use(inner, (*path, key))
    else:
        yield path
