"""Who may use the listener: `Proxy-Authorization` against the hashed passwords of `listen.auth`.

Law: a password is checked once and then recognised by a keyed digest of what was sent, so a connection, and a request
on it, pays a look-up. The slow part runs in one thread of its own with a short queue: whoever guesses passwords waits
for himself. A wrong user costs as long as a wrong password. No password is kept, not even in memory.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from config.proxy_auth import PasswordHash, ProxyAuth
from sidecar import clock
from sidecar.failures import Refused

_REMEMBERED = 1024
_MOST_WAITING = 64
_NOBODY = PasswordHash("scrypt", (16_384, 8, 1), "nobodyssalt", bytes(64))
"""What the password of a user that does not exist is compared with."""


class Guard:
    """See the module's law."""

    def __init__(self, auth: ProxyAuth) -> None:
        self._users = auth.users
        self._secret = clock.unguessable(64).encode()
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()
        self._waiting = 0
        self._thread: ThreadPoolExecutor | None = None

    def verdict(self, credentials: bytes | None) -> bool | None:
        """Whether these are good; None when nobody has checked yet."""
        if credentials is None:
            return False
        return self._verdicts.get(self._digest(credentials))

    def admit(self, credentials: bytes) -> None:
        """Let in whoever sends exactly this: an app that was started with it."""
        self._remember(credentials, good=True)

    async def verify(self, credentials: bytes) -> None:
        """Check, and remember the verdict. Raises Refused when too many are waiting."""
        if self._waiting >= _MOST_WAITING:
            raise Refused("OVERLOADED", "too many passwords are being checked", reason="auth", retry_after=1)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "sidecar-passwords")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            good = await loop.run_in_executor(self._thread, self._is_right, credentials)
        finally:
            self._waiting -= 1
        self._remember(credentials, good=good)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_right(self, credentials: bytes) -> bool:
        user, password = _taken_apart(credentials)
        known = self._users.get(user) if user is not None else None
        right = matches(password, known or _NOBODY)
        return right and known is not None

    def _remember(self, credentials: bytes, *, good: bool) -> None:
        self._verdicts[self._digest(credentials)] = good
        if len(self._verdicts) > _REMEMBERED:
            wrong = next((digest for digest, verdict in self._verdicts.items() if not verdict), None)
            del self._verdicts[next(iter(self._verdicts)) if wrong is None else wrong]

    def _digest(self, credentials: bytes) -> bytes:
        return blake2b(credentials, digest_size=16, key=self._secret).digest()


def required() -> Refused:
    return Refused(
        "PROXY_AUTH_REQUIRED",
        "this sidecar is for known users: set HTTP_PROXY=http://user:password@host:port as `listen.auth` expects",
        reason="proxy_auth",
    )


def matches(password: bytes, kept: PasswordHash) -> bool:
    salt = kept.salt.encode()
    if kept.method == "scrypt":
        n, r, p = kept.costs
        made = hashlib.scrypt(
            password, salt=salt, n=n, r=r, p=p, maxmem=132 * n * r * p + 65_536, dklen=len(kept.digest)
        )
    else:
        made = hashlib.pbkdf2_hmac(kept.method, password, salt, kept.costs[0], len(kept.digest))
    return hmac.compare_digest(made, kept.digest)


def hashed(password: bytes) -> str:
    """For `listen.auth.users`."""
    salt = clock.unguessable(24)
    made = hashlib.scrypt(password, salt=salt.encode(), n=16_384, r=8, p=1, dklen=64)
    return f"scrypt:16384:8:1${salt}${made.hex()}"


def basic(user: str, password: str) -> bytes:
    """What a client sends for these."""
    return b"Basic " + base64.b64encode(f"{user}:{password}".encode())


def user_of(credentials: bytes | None) -> bytes:
    """The name in credentials that were found to be good."""
    user = None if credentials is None else _taken_apart(credentials)[0]
    return b"" if user is None else user.encode()


def _taken_apart(credentials: bytes) -> tuple[str | None, bytes]:
    scheme, _, encoded = credentials.strip().partition(b" ")
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
        user, colon, password = decoded.partition(b":")
        named = user.decode()
    except ValueError:
        return None, b""
    return (named, password) if scheme.lower() == b"basic" and colon else (None, b"")
