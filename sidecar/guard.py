"""Who may use the listener: `Proxy-Authorization` against the hashed passwords of `listen.auth`.

Law: a password is checked once and then recognised by a keyed digest of what was sent, so a connection, and a request
on it, pays a look-up; what was wrong once is refused by the same look-up. The slow part runs in one thread of its own
with a short queue, in which the same credentials stand once, however many connections sent them. Who guesses keeps
nobody else out: see `_rank`. A wrong user costs as long as a wrong password. No password is kept for longer than it
waits for its check.
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
_MOST_TURNED_AWAY = 8_192
_GUESSING = 10
"""So many different wrong ones are no typing errors."""
_LONGEST_REST = 0.5
_NOBODY = PasswordHash("scrypt", (16_384, 8, 1), "nobodyssalt", bytes(64))
"""What the password of a user that does not exist is compared with."""


class _Check:
    """Credentials that wait for their verdict, and everybody who sent them."""

    __slots__ = ("address", "asked", "credentials", "verdict")

    def __init__(self, credentials: bytes, address: str, asked: int, verdict: asyncio.Future[None]) -> None:
        self.credentials = credentials
        self.address = address
        self.asked = asked
        self.verdict = verdict


class Guard:
    """See the module's law."""

    def __init__(self, auth: ProxyAuth) -> None:
        self.users = auth.users
        """Other ones are another object: who was let in under these has to be looked up again."""
        self._secret = clock.unguessable(64).encode()
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()
        self._admitted: set[bytes] = set()
        self._waiting: dict[bytes, _Check] = {}
        self._under_way: _Check | None = None
        self._turned_away: OrderedDict[bytes, int] = OrderedDict()
        """How often what did not fit was asked for."""
        self._wrong: OrderedDict[str, int] = OrderedDict()
        """Different wrong ones by address, since the last right one from there."""
        self._worker: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def verdict(self, credentials: bytes | None) -> bool | None:
        """Whether these are good; None when nobody has checked yet."""
        if credentials is None:
            return False
        digest = self._digest(credentials)
        return True if digest in self._admitted else self._verdicts.get(digest)

    def admit(self, credentials: bytes) -> None:
        """Let in whoever sends exactly this: an app that was started with it."""
        self._admitted.add(self._digest(credentials))

    def configure(self, auth: ProxyAuth) -> None:
        """Let in these from now on; what is known about the others is forgotten."""
        if auth.users != self.users:
            self.users = auth.users
            self._verdicts.clear()

    async def verify(self, credentials: bytes, address: str = "") -> None:
        """Check, and remember the verdict. Raises Refused when too many are waiting who were first or are trusted
        more."""
        digest = self._digest(credentials)
        check = self._waiting.get(digest)
        if check is None and self._under_way is not None and self._under_way.credentials == credentials:
            check = self._under_way
        if check is None:
            check = _Check(credentials, address, self._turned_away.pop(digest, 0) + 1, _future())
            if len(self._waiting) >= _MOST_WAITING:
                self._make_room(digest, check)
            self._waiting[digest] = check
        else:
            check.asked += 1
        if self._worker is None:
            self._worker = clock.spawn(self._work(), "passwords")
        await asyncio.shield(check.verdict)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- who is next ---------------------------------------------------------------------------------------------

    def _rank(self, check: _Check) -> tuple[bool, int]:
        """The higher, the sooner. Addresses that guess stand behind all others. Among the rest those come first that
        were sent most often: an app repeats its password, a guess is sent once."""
        return self._wrong.get(check.address, 0) < _GUESSING, check.asked

    def _make_room(self, digest: bytes, wanted: _Check) -> None:
        least = min(self._waiting, key=lambda waiting: self._rank(self._waiting[waiting]))
        waits_on = self._waiting[least]
        if self._rank(waits_on) >= self._rank(wanted):
            self._turn_away(digest, wanted.asked)
            raise _too_many()
        del self._waiting[least]
        self._turn_away(least, waits_on.asked)
        waits_on.verdict.set_exception(_too_many())

    def _turn_away(self, digest: bytes, asked: int) -> None:
        self._turned_away[digest] = asked
        self._turned_away.move_to_end(digest)
        if len(self._turned_away) > _MOST_TURNED_AWAY:
            self._turned_away.popitem(last=False)

    # ---- the slow part -------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """One at a time; while what comes is wrong, at most half of the time of one processor."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "sidecar-passwords")
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                digest = max(self._waiting, key=lambda waiting: self._rank(self._waiting[waiting]))
                check = self._under_way = self._waiting.pop(digest)
                began, users = clock.monotonic(), self.users
                try:
                    good = await loop.run_in_executor(self._thread, self._is_right, check.credentials)
                except Exception:  # out of memory, or out of threads: not their fault, and no verdict
                    check.verdict.set_exception(_too_many())
                    self._under_way = None
                    continue
                if users is self.users:  # else others came into force meanwhile, and whoever waits asks again
                    self._remember(check.credentials, good=good)
                    self._note(check.address, good=good)
                check.verdict.set_result(None)
                self._under_way = None
                if not good:
                    await clock.sleep(min(clock.monotonic() - began, _LONGEST_REST))
        finally:
            self._worker = None
            for left in (self._under_way, *self._waiting.values()):
                if left is not None and not left.verdict.done():
                    left.verdict.cancel()  # the sidecar ends
            self._waiting.clear()

    def _note(self, address: str, *, good: bool) -> None:
        if good:
            self._wrong.pop(address, None)
            return
        self._wrong[address] = self._wrong.get(address, 0) + 1
        self._wrong.move_to_end(address)
        if len(self._wrong) > _REMEMBERED:
            self._wrong.popitem(last=False)

    def _is_right(self, credentials: bytes) -> bool:
        user, password = _taken_apart(credentials)
        known = self.users.get(user) if user is not None else None
        right = matches(password, known or _NOBODY)
        return right and known is not None

    def _remember(self, credentials: bytes, *, good: bool) -> None:
        self._verdicts[self._digest(credentials)] = good
        if len(self._verdicts) > _REMEMBERED:
            wrong = next((digest for digest, verdict in self._verdicts.items() if not verdict), None)
            del self._verdicts[next(iter(self._verdicts)) if wrong is None else wrong]

    def _digest(self, credentials: bytes) -> bytes:
        return blake2b(credentials, digest_size=16, key=self._secret).digest()


def _future() -> asyncio.Future[None]:
    made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    made.add_done_callback(_look_at)
    return made


def _look_at(verdict: asyncio.Future[None]) -> None:
    """Everybody who waited for it may have left."""
    if not verdict.cancelled():
        verdict.exception()


def _too_many() -> Refused:
    return Refused("OVERLOADED", "too many passwords are being checked; send yours again", reason="auth", retry_after=1)


def required() -> Refused:
    return Refused(
        "PROXY_AUTH_REQUIRED",
        "this sidecar is for known users (`listen.auth`): put the name and password before the host in HTTP_PROXY and "
        "HTTPS_PROXY; a client that uses it as base URL sends them in Proxy-Authorization",
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
