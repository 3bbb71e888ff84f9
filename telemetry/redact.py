"""The one module that hides secrets.

Law: whatever is shown to anyone (spans, logs, events, admin answers, dead-letter listings) passes through here; no
other file decides what to hide. What a credential is called and looks like is said in `config/credentials.py`, what
else is hidden in the settings. When in doubt it hides. A name is kept, its value is not. Comparisons are made on the
decoded, lower-case form, so that `%74oken` and `TOKEN` hide as well as `token`. The work is linear in the length of
the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

from config.credentials import (
    credential_shapes,
    decoded_name,
    has_credential_shape,
    is_credential_name,
    value_looks_secret,
)
from config.operations import segment_regex

MASK = "REDACTED"
_LONGEST_TEXT = 2_000

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{1,15}://[^\s\"'<>`]+")
# `user:password@host` without a scheme: what stands before an `@`, from its beginning on.
_BEFORE_AT = re.compile(r"(?<![^\s/@\"'])([^\s/@\"']++)@(?=[\w\[])")
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
    `/hooks/{id}` hides one segment, `/bot{token}` too, `/services/{**}` all that follow; what `*` stands for is
    shown. A path is judged by all that an upstream may make of it: case, dots and empty segments hide nothing."""

    def __init__(self, query: Iterable[str] = (), paths: Iterable[str] = ()) -> None:
        self.configure(query, paths)

    def configure(self, query: Iterable[str], paths: Iterable[str]) -> None:
        self._names = frozenset(name.lower() for name in query)
        self._paths = tuple(map(_SecretPath, paths))

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
        hidden = {index for index, segment in enumerate(segments) if has_credential_shape(unquote(segment))}
        if self._paths:
            pieces = list(_pieces(segments))
            readings = [pieces] if all(piece != ".." for piece, _ in pieces) else [pieces, _resolved(pieces)]
            for pattern in self._paths:
                for reading in readings:
                    hidden |= pattern.hides(reading)
        for index in hidden:
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
        return self.prose(text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…")

    def clauses(self, text: str) -> str:
        """As a whole and clause by clause: in `SomeError: token=…` the first colon would hide the pair behind it."""
        return ": ".join([self.text(part) for part in self.text(text).split(": ")])

    def lines(self, text: str) -> str:
        """Each line like that: frames, a chain of errors."""
        return "\n".join([self.clauses(line) for line in text.splitlines()])

    def prose(self, text: str) -> str:
        """The same for what was written to be kept whole: a reason, a note."""
        text = _URL.sub(self._url_in_text, text)
        text = _BEFORE_AT.sub(lambda found: f"{MASK}:{MASK}@" if ":" in found[1] else found[0], text)
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


# ---- paths that are secrets ------------------------------------------------------------------------------------------

_Pieces = list[tuple[str, int]]


def _pieces(segments: list[str]) -> Iterator[tuple[str, int]]:
    """The segments as some upstream may read them, each with the place of the segment it is of: decoded twice, in
    lower case, without parameters behind a `;`, cut at an encoded slash, without those that stand for nothing."""
    for index, segment in enumerate(segments):
        for piece in unquote(unquote(segment)).lower().replace("\\", "/").split("/"):
            if piece not in ("", "."):
                yield piece.partition(";")[0] or piece, index


def _resolved(pieces: _Pieces) -> _Pieces:
    """What is left of them where `..` takes the one before away."""
    left: _Pieces = []
    for piece in pieces:
        if piece[0] != "..":
            left.append(piece)
        elif left:
            left.pop()
    return left


class _SecretPath:
    """One pattern, ready to be looked for."""

    __slots__ = ("_all_behind", "_parts")

    def __init__(self, pattern: str) -> None:
        parts = [part for part in pattern.split("/") if part]
        self._all_behind = parts[-1:] == ["{**}"]
        if parts[-1:] in (["**"], ["{**}"]):
            parts.pop()
        self._parts = [(re.compile(segment_regex(unquote(part).lower()), re.DOTALL), "{" in part) for part in parts]

    def hides(self, pieces: _Pieces) -> set[int]:
        """The places of the segments that it hides, wherever among them it is found."""
        hidden: set[int] = set()
        length, first_behind = len(self._parts), len(pieces)
        for start in range(len(pieces) - length + 1):
            if not all(part.fullmatch(pieces[start + at][0]) for at, (part, _) in enumerate(self._parts)):
                continue
            hidden.update(pieces[start + at][1] for at, (_, secret) in enumerate(self._parts) if secret)
            first_behind = min(first_behind, start + length)
        if self._all_behind:
            hidden.update(place for _, place in pieces[first_behind:])
        return hidden
