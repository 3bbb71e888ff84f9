"""Who is asking, and is it a resend of his own? Retries stacked on retries multiply, so they are counted and shown.

Law: pure, told the time, bounded. A caller is all the credentials that he shows, as he sent them; a name that can be
read out of a token or a user name is none, because anybody can write it there: nothing here has verified it. Of
credentials and keys only keyed hashes are remembered, so that memory holds nothing worth stealing.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from config.credentials import credentials_of_query, is_credential_name

_DIGEST = 16
_LONGEST_KEY = 64  # what blake2b takes
_AWS_ATTEMPT = re.compile(rb"(?:^|;)\s*attempt\s*=\s*([0-9]{1,9})\s*(?:;|$)", re.IGNORECASE)
_COUNT = re.compile(rb"[0-9]{1,9}")


def identity(
    fields: Iterable[tuple[bytes, bytes]], query: str, *, sender: bytes = b"", caller: str | None = None
) -> bytes:
    """What makes this caller another one than all others; for a keyed hash, never to be kept. Empty: he shows nothing.

    `sender` is who he is to the listener, which has checked it. `caller` names a field that says who he is, for those
    who trust whoever sets it; a request without that field is judged by its credentials like any other."""
    found: list[tuple[bytes, bytes]] = []
    named = None
    wanted = None if caller is None else caller.lower().encode()
    for name, value in fields:
        lowered = name.lower()
        if lowered == wanted:
            named = value
        if is_credential_name(lowered.decode("latin-1")):
            found.append((lowered, value))
    if named is not None:
        found = [(b"caller", named)]
    else:
        found.sort(key=_name)  # fields of one name keep their order, which means something
        found += [(b"?", part.encode("latin-1")) for part in credentials_of_query(query)] if query else []
    if sender:
        found.append((b"sender", sender))
    # Lengths first, so that no two lists can look the same.
    return b"".join([b"%d:%b%d:%b" % (len(name), name, len(value), value) for name, value in found])


def _name(field: tuple[bytes, bytes]) -> bytes:
    return field[0]


def aws_says_resend(value: bytes) -> bool:
    """`amz-sdk-request: attempt=2; max=3`: attempts are counted from 1."""
    found = _AWS_ATTEMPT.search(value)
    return found is not None and int(found[1]) > 1


def stainless_says_resend(value: bytes) -> bool:
    """`x-stainless-retry-count: 1`: retries are counted, so the first call has 0."""
    text = value.strip(b" \t")
    return _COUNT.fullmatch(text) is not None and int(text) > 0


class SeenKeys:
    """Idempotency keys that came by lately."""

    __slots__ = ("_capacity", "_secret", "_seen", "ttl")

    def __init__(self, secret: bytes, ttl: float, capacity: int = 10_000) -> None:
        self._secret = secret[:_LONGEST_KEY]
        self.ttl = ttl
        self._capacity = capacity
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        """Keyed hash → when it last came by; the oldest first."""

    def __len__(self) -> int:
        return len(self._seen)

    def came_before(self, scope: bytes, key: bytes, now: float) -> bool:
        """Whether this key was here within the last `ttl` seconds; from now on it was. `scope` is what a key is unique
        in: the upstream and the credential."""
        # Length first, so that no two pairs of scope and key can look the same.
        digest = blake2b(b"%d:%b%b" % (len(scope), scope, key), digest_size=_DIGEST, key=self._secret).digest()
        seen = self._seen
        while seen and now - next(iter(seen.values())) >= self.ttl:
            seen.popitem(last=False)
        before = digest in seen
        seen[digest] = now
        seen.move_to_end(digest)
        if len(seen) > self._capacity:
            seen.popitem(last=False)
        return before
