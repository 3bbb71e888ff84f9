"""How the store behaves with many entries: `python -m tests.durability.scale [--entries N] [--folder DIR]`.

Prints commits per second with 64 writers (beside one file with fsync per entry on the same disk), then fills a store
and prints start time, page times and memory. Not a test: figures of a machine are nobody's promise.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from config.durable import DeadLetterStore
from config.errors import registry
from sidecar.durable.deadletter import DEFAULT_TERMS, DeadLetters
from sidecar.durable.disk import Disk
from sidecar.durable.entry import Answer, Failure, Tried
from sidecar.durable.filters import Filter
from sidecar.durable.intake import prepare
from sidecar.durable.listing import Listing
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store

CODES = ("NETWORK_TIMEOUT", "CONNECTION_REFUSED", "TEMPORARY_UNAVAILABLE", "UPSTREAM_ERROR", "INVALID_API_KEY")
BODY = b'{"amount": 1200, "currency": "eur", "note": "%s"}' % (b"x" * 400)
STARTED = 1_760_000_000.0


def failure(number: int) -> Failure:
    code = CODES[number % 5]
    at = STARTED + number * 0.01
    return Failure(
        upstream=f"upstream{number % 10}",
        method="POST",
        url=f"https://api{number % 10}.example/v1/charges?order={number}",
        headers=[
            (b"Authorization", b"Bearer secret"),
            (b"Content-Type", b"application/json"),
            (b"User-Agent", b"app/1"),
        ],
        attempts=[Tried(3 if number % 3 else 0, code, 503 if number % 2 else None)] * 4,
        error_class=code,
        category="TRANSIENT",
        error_message="no answer within 30 s",
        first_failure_at=at,
        last_failure_at=at + 1,
        body=BODY + str(number).encode(),
        operation="create_charge",
        context={"request_id": f"{number:032x}", "trace_id": f"{number * 7919:032x}"},
        response=Answer(503, [(b"Content-Type", b"text/plain")], b"try later") if number % 2 else None,
        idempotency_key=f"key-{number}" if number % 4 == 0 else None,
        key_honoured=True,
    )


async def opened(folder: Path) -> tuple[Store, DeadLetters]:
    keys = load_keyring(folder, None)
    store = await Store.open(folder, hooks=[keys.prove])
    settings = DeadLetterStore(max_bytes=1 << 40, min_free_bytes=0)
    return store, DeadLetters(store, keys, settings=settings, registry=registry(), now=lambda: STARTED + 20_000)


def resident() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


async def throughput(folder: Path, seconds: float) -> None:
    store, letters = await opened(folder)
    done = 0

    async def writer(first: int) -> None:
        nonlocal done
        number, end = first, time.monotonic() + seconds
        while time.monotonic() < end:
            await letters.keep(failure(number))
            number, done = number + 64, done + 1

    begun = time.monotonic()
    await asyncio.gather(*(writer(first) for first in range(64)))
    print(f"dead letters kept, 64 at a time: {done / (time.monotonic() - begun):,.0f}/s")
    done, begun = 0, time.monotonic()
    await writer(10_000_000)
    print(f"dead letters kept, one by one: {done / (time.monotonic() - begun):,.0f}/s")
    await store.close()
    disk, begun, files = Disk(), time.monotonic(), 0
    (folder / "files").mkdir()
    while time.monotonic() - begun < seconds:
        disk.write_whole(folder / "files" / f"{files}.json", BODY * 3)
        files += 1
    print(f"one file per entry, synced: {files / (time.monotonic() - begun):,.0f}/s")


async def fill(folder: Path, entries: int) -> None:
    store, letters = await opened(folder)
    begun = time.monotonic()

    def some(first: int) -> Callable[[sqlite3.Connection], None]:
        def work(connection: sqlite3.Connection) -> None:
            for number in range(first, min(first + 2000, entries)):
                given, (rules, _, idempotency, redactor) = failure(number), DEFAULT_TERMS
                dlq_id = f"dlq_20251009_085320_{number:08x}"
                letters._insert(
                    connection,
                    prepare(given, dlq_id, given.body, 0, letters.keyring, rules, idempotency, redactor),
                )

        return work

    for first in range(0, entries, 2000):
        await store.write(some(first))
    print(f"{entries:,} entries written in {time.monotonic() - begun:.0f} s")
    await store.close()


async def timed(what: str, work: Callable[[], Awaitable[object]]) -> None:
    slowest = 0.0
    for _ in range(3):
        begun = time.monotonic()
        await work()
        slowest = max(slowest, time.monotonic() - begun)
    print(f"{what}: {slowest * 1000:.1f} ms (slowest of 3)")


async def look(folder: Path) -> None:
    size = (folder / "store.db").stat().st_size
    before, begun = resident(), time.monotonic()
    store, letters = await opened(folder)
    listing = Listing(letters)
    await listing.refresh()
    print(
        f"start with {sum(listing.stats.waiting.values()):,} entries ({size / 1e6:,.0f} MB): {time.monotonic() - begun:.2f} s"
    )
    for what, wanted in (
        ("first page", Filter()),
        ("upstream", Filter(upstream=("upstream3",))),
        ("four filters", Filter(("pending",), ("upstream3",), ("INVALID_API_KEY",), ("safe",))),
        ("nothing fits", Filter(upstream=("upstream3",), error_class=("CONNECTION_REFUSED",))),
        ("hour in the middle", Filter(since=STARTED + 3600, until=STARTED + 7200, verdict=("unsafe",))),
        ("one word, rare", Filter(q=f"{12345:032x}")),
        ("word of all, rare upstream and verdict", Filter(q="timeout", upstream=("upstream3",), verdict=("stale",))),
        ("word of all", Filter(q="charge answer")),
    ):
        await timed(f"page of 50, {what}", lambda wanted=wanted: listing.page(wanted))  # type: ignore[misc]
    page = await listing.page(Filter(status=("pending",)), limit=500)
    for _ in range(20):
        page = await listing.page(Filter(status=("pending",)), limit=500, cursor=page.next_cursor)
    await timed("counts by verdict", lambda: listing.count(Filter(since=STARTED + 100)))
    await timed("statistics", listing.refresh)
    await timed("a page as shown", lambda: listing.rows_shown(page))
    print(f"memory: {resident() - before:.0f} MB more")
    begun = time.monotonic()
    await asyncio.gather(*(letters.keep(failure(50_000_000 + number)) for number in range(2000)))
    print(f"2,000 more entries at once: {time.monotonic() - begun:.2f} s")
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder or os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        uvloop.run(throughput(folder / "throughput", given.seconds))
        uvloop.run(fill(folder / "many", given.entries))
        uvloop.run(look(folder / "many"))


if __name__ == "__main__":
    main()
