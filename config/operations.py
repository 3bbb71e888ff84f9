"""Operations of an upstream: how requests get a name, and how path patterns are written and matched.

A pattern is matched against the path that the upstream will see, without the query, byte for byte. `{id}` and `*`
stand for one or more characters within a segment, `**` (last segment only) for everything that follows, or nothing.
Law: matching is linear in the length of the path, whatever the pattern. The text behind a placeholder is looked for
once, from the left, and where it is found is final; only the last one of a segment has to stand at its end.
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
EVERY_SECRET = "/{**}"


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
    return re.compile("/".join(map(segment_regex, head.split("/"))) + rest, re.DOTALL)


def segment_regex(segment: str) -> str:
    """One segment, of a pattern that was checked, as the source of a regular expression. What an atomic group `(?>…)`
    has found is never looked for again further right, which would not help: more is left when it is found early."""
    first, *others = map(re.escape, _PLACEHOLDER.split(segment))
    if not others:
        return first
    return first + "".join(f"(?>[^/]+?{text})" for text in others[:-1]) + f"[^/]+{others[-1]}"


def _secret_path(text: str) -> str:
    """A path pattern, or one that ends in `/{**}`."""
    head = text.removesuffix(EVERY_SECRET)
    if head or text != EVERY_SECRET:
        canonical_path_pattern(head)
    return text


_BEGINS_WITH_A_SLASH = {"type": "string", "pattern": "^/"}
PathPattern = Annotated[str, AfterValidator(canonical_path_pattern), WithJsonSchema(_BEGINS_WITH_A_SLASH)]
SecretPath = Annotated[str, AfterValidator(_secret_path), WithJsonSchema(_BEGINS_WITH_A_SLASH)]
"""A path that is a credential itself: what its placeholders stand for is hidden, with `{**}` all that follows."""


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
