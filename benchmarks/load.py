"""The load: one function per way of asking, each bounded in time, each returning a `Sample`.

Tools that are fast enough not to be what is measured: `wrk` for as many requests as possible, `h2load` for a
fixed number per second, and a socket that throws bytes away for long transfers. A request that fails is
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
from itertools import pairwise
from pathlib import Path

from benchmarks.peers import TEMPLATES, Aim, Peer
from benchmarks.processes import LOOPBACK

GRACE_SECONDS = 20.0  # beyond its own duration, after which a load tool is killed
TRANSFER_LIMIT_SECONDS = 60.0
LATENCY_CONNECTIONS = 32
EDGE_SECONDS = 0.5  # cut from both ends of a latency run: connections join and leave one by one there


@dataclass(frozen=True)
class Sample:
    """One measurement: a value in the scenario's unit, and what went wrong meanwhile."""

    value: float
    requests: int
    failed: int = 0
    complaints: tuple[str, ...] = ()


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


def wrk(aim: Aim, *, connections: int, seconds: int, body_bytes: int) -> WrkResult:
    """As many requests as possible on keep-alive connections; `body_bytes` is what each answer must carry."""
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(TEMPLATES / "wrk.lua")]
    argv += [f"http://{LOOPBACK}:{aim.port}/", "--", aim.target, aim.host]
    output = _run(argv, seconds)
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


def p99_milliseconds(aim: Aim, *, rate: float, seconds: int, log: Path) -> Sample:
    """The 99th percentile of response times while `rate` requests are sent every second."""
    per_connection = rate / LATENCY_CONNECTIONS
    requests = round(rate * (seconds + 2 * EDGE_SECONDS))
    log.unlink(missing_ok=True)
    argv = ["h2load", "--h1", "-t1", f"-c{LATENCY_CONNECTIONS}", f"-n{requests}", f"--log-file={log}"]
    argv += [f"--rps={per_connection:.3f}", "-r1", f"--rate-period={joining_interval(per_connection)}ms"]
    argv += [f"http://{LOOPBACK}:{aim.port}{aim.target}"]
    output = _run(argv, seconds)
    counts = re.search(r"requests: (\d+) total, .* (\d+) succeeded, ", output)
    if counts is None or not log.exists():
        return failure(f"h2load gave no figures: {output.strip()[-300:]}")
    total, succeeded = int(counts[1]), int(counts[2])
    complaints = [] if total == succeeded else [f"h2load: {total - succeeded} of {total} requests failed"]
    rows = [tuple(map(int, row.split("\t")[:3])) for row in log.read_text().splitlines()]
    starts = [start for start, _, _ in rows]
    first, last = min(starts) + EDGE_SECONDS * 1e6, max(starts) - EDGE_SECONDS * 1e6
    kept = sorted(took for start, _, took in rows if first <= start <= last)
    if not kept:
        return failure("h2load: the run was too short to be measured", total)
    achieved = len(kept) / ((last - first) / 1e6)
    if achieved < 0.95 * rate:
        # Not a failed request, but the figure then describes a lighter load than the one asked for.
        complaints.append(f"h2load: only {achieved:,.0f} of {rate:,.0f} requests per second were reached")
    p99 = kept[min(len(kept) - 1, int(len(kept) * 0.99))]
    return Sample(p99 / 1000, total, total - succeeded, tuple(complaints))


def joining_interval(per_connection_rate: float, connections: int = LATENCY_CONNECTIONS) -> int:
    """Milliseconds between the first requests of two connections, so that their beats do not coincide.

    Each connection sends on a fixed beat. Were they all to start together, every beat would be a burst of 32
    and the percentile would describe the burst.
    """
    beat = 1000 / per_connection_rate

    def tightest_gap(interval: int) -> float:
        phases = sorted((number * interval) % beat for number in range(connections))
        return min(after - before for before, after in pairwise([*phases, phases[0] + beat]))

    return max(range(3, 14), key=tightest_gap)


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


def _run(argv: Sequence[str], seconds: float) -> str:
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
