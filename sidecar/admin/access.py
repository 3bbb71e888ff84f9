"""Who asks: the tokens of `admin.token_file`, their roles, and those who guess.

Law: with a file nobody asks anything without one of its tokens; `read` may only look. Every token is compared, each in
constant time. The file is read again when it changed; a new one that cannot be used changes nothing and is told in
the log. A token of the file always opens, whatever else came from its address: comparing costs next to nothing, and
256 random bits are not guessed. Whoever brings too many different wrong ones is told to wait (429), and is in the log
no more until then.
"""

from __future__ import annotations

import hmac
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from config.tokens import Token, WrongTokens, digest_of, read_tokens
from sidecar import clock
from sidecar.admin.problem import Problem
from sidecar.proxy import Proxy

WHO = web.RequestKey("sidecar.who", str)
"""The name of the token that was shown; absent when none is needed."""
ROLE = web.RequestKey("sidecar.role", str)
"""Its role."""

MOST_GUESSES = 10
GUESS_WINDOW = 60.0
_MOST_STRANGERS = 1_000
_LONGEST_TOKEN = 500
_LOOKING = frozenset({"GET", "HEAD"})
_HOW = "send one as Bearer in the Authorization field; the command line takes --token-file or SIDECAR_ADMIN_TOKEN"


class Stamp(NamedTuple):
    """What tells that a file is another one than before."""

    inode: int
    changed: int
    size: int


class Access:
    """For one listener. `path` may change with the configuration."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._path: Path | None = None
        self._stamp: Stamp | None = None
        self._tokens: tuple[Token, ...] = ()
        self._wrong: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    @property
    def needs_token(self) -> bool:
        return self._proxy.settings.admin.token_file is not None

    def admit(self, request: web.Request) -> None:
        """Notes who asks, or raises a Problem."""
        self._refresh()
        shown = _shown(request)
        token = self._known(digest_of(shown))
        if token is None:
            raise self._refusal(request.remote or "", digest_of(shown))
        if token.role == "read" and request.method not in _LOOKING:
            raise Problem(
                403,
                "INSUFFICIENT_PERMISSIONS",
                f"the token of {token.name} has the role read, which may only look; "
                f"{request.method[:20]} needs one with the role operate",
            )
        request[WHO], request[ROLE] = token.name, token.role

    def _refusal(self, stranger: str, digest: str) -> Problem:
        """Of a wrong token. Many of them from one address are told of no longer, in the log neither."""
        now = clock.monotonic()
        guesses = self._guesses(stranger, now)
        if guesses is not None and len(guesses) >= MOST_GUESSES:
            wait = math.ceil(next(iter(guesses.values())) + GUESS_WINDOW - now)
            return Problem(
                429,
                "RATE_LIMIT_EXCEEDED",
                f"too many wrong tokens came from {stranger}; try again in {wait} s",
                headers={"Retry-After": str(wait)},
            )
        self._note_guess(stranger, digest, now)
        return _unauthorised(f"this token is not in admin.token_file, or is there no longer; {_HOW}")

    def _known(self, digest: str) -> Token | None:
        found = None
        for token in self._tokens:  # all of them, so that the time tells nothing
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def _guesses(self, stranger: str, now: float) -> OrderedDict[str, float] | None:
        """Wrong tokens that came lately from there, oldest first."""
        guesses = self._wrong.get(stranger)
        while guesses and next(iter(guesses.values())) + GUESS_WINDOW <= now:
            guesses.popitem(last=False)
        return guesses

    def _note_guess(self, stranger: str, digest: str, now: float) -> None:
        guesses = self._wrong.setdefault(stranger, OrderedDict())
        self._wrong.move_to_end(stranger)
        if len(self._wrong) > _MOST_STRANGERS:
            self._wrong.popitem(last=False)
        if digest in guesses:
            return
        guesses[digest] = now
        self._proxy.log.warn(
            "sidecar.admin.wrong_token",
            f"a wrong token was shown to the admin port from {stranger}",
            client=stranger,
            wrong_tokens=len(guesses),
        )

    def _refresh(self) -> None:
        path = self._proxy.settings.admin.token_file
        if path is None:
            return
        stamp = _stamp(path)
        if path == self._path and stamp == self._stamp:
            return
        first, self._path, self._stamp = self._path is None, path, stamp
        try:
            self._tokens = read_tokens(path)
        except WrongTokens as wrong:
            self._proxy.log.error(
                "sidecar.admin.tokens_unusable",
                f"admin.token_file {path}: {wrong}. The tokens from before stay good.",
                file=str(path),
            )
            return
        if not first:
            names = ", ".join(token.name for token in self._tokens)
            self._proxy.log.info("sidecar.admin.tokens_read", f"admin.token_file was read again: {names}")


def _stamp(path: Path) -> Stamp | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return Stamp(seen.st_ino, seen.st_mtime_ns, seen.st_size)


def _shown(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise _unauthorised(f"the admin port wants a token; {_HOW}")
    if len(token) > _LONGEST_TOKEN:
        raise _unauthorised("this is no token, it is too long")
    return token


def _unauthorised(message: str) -> Problem:
    return Problem(401, "INVALID_API_KEY", message, headers={"WWW-Authenticate": 'Bearer realm="sidecar"'})
