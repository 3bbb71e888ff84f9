"""What a credential is called, and what it looks like: one list, for whoever shows, keeps, strips or hashes them.

Law: `is_credential_name` is the only judge of a name, be it of a header, a query parameter, a form field or a key of
the configuration. It looks at the words of a name, not at its letters: `X-Goog-Api-Key` is one, `monkey` is none. In
doubt a name is one, because hidden is safer than shown. The work is linear in the length of what is judged.

How a name is judged. It is taken apart at everything that is no letter, and once more where small letters become
capitals (`userApiKey`: user, api, key); a leading `x` does not count. It names a credential when

1. `token`, `secret`, `password` or another of `TELLING_PARTS` is anywhere in it (`PRIVATE-TOKEN`, `authtoken`);
2. it is, as a whole, one of `WHOLE_NAMES`, which mean other things inside of longer names (`code`, `pin`, `sid`);
3. one of its words is of `TELLING_WORDS` (`sig`, `sas`, `pat`, `jwt`), begins with `auth` and not with `author`, or
   ends like `oauth` and `appkey`; or two words that mean it together stand side by side (`device_code`); unless its
   last word only describes something (`auth_method`, `session_count`, `signature_version`);
4. its last word is `key` or `pass`, unless the word before says which harmless kind of key (`idempotency-key`,
   `sort_key`); or `key` stands anywhere behind one of `SECRET_KEYS` (`api_keys`, `access_key_id`), but for the id or
   the name of such a key (`api_key_id`).

`HARMLESS_NAMES` are none, whatever else is said here.

Who hands a request to somebody else than it was meant for asks the other way round: `is_harmless_field` knows what
may go along, because a field that nobody has heard of may be a credential under any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from urllib.parse import unquote, unquote_plus

TELLING_PARTS = (
    *("token", "secret", "password", "passwd", "passphrase", "passcode", "credential", "accesskeyid"),
    *("authoriz", "authoris", "sessionid", "sessid"),
)
WHOLE_NAMES = frozenset("code pin sid connect-sid sign cookies wresult".split())
TELLING_WORDS = frozenset(
    "pwd pw passkey sig signature hmac sas jwt jws jwe pat saml assertion session sess bearer cred creds otp totp "
    "cookie tkn".split()
)
TELLING_PAIRS = frozenset(
    {("code", "verifier")}
    | {(kind, "code") for kind in "access confirmation device login mfa reset security sms verification".split()}
)
SECRET_KEYS = frozenset(
    "access account admin api app application auth client consumer customer developer encryption function functions "
    "host integration license master merchant private secret service session shared signing ssh storage subscription "
    "user webhook".split()
)
_TELLING_ENDS = ("auth", "pwd", *(f"{kind}key" for kind in sorted(SECRET_KEYS)))  # of a word: oauth, userpwd, xapikey
HARMLESS_KEYS = frozenset(
    "attribute business cache child column composite correlation cursor dedup dedupe deduplication document end entity "
    "event external feature field filter first flag foreign group grouping hash hot idempotency idempotent index issue "
    "item job json label last locale lookup map message metric natural next object order page pagination parent "
    "partition prev previous primary project property public range record request resource routing row search setting "
    "shard short socket sort sorting start surrogate tag trace translation unique websocket".split()
)
HARMLESS_NAMES = frozenset({"access-control-allow-credentials", "sec-websocket-key"})
HARMLESS_FIELDS = frozenset(
    "accept accept-charset accept-datetime accept-encoding accept-language accept-patch accept-post accept-ranges "
    "b3 cache-control content-digest content-disposition content-encoding content-language "
    "content-md5 content-range content-type correlation-id date digest dnt idempotency-key if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-event-id pragma prefer priority range "
    "repr-digest request-id traceparent tracestate upgrade-insecure-requests user-agent want-digest "
    "x-amzn-trace-id x-b3-flags x-b3-parentspanid x-b3-sampled x-b3-spanid x-b3-traceid x-cloud-trace-context "
    "x-correlation-id x-http-method-override x-idempotency-key x-request-id x-requested-with".split()
)
_DESCRIBES = frozenset(
    "age alg algorithm at consent count duration enabled expiry limit max method methods mode policy provider required "
    "scheme size status timeout ttl type types version".split()
)
_LONGEST_REMEMBERED = 128

_LETTERS = re.compile(r"[a-z]+")
_HUMPS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_RUN = re.compile(r"[\w\-.]+")  # what a web token is made of
_FIXED_SHAPES = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\b(?:sk|pk|rk)[-_][\w\-]{16,}"
    r"|\bgh[pousr]_\w{20,}"
    r"|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w\-]{16,}"
    r"|\bxox[abeoprs]-[\w\-]{10,}"
    r"|\bAIza[\w\-]{30,}"
)
_NESTED_USERINFO = re.compile(r"://[^\s/?#@]{1,512}@")  # of a url inside a value
_LEAST_PART = 8  # of a web token


# ---- names -----------------------------------------------------------------------------------------------------------


def is_credential_name(name: str) -> bool:
    """Whether what stands under this name, percent-decoded, is a credential. Verdicts are kept: names are few."""
    return _remembered(name) if len(name) <= _LONGEST_REMEMBERED else _judged(name)


def _judged(name: str) -> bool:
    plain = _without_x(_LETTERS.findall(name.lower()))
    if "-".join(plain) in HARMLESS_NAMES:
        return False
    if any(part in "".join(plain) for part in TELLING_PARTS):
        return True
    return _are_telling(plain) or _are_telling(_without_x([word.lower() for word in _HUMPS.findall(name)]))


_remembered = lru_cache(4096)(_judged)


def _without_x(words: list[str]) -> list[str]:
    return words[1:] if words[:1] == ["x"] else words


def _are_telling(words: list[str]) -> bool:
    if not words:
        return False
    if "-".join(words) in WHOLE_NAMES or words[-1] == "pass" or _hold_a_secret_key(words):
        return True
    if words[-1] in _DESCRIBES:
        return False
    return any(map(_is_telling, words)) or not TELLING_PAIRS.isdisjoint(pairwise(words))


def _is_telling(word: str) -> bool:
    if word in TELLING_WORDS or word.endswith(_TELLING_ENDS):
        return True
    return word.startswith("saml") or (word.startswith("auth") and not word.startswith("author"))


def _hold_a_secret_key(words: list[str]) -> bool:
    for before, word, behind in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word in ("key", "keys"):
            if before in SECRET_KEYS and behind not in ("id", "ids", "name"):
                return True
            if word == "key" and not behind and before not in HARMLESS_KEYS:
                return True
    return False


def is_harmless_field(name: str, value: str) -> bool:
    """Of a request, both as sent: whether it may go to another provider than the one it was meant for."""
    lowered = name.lower()
    return lowered in HARMLESS_FIELDS and not has_credential_shape(value)


# ---- values ----------------------------------------------------------------------------------------------------------


def has_credential_shape(text: str) -> bool:
    """Whether there is a credential in it that is recognised without a name beside it."""
    return next(credential_shapes(text), None) is not None


def credential_shapes(text: str) -> Iterator[tuple[int, int]]:
    """Where such credentials begin and end, in no order: web tokens, and keys with the marks of known providers."""
    if "eyJ" in text:
        for run in _RUN.finditer(text):
            yield from _web_token(run[0], run.start())
    for found in _FIXED_SHAPES.finditer(text):
        yield found.span()


def _web_token(run: str, offset: int) -> Iterator[tuple[int, int]]:
    """A signed or encrypted web token, `eyJ….….…`: from its first part to the end of the run. Each part is looked at
    once, which a regular expression that looks for the dot behind each `eyJ` does not do."""
    parts = run.split(".")
    at = offset
    for part, following in pairwise(parts):
        begins = part.find("eyJ")
        if 0 <= begins <= len(part) - 3 - _LEAST_PART and len(following) >= _LEAST_PART:
            yield at + begins, offset + len(run)
            return
        at += len(part) + 1


# ---- queries ---------------------------------------------------------------------------------------------------------


def is_credential_parameter(name: str, value: str) -> bool:
    """Of a query, both as sent: by its name, or because the value is a credential, or a url with one before its host,
    once or twice encoded."""
    return is_credential_name(decoded_name(name)) or value_looks_secret(value)


def decoded_name(name: str) -> str:
    decoded = unquote_plus(name)
    return unquote_plus(decoded) if "%" in decoded else decoded


def value_looks_secret(value: str) -> bool:
    decoded = unquote_plus(value)
    if "%" in decoded:
        decoded += " " + unquote(decoded)
    return has_credential_shape(decoded) or _NESTED_USERINFO.search(decoded) is not None


def credentials_of_query(query: str) -> list[str]:
    """The parameters of a query that are credentials, `name=value` as sent and in their order. A parameter without a
    name may itself be one. `;` is an old separator that some servers still honour."""
    found = []
    for part in query.replace(";", "&").split("&"):
        name, equals, value = part.partition("=")
        if is_credential_parameter(name, value) if equals else has_credential_shape(unquote(part)):
            found.append(part)
    return found
