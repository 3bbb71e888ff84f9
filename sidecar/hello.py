"""What a TLS client says first, as far as it tells one client from another.

Law: pure, and reads only (RFC 8446, 4.1.2; TLS 1.2 begins the same way). The digest is of what the software is made of:
versions, ciphers, extensions and protocols. What changes from call to call is left out: random bytes and keys, GREASE
(RFC 8701), the order of extensions, and extensions that come with a session resumed. What is no ClientHello has none.
"""

from __future__ import annotations

import hashlib

_HANDSHAKE, _CLIENT_HELLO = 22, 1
_LONGEST = 65_536
_ALPN, _VERSIONS = 16, 43
_AT_TIMES = frozenset({21, 41, 42, 44})  # padding, pre_shared_key, early_data, cookie


class Incomplete(Exception):
    """More bytes are to come."""


class _Broken(Exception):
    """A length that leads out of what it is in."""


def digest_of_hello(data: bytes) -> str | None:
    """None: this is no ClientHello. Raises Incomplete as long as it may become one."""
    try:
        return _digest(_message(data))
    except _Broken:
        return None


def is_decided(data: bytes) -> bool:
    try:
        digest_of_hello(data)
    except Incomplete:
        return False
    return True


def _message(data: bytes) -> bytes:
    """The body of the first message, out of one record or several."""
    said, at = b"", 0
    while True:
        record = data[at : at + 5]
        if record[:1] not in (b"", bytes((_HANDSHAKE,))) or record[1:2] not in (b"", b"\x03"):
            raise _Broken
        if len(record) < 5:
            raise Incomplete
        size = int.from_bytes(record[3:], "big")
        if not size:
            raise _Broken
        said += data[at + 5 : at + 5 + size]
        if said[:1] not in (b"", bytes((_CLIENT_HELLO,))):
            raise _Broken
        whole = 4 + int.from_bytes(said[1:4], "big") if len(said) >= 4 else 4
        if whole > _LONGEST:
            raise _Broken
        if len(said) >= whole > 4:
            return said[4:whole]
        if len(said) >= 4 and whole == 4:
            raise _Broken
        if len(data) < at + 5 + size:
            raise Incomplete
        at += 5 + size


class _Fields:
    """Reads one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise _Broken
        self._at += size
        return taken

    def vector(self, width: int) -> bytes:
        """What has its length before it, in so many bytes."""
        return self.take(int.from_bytes(self.take(width), "big"))


def _digest(body: bytes) -> str:
    fields = _Fields(body)
    version = fields.take(2)
    fields.take(32)
    fields.vector(1)  # the session that is resumed
    ciphers, compression = _words(fields.vector(2)), fields.vector(1)
    extensions, versions, protocols = [], [version.hex()], []
    listed = _Fields(b"" if fields.ended else fields.vector(2))
    while not listed.ended:
        kind, content = int.from_bytes(listed.take(2), "big"), _Fields(listed.vector(2))
        if kind == _VERSIONS:
            versions += _words(content.vector(1))
        elif kind == _ALPN:
            names = _Fields(content.vector(2))
            while not names.ended:
                protocols.append(names.vector(1).hex())
        if kind not in _AT_TIMES:
            extensions.append(kind.to_bytes(2, "big"))
    kinds = sorted(_words(b"".join(extensions)))
    parts = (versions, ciphers, [compression.hex()], kinds, [name for name in protocols if not _grease(name)])
    return hashlib.sha256("|".join(",".join(part) for part in parts).encode()).hexdigest()[:12]


def _words(data: bytes) -> list[str]:
    """Numbers of two bytes, without GREASE."""
    if len(data) % 2:
        raise _Broken
    found = (data[at : at + 2].hex() for at in range(0, len(data), 2))
    return [word for word in found if not _grease(word)]


def _grease(word: str) -> bool:
    return len(word) == 4 and word[:2] == word[2:] and word[1] == "a"
