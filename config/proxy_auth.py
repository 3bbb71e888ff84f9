"""Who may use the listener: `listen.auth`, names with hashed passwords.

A hash is written as `scrypt:N:R:P$SALT$HEX` or `pbkdf2:HASH:ITERATIONS$SALT$HEX`; `sidecar password` makes one, and so
does werkzeug's `generate_password_hash`. Law: a hash can be checked against but is never shown: whatever prints the
settings has `REDACTED` in its place. Nothing is computed here; that takes a while on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, PlainValidator, WithJsonSchema

from config.fields import NO_OTHER_NAMES, Section

_SCRYPT = re.compile(r"scrypt:([0-9]{1,8}):([0-9]{1,3}):([0-9]{1,3})\$([^$\s]{8,128})\$([0-9a-f]{64,256})")
_PBKDF2 = re.compile(r"pbkdf2:(sha256|sha512):([0-9]{1,8})\$([^$\s]{8,128})\$([0-9a-f]{64,256})")
_LARGEST_SCRYPT = 128 * 1024 * 1024
_FEWEST_ITERATIONS, _MOST_ITERATIONS = 10_000, 10_000_000
_MAKE = "`sidecar password` makes a hash to put here"


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """What is kept of a password."""

    method: str
    """scrypt, sha256 or sha512; the latter two are those of PBKDF2."""
    costs: tuple[int, ...]
    """N, R and P of scrypt; the iterations of PBKDF2."""
    salt: str = field(repr=False)
    digest: bytes = field(repr=False)

    def __str__(self) -> str:
        return "REDACTED"


def parse_hash(given: Any) -> PasswordHash:
    """Raises ValueError with what to write instead, never repeating the text."""
    if isinstance(given, PasswordHash):
        return given
    text = given if isinstance(given, str) else ""
    if (scrypt := _SCRYPT.fullmatch(text)) is not None:
        n, r, p = (int(scrypt[number]) for number in (1, 2, 3))
        if n < 1024 or n & (n - 1) or r < 1 or p < 1 or 128 * n * r * p > _LARGEST_SCRYPT:
            raise ValueError(f"scrypt needs a power of two from 1024 on, and at most 128 MiB of memory; {_MAKE}")
        return PasswordHash("scrypt", (n, r, p), scrypt[4], bytes.fromhex(scrypt[5]))
    if (pbkdf2 := _PBKDF2.fullmatch(text)) is not None:
        if not _FEWEST_ITERATIONS <= int(pbkdf2[2]) <= _MOST_ITERATIONS:
            raise ValueError(f"PBKDF2 needs {_FEWEST_ITERATIONS:,} to {_MOST_ITERATIONS:,} iterations; {_MAKE}")
        return PasswordHash(pbkdf2[1], (int(pbkdf2[2]),), pbkdf2[3], bytes.fromhex(pbkdf2[4]))
    raise ValueError(f"this is not the hash of a password (scrypt:… or pbkdf2:…); {_MAKE}")


def _user(name: str) -> str:
    if not 1 <= len(name) <= 128 or ":" in name or not name.isprintable():
        raise ValueError("a user has 1 to 128 printable characters and no colon, which ends it in what clients send")
    return name


HashText = Annotated[
    PasswordHash,
    PlainValidator(parse_hash),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(scrypt|pbkdf2):.+\$.+\$[0-9a-f]+$"}),
]
User = Annotated[str, AfterValidator(_user), WithJsonSchema({"type": "string", "pattern": "^[^:]{1,128}$"})]


class ProxyAuth(Section):
    """Every request needs `Proxy-Authorization: Basic` with one of these, as in
    HTTP_PROXY=http://user:password@host:port."""

    users: Annotated[Mapping[User, HashText], NO_OTHER_NAMES]
    """Names with the hash of their password; `sidecar password` makes one."""
