"""The one module that knows what a secret looks like.

Law: whatever is shown to anyone (spans, logs, events, admin answers, dead-letter listings) passes through here; no
other file decides what to hide. When in doubt it hides. A name is kept, its value is not. Comparisons are made on the
decoded, lower-case form, so that `%74oken` and `TOKEN` hide as well as `token`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, unquote_plus

MASK = "REDACTED"
_LONGEST_TEXT = 2_000

# Query parameters whose value is a credential, lower case.
QUERY_NAMES = frozenset(
    "x-amz-signature x-amz-credential x-amz-security-token awsaccesskeyid signature sig x-goog-signature "
    "x-goog-credential token access_token api_key apikey key password secret code client_secret "
    "authorization jwt".split()
)
HEADER_NAMES = frozenset(
    "authorization proxy-authorization cookie set-cookie x-api-key api-key x-auth-token x-amz-security-token "
    "www-authenticate".split()
)
_TELLING_PARTS = ("token", "secret", "password")  # anywhere in a name

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{1,15}://[^\s\"'<>`]+")
_USERINFO = re.compile(r"[^\s/@:\"']{1,64}:[^\s/@\"']{1,256}@(?=[\w\[])")  # `user:password@host` without a scheme
_SCHEME = re.compile(r"\b(Bearer|Basic|Digest|Negotiate|ApiKey)\s+[A-Za-z0-9._~+/=\-]{4,}", re.IGNORECASE)
_SHAPES = re.compile(  # credentials that are recognised without a name beside them
    r"eyJ[\w\-]{8,}\.[\w\-]{8,}(?:\.[\w\-]*)?"  # a signed or encrypted web token
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\b(?:sk|pk|rk)[-_][\w\-]{16,}"
    r"|\bgh[pousr]_\w{20,}"
    r"|\bxox[abeoprs]-[\w\-]{10,}"
)
_NESTED_USERINFO = re.compile(r"://[^\s/?#@]{1,512}@")  # of a url inside a value
# Fields whose value may be several words: all of the line goes.
_FIELD = re.compile(
    r"\b(authorization|proxy-authorization|cookie|set-cookie|www-authenticate)([\"']?\s{0,3}[:=])[^\r\n]+",
    re.IGNORECASE,
)
# `name=value`, `name: value`, `"name": "value"` in running text. In two steps, because a value can look like a name:
# in "it failed: token=abc" the value of `failed` holds a pair of its own.
_NAME = re.compile(r"([\w\-]{2,64})([\"']?\s{0,3}[=:]\s{0,3})")
_VALUE = re.compile(r"\"[^\"]{0,2000}\"|'[^']{0,2000}'|[^\s,;&\"'})\]]+")


class Redactor:
    """Hides secrets. `query` are further parameter names, `paths` patterns of paths with secrets in them:
    `/hooks/{id}` hides one segment, `/services/{**}` all that follow; `*` stands for any one segment."""

    def __init__(self, query: Iterable[str] = (), paths: Iterable[str] = ()) -> None:
        self.configure(query, paths)

    def configure(self, query: Iterable[str], paths: Iterable[str]) -> None:
        self._names = QUERY_NAMES | {name.lower() for name in query}
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
            if _SHAPES.search(segment):
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
        if equals and (self.hides(unquote_plus(name)) or _looks_secret(value)):
            return f"{name}={MASK}"
        return part if equals else self._bare(part)

    def _bare(self, part: str) -> str:
        """A query without names may itself be the credential."""
        return MASK if _SHAPES.search(unquote(part)) else part

    @staticmethod
    def _authority(authority: str) -> str:
        _, at, host = authority.rpartition("@")
        return f"{MASK}:{MASK}@{host}" if at else authority

    # ---- names ---------------------------------------------------------------------------------------------------

    def hides(self, name: str) -> bool:
        """Whether the value of a parameter or field with this name is a secret."""
        lowered = name.lower()
        return lowered in self._names or any(part in lowered for part in _TELLING_PARTS)

    def headers(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Header fields as they may be shown."""
        return {name: MASK if hides_header(name) else self.text(value) for name, value in fields.items()}

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
        return _SHAPES.sub(MASK, text)

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
        if ":" in separator and name.lower() in _ORDINARY_WORDS:
            return False  # "code: 503" is prose; "code=…" is a parameter
        return self.hides(name) or hides_header(name)


# End like a credential, and are none.
_HARMLESS_KEYS = frozenset({"idempotency-key", "sec-websocket-key", "surrogate-key", "cache-key", "author"})
_ORDINARY_WORDS = frozenset({"code", "key", "idempotency_key"})


def _looks_secret(value: str) -> bool:
    """Of a parameter: whatever its name is, a credential, or a url with one before its host. Once or twice encoded."""
    decoded = unquote_plus(value)
    if "%" in decoded:
        decoded += " " + unquote(decoded)
    return bool(_SHAPES.search(decoded) or _NESTED_USERINFO.search(decoded))


def hides_header(name: str) -> bool:
    """Whether a header field's value is never shown."""
    lowered = name.lower()
    if lowered in HEADER_NAMES or any(part in lowered for part in _TELLING_PARTS):
        return True
    return lowered not in _HARMLESS_KEYS and (lowered.endswith("key") or "auth" in lowered)


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
