"""kill -9 at random moments: `python -m tests.durability.chaos [--rounds N] [--seed S] [--folder DIR]`.

Each round a child process opens the state directory, recovers, and works as hard as it can: it keeps dead letters,
takes jobs, delivers them, replays entries and passes calls through the idempotency gate. It notes every promise that
was made to it, and every effect at the provider, in files of its own. Then it is killed. Another process opens what
is left and compares: no promise may be broken, nothing may be half there, no effect may have happened twice.

The provider's ledger is a file with one line per effect, so that what a killed process did is known exactly. Exit
code 0 when every round held; the last line is a summary in JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from config.durable import DeadLetterStore
from config.durable import Outbox as OutboxRules
from config.errors import registry
from config.idempotency import Idempotency
from sidecar.durable.claims import Result
from sidecar.durable.delivery import Found, Sent
from sidecar.durable.entry import Entry
from sidecar.durable.filters import Filter
from sidecar.durable.idempotency import Call, Hit, Proceed, Response
from sidecar.durable.jobs import Submission, Wanted
from sidecar.durable.layers import Durable
from sidecar.durable.outbox import Terms as OutboxTerms
from sidecar.durable.outbox_rows import Delivery
from sidecar.durable.replay_job import Order
from telemetry.record import NOT_CONNECTED
from tests.durability.rigs import failed, terms

ROUNDS_PER_DIRECTORY = 10
LOOKUP = OutboxTerms(OutboxRules.model_validate({"reconcile": {"url": "https://x.test/{key}"}}), Idempotency())
NOTHING = OutboxTerms(OutboxRules(), Idempotency())


class Ledger:
    """Lines appended to a file; a line that was written survives the writer's death."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *words: object) -> None:
        os.write(self._descriptor, (" ".join(map(str, words)) + "\n").encode())

    def lines(self) -> list[list[str]]:
        return [line.split(" ") for line in self._path.read_text().splitlines()]


def body_of(number: int) -> bytes:
    """Some large enough for a file of their own, all recognisable."""
    return (b"%d " % number) * (60_000 if number % 7 == 0 else 20)


async def opened(folder: Path) -> Durable:
    return await Durable.open(
        folder / "state",
        settings=DeadLetterStore(max_bytes=1 << 40, min_free_bytes=0),
        registry=registry(),
        terms_of=lambda upstream: terms(replay={"rate": 1000.0, "max_replays": 1000}),
    )


class Child:
    """The process that will be killed."""

    def __init__(self, folder: Path, round_number: int) -> None:
        self._folder = folder
        self._first = round_number * 1_000_000
        self._promises = Ledger(folder / "promises")
        self._effects = Ledger(folder / "effects")

    async def run(self) -> None:
        durable = await opened(self._folder)
        durable.attach(
            send_replay=self._replay,
            send_delivery=self._deliver,
            lookup=self._lookup,
            outbox_terms_of=lambda upstream: LOOKUP if upstream == "lookup" else NOTHING,
        )
        await durable.begin()
        (self._folder / "ready").touch()
        await asyncio.gather(
            *(self._keep(durable, worker) for worker in range(8)),
            *(self._submit(durable, worker) for worker in range(2)),
            *(self._call(durable, worker) for worker in range(4)),
            self._replays(durable),
        )

    async def _keep(self, durable: Durable, worker: int) -> None:
        number = self._first + worker
        while True:
            failure = failed(
                number,
                at=1_700_000_000.0 + number / 1000,
                code="CONNECTION_REFUSED",
                phase=NOT_CONNECTED,
                body=body_of(number),
                idempotency_key=f"key-{number}" if number % 2 else None,
                key_honoured=True,
            )
            kept = await durable.letters.keep(failure)
            self._promises.note("kept", kept.dlq_id, number)
            number += 8

    async def _submit(self, durable: Durable, worker: int) -> None:
        number = self._first + worker
        assert durable.jobs is not None
        while True:
            wanted = [
                Wanted(f"{upstream}-{number}", upstream, "POST", "https://x.test/", (), body_of(number))
                for upstream in ("lookup", "nothing")
            ]
            job, _ = await durable.jobs.submit(Submission(f"job-{number}", f"subject-{number}", wanted))
            self._promises.note("job", job["job_id"], number)
            number += 2
            await asyncio.sleep(0.002)

    async def _call(self, durable: Durable, worker: int) -> None:
        """Each key is tried by two callers, and by the next round again."""
        number = self._first + worker // 2
        while True:
            for key in (number, number - 1_000_000):
                call = Call("u", "", "POST", "/x", f"call-{key}", "00", may_resend=False)
                found = await durable.gate.begin(call)
                if isinstance(found, Proceed):
                    self._effects.note("call", key)
                    await durable.gate.succeeded(found, Response(200, [], b"answer %d" % key))
                elif isinstance(found, Hit):
                    assert b"answer %d" % key == found.response.body
            number += 2
            await asyncio.sleep(0)

    async def _replays(self, durable: Durable) -> None:
        assert durable.replayer is not None
        while True:
            job = await durable.replayer.start(Order(Filter(), ramp=False, rate=1000.0, limit=50))
            while job.ended_at is None:
                await asyncio.sleep(0.002)

    async def _replay(self, entry: Entry) -> Result:
        self._effects.note("replay", entry.dlq_id, entry.idempotency_key or "-")
        await asyncio.sleep(0)
        return Result(ok=True, status=200)

    async def _deliver(self, delivery: Delivery) -> Sent:
        self._effects.note("delivery", delivery.send_key, delivery.recipient)
        await asyncio.sleep(0)
        return Sent(ok=True, status=202, notification_id=f"m-{delivery.send_key}")

    async def _lookup(self, delivery: Delivery) -> Found:
        known = any(line[:2] == ["delivery", delivery.send_key] for line in self._effects.lines())
        return Found(known, f"m-{delivery.send_key}" if known else None, "found" if known else "")


async def compare(folder: Path) -> dict[str, int]:
    """Raises AssertionError with everything that is not as promised."""
    promises, effects = Ledger(folder / "promises").lines(), Ledger(folder / "effects").lines()
    durable = await opened(folder)
    wrong: list[str] = []
    try:
        assert durable.store.health.ok, durable.store.health.reason
        wrong += [f"a false alarm: {loss.what}" for loss in durable.store.losses]
        if not durable.store.exact:
            wrong.append("it is not certain that nothing is missing")
        checked = await durable.upkeep.check()
        if checked.damaged or checked.repaired:
            wrong.append(f"{checked.damaged} damaged, {checked.repaired} disagreeing")
        await durable.letters.bodies.collect()
        wrong += await _letters_wrong(durable, promises)
        wrong += await _effects_wrong(durable, promises, effects)
    finally:
        await durable.close()
    assert [] == wrong, "\n".join(wrong[:20])
    return {"promises": len(promises), "effects": len(effects), "entries": checked.entries}


async def _letters_wrong(durable: Durable, promises: list[list[str]]) -> list[str]:
    wrong = []
    for word, ident, number in promises:
        try:
            if word == "kept":
                request = await durable.letters.request(ident)
                body = b"".join([chunk async for chunk in durable.letters.payloads.body(request)])
                if body_of(int(number)) != body or f"order={number}&" not in request.url:
                    wrong.append(f"{ident} is not what was kept")
            else:
                found = await durable.store.read(
                    lambda connection, ident=ident: connection.execute(  # type: ignore[misc]  # bound here
                        "SELECT count(*) FROM job_deliveries WHERE job_id = ?", (ident,)
                    ).fetchone()[0]
                )
                if found != 2:
                    wrong.append(f"job {ident} has {found} deliveries")
        except Exception as error:
            wrong.append(f"{word} {ident} was promised: {type(error).__name__}: {error}")
    return wrong


async def _effects_wrong(durable: Durable, promises: list[list[str]], effects: list[list[str]]) -> list[str]:
    wrong = []
    times: Counter[tuple[str, ...]] = Counter()
    for word, ident, *rest in effects:
        # A key that the provider honours makes its repetitions one effect.
        times[
            (word, ident) if word != "replay" or rest[0] == "-" else ("keyed", rest[0], str(time.monotonic_ns()))
        ] += 1
    wrong += [f"{effect} happened {count} times" for effect, count in times.items() if count > 1]
    replayed = {ident for word, ident, *_ in effects if word == "replay"}
    delivered = {ident for word, ident, *_ in effects if word == "delivery"}

    def marked(connection: Any) -> tuple[list[Any], list[Any]]:
        return (
            connection.execute("SELECT send_key, evidence FROM deliveries WHERE notified_at IS NOT NULL").fetchall(),
            connection.execute("SELECT dlq_id FROM dead_letters WHERE done_at IS NOT NULL").fetchall(),
        )

    sent, done = await durable.store.read(marked)
    wrong += [f"delivery {key} is marked sent without an effect" for key, _ in sent if key not in delivered]
    wrong += [f"delivery {key} has no evidence" for key, evidence in sent if evidence is None]
    wrong += [f"{dlq_id} is completed without an effect" for (dlq_id,) in done if dlq_id not in replayed]
    return wrong


def in_child(work: Callable[[], Coroutine[Any, Any, Any]]) -> int:
    """Fork, run, and never return into the parent's code. The parent has no threads, so this is safe."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        result = asyncio.run(work())
        if result is not None:
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def one_round(folder: Path, number: int, dice: random.Random) -> bool:
    (folder / "ready").unlink(missing_ok=True)
    child = in_child(lambda: Child(folder, number).run())
    deadline = time.monotonic() + 30
    early = dice.random() < 0.2  # some are killed while they still recover
    while not early and not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
        if os.waitpid(child, os.WNOHANG)[0]:
            return False  # it failed by itself, and has said why
    time.sleep(dice.uniform(0.0, 0.15))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return False
    checker = in_child(lambda: _silently(folder))
    _, status = os.waitpid(checker, 0)
    return os.waitstatus_to_exitcode(status) == 0


async def _silently(folder: Path) -> None:
    await compare(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    dice, failed_rounds, lines = random.Random(seed), [], Counter[str]()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for number in range(1, given.rounds + 1):
            folder = Path(name, str((number - 1) // ROUNDS_PER_DIRECTORY))
            folder.mkdir(exist_ok=True)
            if not one_round(folder, number, dice):
                failed_rounds.append(number)
                kept = Path(tempfile.mkdtemp(prefix="chaos-", dir=given.folder))
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                print(f"round {number} failed (seed {seed}); its files are in {kept}", file=sys.stderr)
            if number % ROUNDS_PER_DIRECTORY == 0 or number == given.rounds:
                for line in (folder / "promises").read_text().splitlines():
                    lines[line.split(" ")[0]] += 1
                shutil.rmtree(folder)
                print(f"{number} rounds, {len(failed_rounds)} failed, {dict(lines)}", file=sys.stderr)
    print(json.dumps({"rounds": given.rounds, "failed": failed_rounds, "seed": seed, "promises": dict(lines)}))
    return 1 if failed_rounds else 0


if __name__ == "__main__":
    sys.exit(main())
