"""Names → addresses, with a cache that follows changes.

Law: the system's resolver is asked (so /etc/hosts, search domains and NSS work as everywhere else), never more
than once at a time per name. An answer is used for `FRESH_FOR` seconds, then refreshed; a failed connection
makes it old at once. `gone(host, address)` tells pools which connections point at an address that the name has
not had for `FORGET_AFTER` seconds, so that a moved service is followed even by connections in constant use.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from sidecar import clock
from sidecar.failures import AttemptFailed

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
Lookup = Callable[[str, int], Awaitable[list[AddressInfo]]]

FRESH_FOR = 10.0
FORGET_AFTER = 30.0
_REMEMBERED_NAMES = 2048


class _Name:
    __slots__ = ("answer", "asked_at", "asking", "seen")

    def __init__(self) -> None:
        self.answer: list[AddressInfo] = []
        self.asked_at = float("-inf")
        self.asking: asyncio.Task[None] | None = None
        self.seen: dict[str, float] = {}


class Resolver:
    """The cache. `lookup` is getaddrinfo; tests pass their own."""

    def __init__(self, lookup: Lookup | None = None, now: Callable[[], float] = clock.monotonic) -> None:
        self._lookup = lookup or _system_lookup
        self._now = now
        self._names: OrderedDict[tuple[str, int], _Name] = OrderedDict()

    async def addresses(self, host: str, port: int) -> list[AddressInfo]:
        key = (host, port)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = _Name()
            if len(self._names) > _REMEMBERED_NAMES:
                self._names.popitem(last=False)
        else:
            self._names.move_to_end(key)
        if self._now() - name.asked_at >= FRESH_FOR:
            await asyncio.shield(self._ask(key, name))
        return name.answer

    def refresh(self, host: str, port: int) -> None:
        """Ask again in the background if the answer is old; errors leave the old answer in place."""
        name = self._names.get((host, port))
        if name is not None and self._now() - name.asked_at >= FRESH_FOR:
            name.asking = self._ask((host, port), name)

    def failed(self, host: str, port: int) -> None:
        """A connection could not be made: do not trust the cached answer again."""
        name = self._names.get((host, port))
        if name is not None:
            name.asked_at = float("-inf")

    def gone(self, host: str, port: int, address: str) -> bool:
        name = self._names.get((host, port))
        if name is None or address not in name.seen:
            return False
        return self._now() - name.seen[address] > FORGET_AFTER and name.asked_at > name.seen[address]

    def _ask(self, key: tuple[str, int], name: _Name) -> asyncio.Task[None]:
        asking = name.asking
        if asking is None or asking.done():
            asking = name.asking = clock.spawn(self._answer(key, name), f"resolve {key[0]}")
            asking.add_done_callback(clock.heard)
        return asking

    async def _answer(self, key: tuple[str, int], name: _Name) -> None:
        try:
            answer = await self._lookup(*key)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise AttemptFailed("DNS_FAILURE", f"the name {key[0]} could not be resolved: {why}") from error
        if not answer:
            raise AttemptFailed("DNS_FAILURE", f"the name {key[0]} has no address")
        name.answer = answer
        name.asked_at = self._now()
        for info in answer:
            name.seen[info[4][0]] = name.asked_at
        if len(name.seen) > 64:
            for address in sorted(name.seen, key=name.seen.__getitem__)[:-64]:
                del name.seen[address]


async def _system_lookup(host: str, port: int) -> list[AddressInfo]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [(int(family), int(kind), proto, name, tuple(address)) for family, kind, proto, name, address in found]
