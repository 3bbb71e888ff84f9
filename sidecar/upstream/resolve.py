"""Names → addresses, with a cache that follows changes and outlives a name server.

Law: the system's resolver is asked (so /etc/hosts, search domains and NSS work as everywhere else), never more
than once at a time per name. An answer is used for `FRESH_FOR` seconds, then refreshed; a failed connection
makes it old at once. Nobody waits longer than `LOOKUP_TIMEOUT` for an answer, and nobody at all for a question that
has been open for that long. While a name server does not answer, or says that it cannot, the last answer stays good
for `STALE_FOR` seconds; a name that is said not to exist has none. `gone(host, address)` tells pools which connections
point at an address that the name has not had for `FORGET_AFTER` seconds, so that a moved service is followed even by
connections in constant use.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from sidecar import clock
from sidecar.failures import AttemptFailed
from sidecar.upstream.system_lookup import AddressInfo, SystemLookup

Lookup = Callable[[str, int], Awaitable[list[AddressInfo]]]

FRESH_FOR = 10.0
FORGET_AFTER = 30.0
LOOKUP_TIMEOUT = 5.0
STALE_FOR = 3600.0
STALE_PATIENCE = 1.0
"""So long a new answer is waited for where an old one could be used."""
ASK_AGAIN_AFTER = 1.0
"""A name that fails is asked for again after this, where an old answer is used meanwhile."""
_REMEMBERED_NAMES = 2048
_NO_SUCH_NAME = frozenset((socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)))


class _Name:
    __slots__ = ("answer", "answered_at", "asked_at", "asking", "begun_at", "failed_at", "failure", "port", "seen")

    def __init__(self) -> None:
        self.answer: list[AddressInfo] = []
        self.answered_at = float("-inf")
        self.asked_at = float("-inf")
        self.asking: asyncio.Task[None] | None = None
        self.begun_at = 0.0
        self.failure: str | None = None
        """Why the last question had no answer."""
        self.failed_at = float("-inf")
        self.port = 0
        """That the answer was asked for. For another one the answer differs in nothing else."""
        self.seen: dict[str, float] = {}


class Resolver:
    """The cache. `lookup` is the system's; tests pass their own. `on_stale` hears, once per outage, of a name whose
    old answer is used, and why."""

    def __init__(
        self,
        lookup: Lookup | None = None,
        now: Callable[[], float] = clock.monotonic,
        getaddrinfo: Callable[..., list[Any]] | None = None,
    ) -> None:
        self._lookup = lookup or SystemLookup(self._is_known, LOOKUP_TIMEOUT, now, getaddrinfo)
        self._now = now
        self._names: OrderedDict[str, _Name] = OrderedDict()
        self.configured: Collection[str] = frozenset()
        """Names that the configuration has: they are asked for before those that only a request has."""
        self.on_stale: Callable[[str, str], None] = lambda host, why: None

    async def addresses(self, host: str, port: int) -> list[AddressInfo]:
        name = self._name(host)
        if self._now() - name.asked_at >= FRESH_FOR:
            await self._renew(host, port, name)
        if port == name.port:
            return name.answer
        return [(*info[:4], (info[4][0], port, *info[4][2:])) for info in name.answer]

    def refresh(self, host: str, port: int) -> None:
        """Ask again in the background if the answer is old; errors leave the old answer in place."""
        name = self._names.get(host)
        if name is not None and self._now() - name.asked_at >= FRESH_FOR and not self._failed_just_now(name):
            self._ask(host, port, name)

    def failed(self, host: str, port: int) -> None:
        """A connection could not be made: do not trust the cached answer again."""
        name = self._names.get(host)
        if name is not None:
            name.asked_at = float("-inf")

    def gone(self, host: str, port: int, address: str) -> bool:
        name = self._names.get(host)
        if name is None or address not in name.seen:
            return False
        return self._now() - name.seen[address] > FORGET_AFTER and name.asked_at > name.seen[address]

    def close(self) -> None:
        """Nobody needs an answer any more. What the system still thinks about is left behind."""
        for name in self._names.values():
            if name.asking is not None:
                name.asking.cancel()

    async def _renew(self, host: str, port: int, name: _Name) -> None:
        usable = self._usable(name)
        if usable and self._failed_just_now(name):
            return
        self._ask(host, port, name)
        question = name.asking
        assert question is not None
        patience = name.begun_at + LOOKUP_TIMEOUT - self._now()
        if usable:
            patience = 0.0 if name.failure is not None else min(patience, STALE_PATIENCE)
        await asyncio.wait((question,), timeout=max(0.0, patience))
        if question.done():
            question.result()  # what nobody has thought of is not taken for an answer
        else:
            open_for = self._now() - name.begun_at
            self._fail(host, name, f"the name server has not answered for {max(open_for, patience):.3g} s")
        if name.failure is not None and not self._usable(name):
            raise AttemptFailed("DNS_FAILURE", f"the name {host} could not be resolved: {name.failure}")

    def _name(self, host: str) -> _Name:
        name = self._names.get(host)
        if name is None:
            name = self._names[host] = _Name()
            if len(self._names) > _REMEMBERED_NAMES:
                # Not one that is asked for: the next who wants it would ask beside it.
                idle = (h for h, known in self._names.items() if known is not name and not _is_asking(known))
                self._names.pop(next(idle, host))
        else:
            self._names.move_to_end(host)
        return name

    def _usable(self, name: _Name) -> bool:
        return bool(name.answer) and self._now() - name.answered_at < STALE_FOR

    def _failed_just_now(self, name: _Name) -> bool:
        return name.failure is not None and self._now() - name.failed_at < ASK_AGAIN_AFTER

    def _is_known(self, host: str) -> bool:
        name = self._names.get(host)
        return host in self.configured or (name is not None and bool(name.answer))

    def _ask(self, host: str, port: int, name: _Name) -> None:
        if name.asking is None or name.asking.done():
            name.begun_at = self._now()
            name.asking = clock.spawn(self._answer(host, port, name), f"resolve {host}")
            name.asking.add_done_callback(clock.heard)

    async def _answer(self, host: str, port: int, name: _Name) -> None:
        try:
            answer = await self._lookup(host, port)
        except UnicodeError as error:
            self._fail(host, name, str(error), exists=False)
            return
        except OSError as error:
            exists = not (isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME)
            self._fail(host, name, error.strerror or str(error), exists=exists)
            return
        if not answer:
            self._fail(host, name, "it has no address", exists=False)
            return
        name.answer, name.port, name.failure = answer, port, None
        name.asked_at = name.answered_at = self._now()
        for info in answer:
            name.seen[info[4][0]] = name.asked_at
        if len(name.seen) > 64:
            for address in sorted(name.seen, key=name.seen.__getitem__)[:-64]:
                del name.seen[address]

    def _fail(self, host: str, name: _Name, why: str, *, exists: bool = True) -> None:
        first = name.failure is None
        name.failure, name.failed_at = why, self._now()
        if not exists:
            name.answer = []
        elif first and self._usable(name):
            self.on_stale(host, why)


def _is_asking(name: _Name) -> bool:
    return name.asking is not None and not name.asking.done()
