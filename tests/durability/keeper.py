"""A small process that keeps dead letters and says what it was promised: `python -m tests.durability.keeper DIR N`.

One line per try on standard output: `kept <id> <number>` or `refused <reason> <number>`. It runs under tools that
break its disk, so it uses nothing but the product, and goes on until a last entry was kept or time is up.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from config.durable import DeadLetterStore
from config.errors import registry
from sidecar.durable import writer
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store
from sidecar.durable.trouble import NotKept
from tests.durability.rigs import failed


def body_of(number: int) -> bytes:
    return (b"%d " % number) * (60_000 if number % 5 == 0 else 30)


async def keep(folder: Path, count: int) -> bool:
    writer._RETRY_AFTER = 0.01
    keys = load_keyring(folder, None)
    store = await Store.open(folder, hooks=[keys.prove])
    letters = DeadLetters(store, keys, settings=DeadLetterStore(min_free_bytes=0), registry=registry())

    async def one(number: int) -> bool:
        try:
            kept = await letters.keep(failed(number, body=body_of(number)))
        except NotKept as refused:
            print("refused", refused.reason, number, flush=True)
            return False
        print("kept", kept.dlq_id, number, flush=True)
        return True

    for number in range(1, count + 1):
        await one(number)
    number, deadline, recovered = count, time.monotonic() + 10, False
    while not recovered and time.monotonic() < deadline:
        number += 1
        recovered = await one(number)
        await asyncio.sleep(0.01)
    await store.close()
    return recovered


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(keep(Path(sys.argv[1]), int(sys.argv[2]))) else 3)
