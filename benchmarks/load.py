"""The load: one function per way of asking, each bounded in time, each returning a `Sample`.

Tools that are fast enough not to be what is measured: `wrk` for as many requests as possible, `h2load` for a
fixed number per second (`paced.py`), and a socket that throws bytes away for long transfers. A request that fails is
counted and explained in the sample, never raised: one bad answer must not hide the rest of the run.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers import TEMPLATES, Aim, Peer
from benchmarks.processes import LOOPBACK

GRACE_SECONDS = 20.0  # beyond its own duration, after which a load tool is killed
TRANSFER_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Sample:
    """One measurement: a value in the scenario's unit, and what went wrong meanwhile."""

    value: float
    requests: int
    failed: int = 0
    complaints: tuple[str, ...] = ()
    cpu_microseconds: float | None = None
    """Of the peer, per request, what it did after the last answer included; None where it says nothing."""


def failure(complaint: str, requests: int = 1) -> Sample:
    return Sample(0.0, requests, 1, (complaint,))


def fetch(aim: Aim, limit_seconds: float = 10.0) -> tuple[int, bytes]:
    """One plain request with an ordinary client, for comparing bodies byte by byte."""
    connection = http.client.HTTPConnection(LOOPBACK, aim.port, timeout=limit_seconds)
    try:
        connection.request("GET", aim.target, headers={"Host": aim.host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def compare_body(aim: Aim, expected: bytes) -> Sample:
    """Whether one answer is exactly what the upstream holds."""
    try:
        status, body = fetch(aim)
    except (OSError, http.client.HTTPException) as error:
        return failure(f"GET {aim.target}: {error!r}")
    if status != 200:
        return failure(f"GET {aim.target}: status {status}, {body[:200]!r}")
    if body != expected:
        return failure(f"GET {aim.target}: {len(body)} bytes that differ from the {len(expected)} expected")
    return Sample(1.0, 1)


@dataclass(frozen=True)
class WrkResult:
    """What wrk saw: rates and failures."""

    requests_per_second: Sample
    megabytes_per_second: Sample


def wrk(aim: Aim, *, connections: int, seconds: int, body_bytes: int, scheme: str = "http") -> WrkResult:
    """As many requests as possible on keep-alive connections; `body_bytes` is what each answer must carry."""
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(TEMPLATES / "wrk.lua")]
    argv += [f"{scheme}://{LOOPBACK}:{aim.port}/", "--", aim.target, aim.host]
    output = run_tool(argv, seconds)
    line = next((line for line in output.splitlines() if line.startswith("SUMMARY ")), None)
    if line is None:
        broken = failure(f"wrk gave no summary: {output.strip()[-300:]}")
        return WrkResult(broken, broken)
    summary: dict[str, int] = json.loads(line.removeprefix("SUMMARY "))
    complaints = [
        f"wrk: {summary[kind]} × {kind} error"
        for kind in ("connect", "read", "write", "status", "timeout")
        if summary[kind]
    ]
    failed = sum(summary[kind] for kind in ("connect", "read", "write", "status", "timeout"))
    if summary["bytes"] < summary["requests"] * body_bytes:
        failed += 1
        complaints.append(f"wrk: {summary['bytes']} bytes in {summary['requests']} answers are too few")
    if not summary["requests"]:
        failed += 1
        complaints.append("wrk: not one request was answered")
    elapsed = summary["microseconds"] / 1e6
    rest = (summary["requests"], failed, tuple(complaints))
    return WrkResult(
        Sample(summary["requests"] / elapsed, *rest),
        Sample(summary["requests"] * body_bytes / elapsed / 1e6, *rest),
    )


def transfer_megabytes_per_second(
    aim: Aim, expected: int, *, tunnel_to: str | None = None, extra_head: str = ""
) -> Sample:
    """One long answer, counted and thrown away, optionally inside a CONNECT tunnel."""
    request = f"GET {aim.target} HTTP/1.1\r\nHost: {aim.host}\r\n{extra_head}\r\n"
    try:
        with socket.create_connection((LOOPBACK, aim.port), timeout=10.0) as connection:
            if tunnel_to is not None:
                opening = f"CONNECT {tunnel_to} HTTP/1.1\r\nHost: {tunnel_to}\r\n\r\n"
                head, early = _ask(connection, opening)
                if not _is_ok(head) or early:
                    return failure(f"CONNECT: {head[:200]!r}")
            began = time.perf_counter()
            head, early = _ask(connection, request)
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            if not _is_ok(head) or length is None or int(length[1]) != expected:
                return failure(f"GET {aim.target}: {head[:300]!r}")
            received = early + _discard(connection, expected - early)
            elapsed = time.perf_counter() - began
    except OSError as error:
        return failure(f"GET {aim.target}: {error!r}")
    if received != expected:
        return failure(f"GET {aim.target}: {received} bytes instead of {expected}")
    return Sample(expected / elapsed / 1e6, 1)


class IdleConnections:
    """Connections that have each been answered once and now only stay open."""

    def __init__(self, count: int, path: str, body_bytes: int) -> None:
        self._count = count
        self._path = path
        self._body_bytes = body_bytes
        self._sockets: list[socket.socket] = []

    def open(self, peer: Peer) -> Sample:
        aim = peer.reverse(self._path)
        request = f"GET {aim.target} HTTP/1.1\r\nHost: {aim.host}\r\n\r\n"
        complaints: list[str] = []
        for _ in range(self._count):
            try:
                connection = socket.create_connection((LOOPBACK, aim.port), timeout=5.0)
                self._sockets.append(connection)
                head, early = _ask(connection, request)
                missing = self._body_bytes - early
                if not _is_ok(head) or _discard(connection, missing) != missing:
                    complaints.append(f"idle connection: {head[:100]!r}")
            except OSError as error:
                complaints.append(f"idle connection: {error!r}")
        return Sample(float(self._count), self._count, len(complaints), tuple(complaints[:3]))

    def closed_by_peer(self) -> int:
        """How many the peer has ended although nobody asked it to."""
        gone = 0
        for connection in self._sockets:
            connection.setblocking(False)
            try:
                gone += connection.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                pass
            except OSError:
                gone += 1
        return gone

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._sockets.clear()


def _ask(connection: socket.socket, request: str) -> tuple[bytes, int]:
    """Send a request; the head of the answer, and how many bytes beyond it have already been read."""
    connection.sendall(request.encode("ascii"))
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        piece = connection.recv(4096)
        if not piece or len(received) > 65536:
            return received, 0
        received += piece
    return received[: end + 4], len(received) - end - 4


def _is_ok(head: bytes) -> bool:
    return re.match(rb"HTTP/1\.[01] 20[06][ \r]", head) is not None and head.endswith(b"\r\n\r\n")


def _discard(connection: socket.socket, count: int) -> int:
    """Take `count` bytes off the socket uncopied (MSG_TRUNC), so that the reader is not what is measured."""
    sink = bytearray(min(count, 1 << 20))
    taken = 0
    deadline = time.monotonic() + TRANSFER_LIMIT_SECONDS
    while taken < count and time.monotonic() < deadline:
        piece = connection.recv_into(sink, min(len(sink), count - taken), socket.MSG_TRUNC)
        if not piece:
            break
        taken += piece
    return taken


def run_tool(argv: Sequence[str], seconds: float) -> str:
    """What a tool says, standard error included; ended when it takes much longer than it should."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds + GRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} was still running {GRACE_SECONDS:.0f} s after its time and was ended"
    return done.stdout.decode(errors="replace")
