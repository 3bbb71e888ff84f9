"""How a sidecar behaves with many dead letters: `python -m tests.durability.scale [--entries N] [--folder DIR]`.

Fills a store, starts a real sidecar on it and prints its start, pages over the admin port and memory, beside a sidecar
that keeps nothing. Not a test: figures of a machine are nobody's promise. Speed of writing: `benchmarks.durable`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.durable import STARTED, failure, opened
from sidecar.durable.deadletter import DEFAULT_TERMS
from sidecar.durable.intake import prepare
from telemetry.timestamps import rfc3339

ROOT = Path(__file__).resolve().parent.parent.parent
_AT_ONCE = 2000
PAGES = {
    "first page": "",
    "upstream": "upstream=upstream3",
    "four filters": "status=pending&upstream=upstream4&error_class=INVALID_API_KEY&verdict=safe",
    "nothing fits": "upstream=upstream3&error_class=CONNECTION_REFUSED",
    "hour in the middle": f"since={rfc3339(STARTED + 3600)}&until={rfc3339(STARTED + 7200)}&verdict=unsafe",
    "one word, rare": f"q={12345:032x}",
    "word of all, rare upstream and verdict": "q=answer&upstream=upstream3&verdict=stale",
    "word of all": "q=charge+answer",
    "500 at once": "status=pending&limit=500",
}


async def fill(folder: Path, entries: int) -> None:
    store, letters = await opened(folder)
    begun = time.monotonic()

    def some(first: int) -> Callable[[sqlite3.Connection], None]:
        def work(connection: sqlite3.Connection) -> None:
            for number in range(first, min(first + _AT_ONCE, entries)):
                given, (rules, _, idempotency, redactor) = failure(number), DEFAULT_TERMS
                dlq_id = f"dlq_20251009_085320_{number:08x}"
                letters._insert(
                    connection,
                    prepare(given, dlq_id, given.body, 0, letters.keyring, rules, idempotency, redactor),
                )

        return work

    for first in range(0, entries, _AT_ONCE):
        await store.write(some(first))
    print(f"{entries:,} entries written in {time.monotonic() - begun:.0f} s")
    await store.close()


class Running:
    """A sidecar in a process of its own."""

    def __init__(self, state_dir: Path, port: int) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
        environ |= {"SIDECAR__STATE_DIR": str(state_dir), "SIDECAR__ADMIN__PORT": str(port)}
        environ |= {"SIDECAR__LISTEN__PORT": "0", "SIDECAR__DEAD_LETTER__MAX_BYTES": str(1 << 40)}
        self._port = port
        begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "run"], cwd=ROOT, env=environ, stderr=subprocess.DEVNULL
        )
        while self.ready() != 200:
            if self.process.poll() is not None or time.monotonic() - begun > 120:
                raise SystemExit("the sidecar did not start")
            time.sleep(0.01)
        self.seconds = time.monotonic() - begun

    def ready(self) -> int:
        try:
            return self.ask("/readyz")[0]
        except OSError:
            return 0

    def ask(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    @property
    def resident(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextmanager
def running(state_dir: Path) -> Iterator[Running]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sidecar = Running(state_dir, port)
    try:
        yield sidecar
    finally:
        sidecar.process.terminate()
        sidecar.process.wait(30)


def look(folder: Path) -> None:
    with running(folder / "nothing") as idle:
        start, resident = idle.seconds, idle.resident
    size = (folder / "many" / "store.db").stat().st_size
    with running(folder / "many") as sidecar:
        print(f"start, {size / 1e6:,.0f} MB on disk: {sidecar.seconds:.2f} s (with nothing kept: {start:.2f} s)")
        for what, query in PAGES.items():
            took = []
            for _ in range(5):
                begun = time.monotonic()
                status, body = sidecar.ask(f"/dlq?{query}")
                took.append(time.monotonic() - begun)
                assert status == 200, body
            print(f"page, {what}: {max(took) * 1000:.0f} ms (slowest of 5)")
        cursor = ""
        for _ in range(20):
            cursor = f"&cursor={json.loads(sidecar.ask(f'/dlq?limit=500{cursor}')[1])['next_cursor']}"
        begun = time.monotonic()
        assert 200 == sidecar.ask("/metrics")[0]
        print(f"metrics: {(time.monotonic() - begun) * 1000:.0f} ms")
        print(f"memory: {sidecar.resident - resident:.0f} MB more than the {resident:.0f} MB with nothing kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder or os.environ.get("TMPDIR")) as name:
        uvloop.run(fill(Path(name) / "many", given.entries))
        look(Path(name))


if __name__ == "__main__":
    main()
