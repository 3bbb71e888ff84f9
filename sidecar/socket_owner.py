"""Which program is at the other end of a connection on this machine, as far as the kernel tells us.

Law: asks the kernel for that one socket, or reads its table where it does not answer (a sandbox); then reads /proc, a
bounded number of lines, processes and links. It belongs in a thread. Not to know is an answer: another machine, another
user, another namespace of processes, no Linux, too much to look through. A program is what it was started as and not
its pid, so that a command that is run every minute stays the same client; with another bundle of trusted authorities in
its environment it is another one.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from ipaddress import IPv6Address, ip_address
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sidecar.policy.demotion import Program
from sidecar.variables import APPENDS, REPLACES

Endpoint = tuple[str, int]

_LINES = 50_000
_PROCESSES = 4_096
_LINKS = 32_768
_RECENT = 32
_MOST_OF_A_FILE = 262_144
_LONGEST_NAME = 80
_ESTABLISHED = b"01"
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_HEAD = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_WHICH = struct.Struct("=BBBBI2s2s16s16sIII")  # inet_diag_req_v2: family, protocol, -, -, states, then the socket's id
_ABOUT = struct.Struct("=BBBB2s2s16s16sIIIIIIII")  # inet_diag_msg: family, state, …, the id, …, user, inode
_ANY_STATE = _NO_COOKIE = 0xFFFFFFFF
_PATIENCE = 1.0
_TRUST = tuple(f"{name}=".encode() for name in (*REPLACES, *APPENDS, "SSL_CERT_DIR"))


class Owner(NamedTuple):
    """Of a socket, as /proc/net/tcp has it."""

    uid: int
    inode: int


def owner_among(lines: Iterable[bytes], local: bytes, remote: bytes) -> Owner | None:
    """Who holds the connection from `local` to `remote`, both as `in_kernel_words` writes them. Lines that are none are
    passed over."""
    pair = b" %b %b " % (local, remote)
    for line in lines:
        if pair not in line:
            continue
        words = line.split()
        if len(words) < 10 or words[1] != local or words[3] != _ESTABLISHED:
            continue
        if words[7].isdigit() and words[9].isdigit() and words[9] != b"0":  # 0: nobody holds it any more
            return Owner(int(words[7]), int(words[9]))
    return None


def owner_by_diagnosis(local: Endpoint, remote: Endpoint) -> Owner | None:
    """The same, for one socket, from sock_diag(7): the table takes milliseconds as soon as there are thousands."""
    version = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    ends = [socket.inet_pton(version, address).ljust(16, b"\0") for address, _ in (local, remote)]
    ports = [port.to_bytes(2, "big") for _, port in (local, remote)]
    which = _WHICH.pack(version, socket.IPPROTO_TCP, 0, 0, _ANY_STATE, *ports, *ends, 0, _NO_COOKIE, _NO_COOKIE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_PATIENCE)
            kernel.send(_HEAD.pack(_HEAD.size + len(which), _SOCK_DIAG_BY_FAMILY, 1, 1, 0) + which)
            told = kernel.recv(4096)
    except OSError:
        return None
    if len(told) < _HEAD.size + _ABOUT.size or _HEAD.unpack_from(told)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: mostly that there is none
    _, state, _, _, *found, _, _, _, _, _, _, uid, inode = _ABOUT.unpack_from(told, _HEAD.size)
    # Where no such connection is, the kernel offers whoever listens there.
    return Owner(uid, inode) if inode and state == int(_ESTABLISHED) and found[:2] == ports else None


def in_kernel_words(endpoint: Endpoint, *, mapped: bool = False) -> bytes:
    """`127.0.0.1`, 8080 → `0100007F:1F90`, on a machine whose words begin with their low byte. `mapped`: an IPv4
    address as tcp6 has it."""
    address, port = endpoint
    if ":" in address:
        raw = socket.inet_pton(socket.AF_INET6, address)
    else:
        raw = (b"\0" * 10 + b"\xff\xff" if mapped else b"") + socket.inet_pton(socket.AF_INET, address)
    words = (int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4))
    return b"%b:%04X" % (b"".join(b"%08X" % word for word in words), port)


def on_loopback(address: str) -> str | None:
    """The address as it is usually written, if both ends are on this machine."""
    try:
        found = ip_address(address)
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found) if found.is_loopback else None


class SocketOwners:
    """Looks them up. Whoever was found lately is looked at first."""

    def __init__(self, proc: Path = Path("/proc"), processes: int = _PROCESSES, links: int = _LINKS) -> None:
        self._proc = proc
        self._processes = processes
        self._links = links
        self._recent: tuple[int, ...] = ()

    def program_at(self, peer: Endpoint, ours: Endpoint) -> Program | None:
        """What called from `peer`. For a thread: it may read thousands of links."""
        try:
            owner = self._owner(peer, ours)
            # What others run is closed to us, unless we may look at everything.
            if owner is None or os.geteuid() not in (0, owner.uid):
                return None
            pid = self._holder(owner)
            return None if pid is None else self._program(self._proc / str(pid))
        except (OSError, ValueError):  # it has ended meanwhile, or this is no Linux
            return None

    def _owner(self, peer: Endpoint, ours: Endpoint) -> Owner | None:
        found = owner_by_diagnosis(peer, ours)
        if found is not None:
            return found
        tables = [("tcp6", False)] if ":" in peer[0] else [("tcp", False), ("tcp6", True)]
        for table, mapped in tables:
            try:
                with (self._proc / "net" / table).open("rb") as lines:
                    found = owner_among(
                        islice(lines, _LINES),
                        in_kernel_words(peer, mapped=mapped),
                        in_kernel_words(ours, mapped=mapped),
                    )
            except FileNotFoundError:
                continue
            if found is not None:
                return found
        return None

    def _holder(self, owner: Owner) -> int | None:
        """The pid; of several that share it the first."""
        wanted, left = f"socket:[{owner.inode}]", self._links
        for pid in self._candidates(owner.uid):
            try:
                with os.scandir(self._proc / str(pid) / "fd") as entries:
                    for entry in entries:
                        left -= 1
                        if left < 0:
                            return None
                        if _link(entry.path) == wanted:
                            self._recent = (pid, *(one for one in self._recent if one != pid))[:_RECENT]
                            return pid
            except OSError:
                continue
        return None

    def _candidates(self, uid: int) -> Iterator[int]:
        recent = self._recent
        yield from recent
        others = sorted((int(name) for name in os.listdir(self._proc) if name.isdigit()), reverse=True)
        for pid in others[: self._processes]:  # the newest first: what has run for long is among the recent ones
            try:
                if pid not in recent and os.stat(self._proc / str(pid)).st_uid == uid:
                    yield pid
            except OSError:
                continue

    def _program(self, process: Path) -> Program:
        file = os.readlink(process / "exe")
        arguments = _read(process / "cmdline")
        try:
            environment = _read(process / "environ").split(b"\0")
        except OSError:
            environment = []
        trust = sorted(line for line in environment if line.startswith(_TRUST))
        whole = b"\0\0".join([os.fsencode(file), arguments, *trust])
        return Program(_name(file, arguments), hashlib.sha256(whole).hexdigest()[:12])


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_OF_A_FILE)


def _name(file: str, arguments: bytes) -> str:
    """`python3.12 app.py`, `python3.12 -m app`, `curl`: what follows may hold secrets."""
    words = [word.decode(errors="replace") for word in arguments.split(b"\0")[1:3]]
    name = os.path.basename(file.removesuffix(" (deleted)"))
    if words[:1] == ["-m"] and len(words) > 1:
        name += f" -m {words[1]}"
    elif words and words[0].endswith((".py", ".js", ".mjs", ".rb", ".sh", ".jar", ".pl")):
        name += f" {os.path.basename(words[0])}"
    return "".join(char if char.isprintable() else "?" for char in name)[:_LONGEST_NAME]
