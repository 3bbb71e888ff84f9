"""Where the listening sockets come from: opened here, by the service manager (systemd), or by the sidecar before.

Law: a socket from elsewhere is used only at the address that the configuration names, because that address is what
was checked (a listener beyond loopback needs more). One that fits nowhere is refused, never left open unheard.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from config.addresses import join_host_port

if TYPE_CHECKING:
    import asyncio

ROLES = ("listen", "admin", "probes")
_FIRST = 3  # after standard error
_BACKLOG = 4096
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class CannotListen(Exception):
    """Why not, and what to do."""


class Given(NamedTuple):
    """A socket that listens already. `role` is None where its opener did not say what it is for; `host` and `port` are
    what its opener was asked for."""

    role: str | None
    host: str
    port: int
    socket: socket.socket


class GivenSockets:
    """Opened by somebody else; `whose` for people."""

    def __init__(self, given: Iterable[Given], whose: str, *, all_of_them: bool = False) -> None:
        """`all_of_them`: that one is left over is a mistake, since whoever opened it believes that it is served."""
        self._left = list(given)
        self._whose = whose
        self._strict = all_of_them

    def take(self, role: str, host: str, port: int) -> list[socket.socket]:
        """Those for this listener; none if there are none."""
        mine = [one for one in self._left if one.role in (role, None) and _fits(one, host, port)]
        self._left = [one for one in self._left if one not in mine]
        return [one.socket for one in mine]

    def close(self) -> None:
        """Every listener has been opened: nothing else is."""
        left, self._left = self._left, []
        for one in left:
            one.socket.close()
        if left and self._strict:
            places = ", ".join(join_host_port(one.host, one.port) + (f" ({one.role})" * bool(one.role)) for one in left)
            raise CannotListen(
                f"{self._whose} passes a socket for {places}, which is no listener of the configuration; write the "
                "same address in both, and name the socket listen, admin or probes (FileDescriptorName=)"
            )


def _fits(one: Given, host: str, port: int) -> bool:
    if port not in (0, one.port):
        return False
    if one.host == host:
        return True
    try:
        return host == "localhost" and ipaddress.ip_address(one.host).is_loopback
    except ValueError:
        return False


def from_service_manager(environ: Mapping[str, str], pid: int) -> GivenSockets | None:
    """What systemd passes on with `LISTEN_FDS`; None if it passes nothing, or to somebody else."""
    if environ.get("LISTEN_PID") != str(pid):
        return None
    try:
        count = int(environ.get("LISTEN_FDS", "0"))
    except ValueError:
        return None
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    names += [""] * (count - len(names))
    given = [_given(_FIRST + place, name) for place, name in zip(range(count), names, strict=False)]
    return GivenSockets(given, "the service manager", all_of_them=True) if given else None


def _given(descriptor: int, name: str) -> Given:
    os.set_inheritable(descriptor, False)
    try:
        sock = socket.socket(fileno=descriptor)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise CannotListen(f"descriptor {descriptor} ({name}) of the service manager is no socket: {error}") from error
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6):
        raise CannotListen(
            f"descriptor {descriptor} ({name}) of the service manager does not listen for TCP; use ListenStream= with "
            "an address and a port"
        )
    host, port = sock.getsockname()[:2]
    return Given(name if name in ROLES else None, host, port, sock)


def forget(environ: os._Environ[str]) -> None:
    """The sockets are ours: no program that we start may take the variables for its own."""
    for name in _VARIABLES:
        environ.pop(name, None)


async def listening(
    loop: asyncio.AbstractEventLoop,
    accept: Callable[[], asyncio.Protocol],
    role: str,
    place: tuple[str, int],
    given: GivenSockets | None,
    *,
    shared: bool = False,
    at_once: bool = True,
) -> list[asyncio.Server]:
    """Accept connections there: from now on, or, without `at_once`, from `start_serving` on, so that whoever takes the
    place of another takes no connection before its last listener is open. `shared`: others may listen there too."""
    host, port = place
    mine = [] if given is None else given.take(role, host, port)
    if mine:
        return [await loop.create_server(accept, sock=sock, backlog=_BACKLOG, start_serving=at_once) for sock in mine]
    reuse = shared or None
    try:
        return [await loop.create_server(accept, host, port, backlog=_BACKLOG, reuse_port=reuse, start_serving=at_once)]
    except OSError as error:
        raise _cannot_bind(error, role, host, port) from error


def _cannot_bind(error: OSError, role: str, host: str, port: int) -> CannotListen:
    where = join_host_port(host, port)
    if error.errno == errno.EADDRINUSE:
        return CannotListen(
            f"{role}: {where} is in use by another program (maybe another sidecar); "
            f"stop it, or set SIDECAR__{role.upper()}__PORT"
        )
    if error.errno == errno.EACCES:
        return CannotListen(f"{role}: no permission to listen on {where}; ports below 1024 need privileges")
    return CannotListen(f"{role}: cannot listen on {where}: {error.strerror or error}")
