"""Is this call the caller's own resend? Retries stacked on retries multiply, so they are counted and shown.

Law: pure, told the time, bounded. Client libraries say so in a header; an idempotency key that comes back says so
too. Of keys only a keyed hash is remembered, so that memory holds nothing worth stealing.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from hashlib import blake2b

_DIGEST = 16
_LONGEST_KEY = 64  # what blake2b takes
_AWS_ATTEMPT = re.compile(rb"(?:^|;)\s*attempt\s*=\s*([0-9]{1,9})\s*(?:;|$)", re.IGNORECASE)
_COUNT = re.compile(rb"[0-9]{1,9}")


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
