"""Reload after reload under load, good and bad files in turn: `python -m tests.reloads`, or `make reloads`.

A sidecar as a process of its own, and two configurations that differ in everything a request can tell: where it goes,
which header is added, how often it is tried. Requests of one configuration must show all of its marks or they were
served by half of it. Every second file is wrong and must be refused. No request may fail, and memory must be flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from tests.doubles.app import App
from tests.doubles.upstream import Script, Talk, Upstream, answer
from tests.e2e.process import Process

_ATTEMPTS = {"a": 3, "b": 2}
_BAD = ("upstreams: {u: {rote: /u}}", "listen: [", "policies: {default: {max_attempts: 99}}", 'version: "2.0.0"')
_WARM = 10
"""Reloads before the first reading of memory."""
_APPS = 8


@dataclass
class Found:
    """What the run has shown."""

    requests: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    reloads: Counter[str] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)
    """In KiB, after each reload from the warm ones on."""
    descriptors: list[int] = field(default_factory=list)

    @property
    def growth(self) -> int:
        """KiB between the lowest readings of the first and of the last third."""
        third = max(1, len(self.resident) // 3)
        return min(self.resident[-third:]) - min(self.resident[:third])


def _serving(name: str, found: Found) -> Script:
    """An upstream that only requests of its own configuration may reach; those below /fail it always refuses."""
    marked = f"x-config-{name}:".encode()

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            talk.upstream.requests.clear()
            talk.upstream.bodies.clear()
            if marked not in head.lower():
                found.wrong["sent with the header of another configuration"] += 1
            failing = b" /fail" in head
            await talk.send(answer(name.encode(), "503 Service Unavailable" if failing else "200 OK"))

    return script


def _keys(name: str, upstream: Upstream) -> dict[str, Any]:
    waits = {"base_delay": 0.001, "max_delay": 0.002}
    keys: dict[str, Any] = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "telemetry": {"sessions": 100},  # soon full, so that what grows are not these
        "policies": {"default": {**waits, "max_attempts": _ATTEMPTS[name]}},
        "upstreams": {
            "u": {
                "route": "/u",
                "endpoints": [upstream.url],
                "idempotency": {"inject": True, "header": f"x-config-{name}"},
                "breaker": {"enabled": False},
                "retry_budget": {"min_per_second": 10_000, "window": 10 if name == "a" else 20},
                "max_in_flight": 4 if name == "a" else None,
                "max_queue": 100 if name == "a" else 0,
                "timeouts": {"body_idle": 60 if name == "a" else 50},
                "dead_letter": {"enabled": False},
            }
        },
    }
    return keys


async def _app(address: tuple[str, int], number: int, found: Found, over: asyncio.Event) -> None:
    app = await App.connect(address)
    try:
        while not over.is_set():
            failing = found.requests % 3 == 0
            path = "/u/fail" if failing else f"/u/{number}"
            reply = await app.ask(f"GET {path} HTTP/1.1\r\nHost: s\r\n\r\n")
            found.requests += 1
            name = reply.body.decode()
            wanted = (503, str(_ATTEMPTS.get(name))) if failing else (200, "1")
            if (reply.status, reply.get("x-sidecar-attempts")) != wanted:
                found.wrong[f"{reply.status} after {reply.get('x-sidecar-attempts')} attempts at {name!r}"] += 1
    except (OSError, EOFError, TimeoutError) as error:
        found.wrong[f"an app lost its connection: {error!r}"] += 1
    finally:
        app.close()


async def reload(process: Process, text: str) -> int:
    """Other settings for a running sidecar: the status of the answer."""
    new = process.config.with_suffix(".new")
    await asyncio.to_thread(new.write_text, text)
    await asyncio.to_thread(new.rename, process.config)
    app = await App.connect(process.admin_address)
    try:
        request = "POST /reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        return (await app.ask(request)).status
    finally:
        app.close()


async def run(reloads: int, folder: Path) -> Found:
    found = Found()
    one, two = [await Upstream(_serving(name, found)).start() for name in "ab"]
    keys = {"a": _keys("a", one), "b": _keys("b", two)}
    files = {name: json.dumps(given) for name, given in keys.items()}
    process = await (await Process.start(folder, None, keys["a"])).ready()
    over = asyncio.Event()
    apps = [asyncio.create_task(_app(process.address, number, found, over)) for number in range(_APPS)]
    try:
        for number in range(reloads):
            good = number % 2 == 0
            text = files["b" if number % 4 == 0 else "a"] if good else _BAD[number // 2 % len(_BAD)]
            status = await reload(process, text)
            found.reloads["taken" if status == 200 else "refused"] += 1
            if status != (200 if good else 409):
                found.wrong[f"a {'good' if good else 'bad'} file was answered with {status}"] += 1
            before = found.requests
            while found.requests < before + 3 * _APPS and not all(app.done() for app in apps):
                await asyncio.sleep(0.005)
            if number >= _WARM:
                found.resident.append(process.resident() // 1024)
                found.descriptors.append(process.descriptors())
        over.set()
        await asyncio.gather(*apps)
    finally:
        over.set()
        await process.clean_up()
        for upstream in (one, two):
            await upstream.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reloads", type=int, default=200)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(run(chosen.reloads, Path(folder) / "run"))
    print(f"{dict(found.reloads)}; {found.requests} requests; wrong: {dict(found.wrong) or 'nothing'}")
    print(
        f"memory {found.resident[0] / 1024:.1f} → {found.resident[-1] / 1024:.1f} MiB, "
        f"floor {found.growth / 1024:+.2f} MiB; files {found.descriptors[0]} → {found.descriptors[-1]}"
    )
    return 0 if not found.wrong and found.growth < 2048 else 1


if __name__ == "__main__":
    sys.exit(main())
