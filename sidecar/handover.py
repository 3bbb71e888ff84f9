"""One sidecar takes the place of another without refusing a connection: `sidecar run --takeover`.

The listening sockets themselves are passed on, over a socket in `state_dir`. Two sockets on one port would lose what
waits to be accepted by the one that is closed; one socket that both hold loses nothing, whoever of them accepts.

    the new one                         the old one
    asks                            →
                                    ←   its listening sockets, and the addresses it was told to listen on
    accepts on them, is ready       →   accepts no more, drains
                                    ←   says so
    waits for the lock              …   finishes, closes the store, gives the lock of `state_dir` up

Law: until the new one is ready nothing has changed for the old one, so whoever fails on the way costs nothing. Only the
same user is talked to. Who owns `state_dir` is for its lock alone to say: what is said here promises nothing about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import orjson

from sidecar import clock
from sidecar.sockets import Given

_FILE = "handover"
_LONGEST_PATH = 100  # what fits into the address of a socket
_PATIENCE = 60.0
_MOST_SOCKETS = 16
_READY, _DRAINING = b"ready\n", b"draining\n"


class CannotTakeOver(Exception):
    """Why not, and what to do."""


class Offer:
    """The old one's side, open for as long as it serves. `given` are its sockets now; `taken` is called when a new one
    is ready, with its process id, and returns when nothing is accepted here any more."""

    def __init__(
        self, state_dir: Path, given: Callable[[], Sequence[Given]], taken: Callable[[int], Awaitable[None]]
    ) -> None:
        self._state_dir = state_dir
        self._given = given
        self._taken = taken
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Only for who has the lock. Raises OSError."""
        (self._state_dir / _FILE).unlink(missing_ok=True)  # of one that was killed
        self._socket = offering = socket.socket(socket.AF_UNIX)
        offering.setblocking(False)
        with _address(self._state_dir) as address:
            offering.bind(address)
        os.chmod(self._state_dir / _FILE, 0o600)
        offering.listen(2)
        self._serving = clock.spawn(self._serve(offering), "handover")

    def close(self) -> None:
        if self._socket is None or self._serving is None:
            return
        self._serving.cancel()
        self._socket.close()
        self._socket = None
        with contextlib.suppress(OSError):
            (self._state_dir / _FILE).unlink()

    async def _serve(self, offering: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(offering)
            with connection:
                try:
                    async with asyncio.timeout(_PATIENCE):
                        pid = await self._talk(connection)
                except (OSError, TimeoutError, ValueError, KeyError):
                    continue  # it came to nothing: here all is as before
                if pid:
                    self.close()
                    await asyncio.shield(clock.spawn(self._hand_over(pid, connection.dup()), "hand over"))
                    return

    async def _talk(self, connection: socket.socket) -> int:
        """The process id of who is ready; 0 if it went away."""
        loop = asyncio.get_running_loop()
        if _user_of(connection) not in (os.getuid(), 0):
            return 0
        asked = orjson.loads(await loop.sock_recv(connection, 4096))
        given = self._given()
        told = {"pid": os.getpid(), "sockets": [[one.role, one.host, one.port] for one in given]}
        socket.send_fds(connection, [orjson.dumps(told)], [one.socket.fileno() for one in given])
        return int(asked["pid"]) if await loop.sock_recv(connection, 64) == _READY else 0

    async def _hand_over(self, pid: int, connection: socket.socket) -> None:
        with connection:
            await self._taken(pid)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(connection, _DRAINING)


class Taking:
    """The new one's side. `given` are the sockets; `pid` is whose they were."""

    def __init__(self, state_dir: Path) -> None:
        """Raises CannotTakeOver. Blocks for a moment."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(_PATIENCE)
        try:
            with _address(state_dir) as address:
                self._connection.connect(address)
            self._connection.sendall(orjson.dumps({"pid": os.getpid()}))
            said, descriptors, _, _ = socket.recv_fds(self._connection, 65_536, _MOST_SOCKETS)
            told = orjson.loads(said)
        except (OSError, ValueError) as error:
            self._connection.close()
            raise CannotTakeOver(
                f"the sidecar that owns state_dir {state_dir} does not hand over ({error}): it is stopping, is being "
                "replaced already, or belongs to an older release or another user; wait for its end, then start"
            ) from error
        self.pid = int(told["pid"])
        self.given: list[Given] = []
        for (role, host, port), descriptor in zip(told["sockets"], descriptors, strict=True):
            os.set_inheritable(descriptor, False)
            self.given.append(Given(role, host, port, socket.socket(fileno=descriptor)))

    def ready(self) -> None:
        """We accept: from the answer on nobody else does. Raises CannotTakeOver. Blocks for a moment."""
        try:
            self._connection.sendall(_READY)
            said = self._connection.recv(64)
        except OSError as error:
            said = str(error).encode()
        finally:
            self._connection.close()
        if said != _DRAINING:
            raise CannotTakeOver(f"process {self.pid} ended or was replaced by another one meanwhile; start again")


@contextlib.contextmanager
def _address(state_dir: Path) -> Iterator[str]:
    """However long the path is."""
    path = state_dir.absolute() / _FILE
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{_FILE}"
    finally:
        os.close(folder)


def _user_of(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
