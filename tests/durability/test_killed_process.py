"""kill -9 of a running sidecar under load, again and again; an upstream counts every effect by its key.

Whatever was acknowledged before a kill must hold after it: a dead letter is there with its body, a job is there and in
the end delivered exactly once, a key that was answered is answered again without being sent. KILL_ROUNDS sets how
often (`make chaos`: 50); the figures are printed (`pytest -s` shows them).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import field as header
from tests.doubles.upstream import Talk, answer
from tests.e2e.process import Process

ROUNDS = int(os.environ.get("KILL_ROUNDS", "2"))


@dataclass
class Provider:
    """Executes whatever arrives, as often as it arrives; only the counts say whether that was right."""

    effects: Counter[str] = field(default_factory=Counter)
    dice: random.Random = field(default_factory=lambda: random.Random(4711))

    async def __call__(self, talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            path = head.split(b" ")[1].decode()
            if path.startswith("/fail"):
                await talk.send(answer(b"", "503 Service Unavailable"))
                continue
            if path.startswith("/made/"):
                made = path.removeprefix("/made/") in self.effects
                await talk.send(answer(b"", "200 OK" if made else "404 Not Found"))
                continue
            self.effects[(header(head, b"idempotency-key") or b"").decode()] += 1
            await asyncio.sleep(self.dice.random() * 0.02)  # a kill likes to fall in here
            await talk.send(answer(b"done"))


@dataclass
class Promises:
    """What the sidecar has said it keeps."""

    letters: dict[str, int] = field(default_factory=dict)
    jobs: set[str] = field(default_factory=set)
    keys: set[int] = field(default_factory=set)


def post(path: str, body: str, *fields: str) -> str:
    lines = [f"POST {path} HTTP/1.1", "Host: s", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines) + "\r\n\r\n" + body


async def work(address: tuple[str, int], promises: Promises, numbers: Any) -> None:
    """Until the other side is dead."""
    app = await App.connect(address)
    try:
        while True:
            number = next(numbers)
            if number % 3 == 0:
                reply = await app.ask(post(f"/u/fail/{number}", f"letter {number}" * 20))
                promises.letters[reply.get("x-sidecar-dlq-id") or ""] = number
            elif number % 3 == 1:
                reply = await app.ask(post(f"/u/send/{number}", f"job {number}", "Prefer: respond-async"))
                assert 202 == reply.status
                promises.jobs.add(reply.json["job_id"])
            else:
                reply = await app.ask(post(f"/u/pay/{number}", f"pay {number}", f"Idempotency-Key: pay-{number}"))
                if reply.status == 200:
                    promises.keys.add(number)
    except (ConnectionError, asyncio.IncompleteReadError):
        return
    finally:
        app.close()


async def check(process: Process, promises: Promises, provider: Provider) -> None:
    for dlq_id, number in promises.letters.items():
        letter = (await process.admin(f"/dlq/{dlq_id}")).json
        size = len(f"letter {number}" * 20)
        assert ("pending", {"kept": True, "size": size, "note": ""}) == (letter["status"], letter["body"]), dlq_id
    for job_id in promises.jobs:
        assert 200 == (await process.admin(f"/jobs/{job_id}")).status, job_id
    app = await process.app()
    for number in promises.keys:
        reply = await app.ask(post(f"/u/pay/{number}", f"pay {number}", f"Idempotency-Key: pay-{number}"))
        assert (200, "true", 1) == (
            reply.status,
            reply.get("idempotent-replayed"),
            provider.effects[f"pay-{number}"],
        ), number


async def listed(process: Process) -> list[dict[str, Any]]:
    letters: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await process.admin(f"/dlq?limit=500{cursor and f'&cursor={cursor}'}")).json
        letters += page["items"]
        cursor = page["next_cursor"]
    return letters


@pytest.mark.timeout(60 + 30 * ROUNDS)
async def test_what_was_acknowledged_survives_kill_9_and_nothing_is_sent_twice(
    start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    provider, dice = Provider(), random.Random(1)
    upstream = await start_upstream(provider)
    keys = {
        "state_dir": str(tmp_path / "state"),
        "policies": {"once": {"max_attempts": 1}, "patient": {"base_delay": 0.05, "max_delay": 0.1}},
        "upstreams": {
            "u": {
                "route": "/u",
                "endpoints": [upstream.url],
                "policy": "once",
                "breaker": {"enabled": False},
                "outbox": {"reconcile": {"url": f"{upstream.url}/made/{{key}}"}, "concurrency": 4},
            }
        },
    }
    numbers, kept = iter(range(10**9)), Promises()
    process: Process | None = None
    try:
        promises = Promises()
        for round_number in range(ROUNDS):
            process = await (await Process.start(tmp_path / f"run{round_number}", None, keys)).ready()
            await check(process, promises, provider)  # those of the one that was killed before
            promises = Promises()
            working = [asyncio.ensure_future(work(process.address, promises, numbers)) for _ in range(6)]
            async with asyncio.timeout(30):
                while not (promises.letters and promises.jobs and promises.keys):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(dice.random() * 0.5)
            process.signal(signal.SIGKILL)
            await process.ended()
            await asyncio.gather(*working)
            assert "" not in promises.letters, "an answer without the id of its entry"
            await process.clean_up()
            kept.letters |= promises.letters
            kept.jobs |= promises.jobs
            kept.keys |= promises.keys
        process = await (await Process.start(tmp_path / "last", None, keys)).ready()
        await check(process, promises, provider)
        async with asyncio.timeout(60 + 2 * ROUNDS):
            for job_id in kept.jobs:
                while "succeeded" != (state := (await process.admin(f"/jobs/{job_id}")).json["state"]):
                    assert state in ("in_progress", "retryable_failed"), (job_id, state)
                    await asyncio.sleep(0.05)
        found = {letter["dlq_id"]: letter["body"] for letter in await listed(process)}
        broken = {
            "lost": kept.letters.keys() - found.keys(),
            "half": {dlq_id for dlq_id, body in found.items() if not body["kept"]},
            "double": {key for key, count in provider.effects.items() if count > 1},
        }
        figures = {"rounds": ROUNDS, "letters": len(kept.letters), "jobs": len(kept.jobs), "keys": len(kept.keys)}
        print(json.dumps(figures | {word: len(those) for word, those in broken.items()}))
        assert {"lost": set(), "half": set(), "double": set()} == broken
    finally:
        if process is not None:
            await process.clean_up()
