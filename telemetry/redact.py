"""The one module that hides secrets.

Law: whatever is shown to anyone (spans, logs, events, admin answers, dead-letter listings) passes through here; no
other file decides what to hide. What a credential is called and looks like is said in `config/credentials.py`, what
else is hidden in the settings. When in doubt it hides. A name is kept, its value is not. Comparisons are made on the
decoded, lower-case form, so that `%74oken` and `TOKEN` hide as well as `token`. The work is linear in the length of
the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from config.credentials import (
    credential_shapes,
    decoded_name,
    has_credential_shape,
    is_credential_name,
    value_looks_secret,
)

MASK = "REDACTED"
_LONGEST_TEXT = 2_000

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{1,15}://[^\s\"'<>`]+")
_USERINFO = re.compile(r"[^\s/@:\"']{1,64}:[^\s/@\"']{1,256}@(?=[\w\[])")  # `user:password@host` without a scheme
_SCHEME = re.compile(r"\b(Bearer|Basic|Digest|Negotiate|ApiKey)\s+[A-Za-z0-9._~+/=\-]{4,}", re.IGNORECASE)
# Fields whose value may be several words: all of the line goes.
_FIELD = re.compile(
    r"\b(authorization|proxy-authorization|cookie|set-cookie|www-authenticate)([\"']?\s{0,3}[:=])[^\r\n]+",
    re.IGNORECASE,
)
# `name=value`, `name: value`, `"name": "value"` in running text. In two steps, because a value can look like a name:
# in "it failed: token=abc" the value of `failed` holds a pair of its own.
_NAME = re.compile(r"(?<![\w\-])([\w\-]{2,}+)([\"']?\s{0,3}[=:]\s{0,3})")
_VALUE = re.compile(r"\"[^\"]{0,2000}\"|'[^']{0,2000}'|[^\s,;&\"'})\]]+")


class Redactor:
    """Hides secrets. `query` are further parameter names, `paths` patterns of paths with secrets in them:
    `/hooks/{id}` hides one segment, `/services/{**}` all that follow; `*` stands for any one segment."""

    def __init__(self, query: Iterable[str] = (), paths: Iterable[str] = ()) -> None:
        self.configure(query, paths)

    def configure(self, query: Iterable[str], paths: Iterable[str]) -> None:
        self._names = frozenset(name.lower() for name in query)
        self._paths = tuple(tuple(part for part in path.split("/") if part) for path in paths)

    # ---- urls ----------------------------------------------------------------------------------------------------

    def url(self, url: str) -> str:
        """Any form a request target or an endpoint can have: absolute, `/path?query`, `host:port`."""
        before, hash_mark, _ = url.partition("#")
        address, question, query = before.partition("?")
        scheme, slashes, rest = address.partition("://")
        if slashes:
            authority, slash, path = rest.partition("/")
            address = f"{scheme}://{self._authority(authority)}{self.path(slash + path)}"
        elif address.startswith("/"):
            address = self.path(address)
        else:
            address = self._authority(address)
        return address + (question + self.query(query)) + (hash_mark + MASK if hash_mark else "")

    def path(self, path: str) -> str:
        """A path, its secret segments hidden, wherever in it a pattern is found: a route may stand before it. A
        segment that looks like a credential needs no pattern."""
        segments = path.split("/")
        decoded = [unquote(segment) for segment in segments]
        for index, segment in enumerate(decoded):
            if has_credential_shape(segment):
                segments[index] = MASK
        for pattern in self._paths:
            for start in range(len(segments)):
                for index in _hidden(pattern, decoded, start):
                    segments[index] = MASK
        return "/".join(segments)

    def query(self, query: str) -> str:
        """`name=value&…`: names stay, values of telling names go."""
        if not query:
            return query
        return "&".join([self._parameter(part) for part in query.split("&")])

    def without_secrets(self, target: bytes) -> bytes:
        """A request target without the parameters whose values are hidden: for others than they were meant for."""
        path, mark, query = target.decode("latin-1").partition("?")
        kept = [part for part in query.split("&") if self._parameter(part) == part]
        return (path + mark + "&".join(kept)).encode("latin-1") if kept or not query else path.encode("latin-1")

    def _parameter(self, part: str) -> str:
        if ";" in part:  # an old separator that some servers still honour
            return ";".join([self._parameter(piece) for piece in part.split(";")])
        name, equals, value = part.partition("=")
        if equals:
            return f"{name}={MASK}" if self.hides(decoded_name(name)) or value_looks_secret(value) else part
        return MASK if has_credential_shape(unquote(part)) else part  # a query without names may itself be one

    @staticmethod
    def _authority(authority: str) -> str:
        _, at, host = authority.rpartition("@")
        return f"{MASK}:{MASK}@{host}" if at else authority

    # ---- names ---------------------------------------------------------------------------------------------------

    def hides(self, name: str) -> bool:
        """Whether the value of a parameter or field with this name is a secret."""
        return is_credential_name(name) or name.lower() in self._names

    def headers(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Header fields as they may be shown."""
        return {name: MASK if is_credential_name(name) else self.text(value) for name, value in fields.items()}

    # ---- running text --------------------------------------------------------------------------------------------

    def text(self, text: str) -> str:
        """A message, an exception, a user agent: urls, `name=value` pairs and known shapes of credentials."""
        if len(text) > _LONGEST_TEXT:
            text = text[:_LONGEST_TEXT] + "…"
        text = _URL.sub(self._url_in_text, text)
        text = _USERINFO.sub(f"{MASK}:{MASK}@", text)
        text = _FIELD.sub(lambda found: f"{found[1]}{found[2]} {MASK}", text)
        text = _SCHEME.sub(lambda found: f"{found[1]} {MASK}", text)
        text = self._without_pairs(text)
        return _without_shapes(text)

    def _url_in_text(self, found: re.Match[str]) -> str:
        url = found[0].rstrip(".,:;)]}")  # the sentence's, not the url's
        return self.url(url) + found[0][len(url) :]

    def _without_pairs(self, text: str) -> str:
        pieces, done = [], 0
        for found in _NAME.finditer(text):
            if found.start() < done or not self._names_a_secret(found[1], found[2]):
                continue
            value = _VALUE.match(text, found.end())
            if value is not None:
                pieces += [text[done : found.end()], MASK]
                done = value.end() - (len(value[0]) - len(value[0].rstrip(".:")))  # the sentence's, not the value's
        return "".join((*pieces, text[done:])) if pieces else text

    def _names_a_secret(self, name: str, separator: str) -> bool:
        lowered = name.lower()
        if lowered in _OWN_NAMES or (":" in separator and lowered in _ORDINARY_WORDS):
            return False
        if ":" in separator and separator[0] not in "\"'" and lowered in _WORDS_OF_PROSE:
            return False
        return self.hides(name)


_OWN_NAMES = frozenset({"session_id"})  # in the sidecar's own sentences; it opens nothing
_ORDINARY_WORDS = frozenset({"code", "key"})  # "code: 503" is prose or says what went wrong; `code=…` is a parameter
_WORDS_OF_PROSE = frozenset("auth session pass pin sign signature assertion cookies".split())  # but not `"auth": "…"`


def _without_shapes(text: str) -> str:
    found = sorted(credential_shapes(text))
    if not found:
        return text
    pieces, done = [], 0
    for start, end in found:
        if end > done:
            pieces += [text[done:start], MASK]
            done = end
    return "".join((*pieces, text[done:]))


def _hidden(pattern: tuple[str, ...], segments: list[str], start: int) -> list[int]:
    """Indexes of the segments that a pattern hides when it begins at `start`; none when it does not match there."""
    hidden: list[int] = []
    index = start
    for part in pattern:
        if part in ("**", "{**}"):
            return hidden + (list(range(index, len(segments))) if part == "{**}" else [])
        if index >= len(segments) or not segments[index]:
            return []
        if part.startswith("{") and part.endswith("}"):
            hidden.append(index)
        elif part not in ("*", segments[index]):
            return []
        index += 1
    return hidden
