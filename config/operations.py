"""Operations of an upstream: how requests get a name, and how path patterns are written and matched.

A pattern is matched against the path that the upstream will see, without the query, byte for byte. `{id}` and `*`
stand for one or more characters within a segment, `**` (last segment only) for everything that follows, or nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from config.fields import Flag, Method, Name, Section

_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}|\*")
_LITERAL = re.compile(r"(?:[A-Za-z0-9._~!$&'()+,;=:@-]|%[0-9A-Fa-f]{2})*")
EVERY_PATH = "/**"


def canonical_path_pattern(text: str) -> str:
    """Check a path pattern; raises ValueError with what to write instead."""
    if not text.startswith("/"):
        raise ValueError("a path begins with a slash, as in /v1/charges/{id}")
    if "?" in text or "#" in text:
        raise ValueError("a path is matched without its query; remove `?` or `#` and what follows")
    segments = text[1:].split("/")
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            if not last:
                raise ValueError("`**` stands for the rest of the path, so it can only be the last segment")
        elif segment == "" and not last:
            raise ValueError("a path may not contain an empty segment (two slashes in a row)")
        elif segment in (".", ".."):
            raise ValueError("a path may not contain the segments `.` or `..`")
        else:
            _check_segment(segment)
    return text


def _check_segment(segment: str) -> None:
    if "**" in segment:
        raise ValueError("`**` must be a segment of its own, as in /v1/**")
    rest = _PLACEHOLDER.sub("", segment)
    if "{" in rest or "}" in rest:
        raise ValueError("a placeholder is a name in braces, as in {id}")
    if re.search(r"(?:\}|\*)(?:\{|\*)", segment):
        raise ValueError("two placeholders side by side cannot be told apart; put something between them")
    if not _LITERAL.fullmatch(rest):
        raise ValueError("a path is matched byte for byte, so other characters are percent-encoded: `%20` for a space")


@functools.lru_cache(maxsize=1024)
def path_regex(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression for `fullmatch` on a path without its query."""
    head, rest = (pattern[: -len(EVERY_PATH)], "(?:/.*)?") if pattern.endswith(EVERY_PATH) else (pattern, "")
    pieces, position = [], 0
    for placeholder in _PLACEHOLDER.finditer(head):
        pieces += [re.escape(head[position : placeholder.start()]), "[^/]+"]
        position = placeholder.end()
    return re.compile("".join([*pieces, re.escape(head[position:]), rest]), re.DOTALL)


PathPattern = Annotated[
    str, AfterValidator(canonical_path_pattern), WithJsonSchema({"type": "string", "pattern": "^/"})
]


class Operation(Section):
    """A kind of request to an upstream, with a name for metrics and traces and settings of its own. The first
    operation of the list that matches a request is the one."""

    name: Name
    """The name in spans, sessions and `subsystem_mappings`; each name once per upstream."""
    methods: tuple[Method, ...] = ()
    """The methods it is about, as in [POST]. Empty: every method."""
    path: PathPattern = EVERY_PATH
    """The paths it is about, as the upstream sees them: `{id}` or `*` for a segment or a part of one, `**` at the end
    for the rest."""
    stage: Name | None = None
    """The stage of a workflow that these requests belong to; its attempts are counted together (`stages`)."""
    policy: str | None = None
    """The name of the policy, one of `policies`, for these requests. Not set: the upstream's."""
    retry_non_idempotent: Flag | None = None
    """Whether these requests may be sent again even if they may have been executed. Not set: as the policy says."""
