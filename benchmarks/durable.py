"""How many dead letters a second are on disk, synced, with 64 requests failing at a time.

Beside it, on the same disk: one file per entry, each written, synced and renamed by one of 64 threads, which is what
keeping them without a database comes to. Runs alone too:

    python -m benchmarks.durable [--rounds N] [--seconds S] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from config.durable import DeadLetterStore
from config.errors import registry
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.disk import Disk, volatile_file_system
from sidecar.durable.entry import Answer, Failure, Tried
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store

WRITERS = 64
KEPT, FILES = "dead letters kept", "one file per entry"
CODES = ("NETWORK_TIMEOUT", "CONNECTION_REFUSED", "TEMPORARY_UNAVAILABLE", "UPSTREAM_ERROR", "INVALID_API_KEY")
BODY = b'{"amount": 1200, "currency": "eur", "note": "%s"}' % (b"x" * 400)
STARTED = 1_760_000_000.0


def failure(number: int) -> Failure:
    """A POST of half a kilobyte that failed after four attempts; every one another."""
    code, at = CODES[number % 5], STARTED + number * 0.01
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


async def kept(folder: Path, seconds: float) -> float:
    """Entries per second."""
    store, letters = await opened(folder)
    done, end = 0, time.monotonic() + seconds

    async def writer(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            await letters.keep(failure(number))
            number, done = number + WRITERS, done + 1

    begun = time.monotonic()
    try:
        await asyncio.gather(*(writer(first) for first in range(WRITERS)))
        return done / (time.monotonic() - begun)
    finally:
        await store.close()


def files(folder: Path, seconds: float) -> float:
    """Files per second, each as long as an entry on disk."""
    folder.mkdir(parents=True)
    content, end = BODY * 3, time.monotonic() + seconds

    def writer(name: int) -> int:
        disk, done = Disk(), 0
        while time.monotonic() < end:
            disk.write_whole(folder / f"{name}-{done}.json", content)
            done += 1
        return done

    begun = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as threads:
        done = sum(threads.map(writer, range(WRITERS)))
    return done / (time.monotonic() - begun)


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Both in turn, each round on a fresh folder, after a short one of each that does not count."""
    ways: dict[str, Callable[[Path, float], float]] = {
        KEPT: lambda place, length: uvloop.run(kept(place, length)),
        FILES: files,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            place = folder / f"{number} {name}"
            rate = way(place, seconds if number else min(0.5, seconds))
            shutil.rmtree(place)
            if number:
                taken[name].append(round(rate, 1))
    return taken


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durable", description="Dead letters on disk a second.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="per round")
    parser.add_argument("--folder", help="on the disk to measure (default: where temporary files are)")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="sidecar-durable-") as name:
        volatile = volatile_file_system(Path(name))
        taken = measure(Path(name), options.rounds, options.seconds)
    if options.json:
        print(json.dumps({"taken": taken, "volatile": volatile}))
        return 0
    for what, rates in taken.items():
        print(f"{what + f', {WRITERS} at a time':<40} {statistics.median(rates):>8,.0f}/s")
    if volatile is not None:
        print(f"This was {volatile}, which syncs nothing; name a real disk with --folder.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
