"""Stores and layers on real files, for one test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.durable import DeadLetter, DeadLetterStore, Replay
from config.errors import registry
from config.idempotency import Idempotency
from sidecar.durable.deadletter import DeadLetters, Terms
from sidecar.durable.entry import Failure, Tried
from sidecar.durable.listing import Listing
from sidecar.durable.operator import Operator
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store
from sidecar.durable.successes import Successes
from telemetry.metrics import Stored
from telemetry.record import SENT
from telemetry.redact import Redactor


class Told(list[tuple[str, str]]):
    """What was reported, in order."""

    def __call__(self, event: str, sentence: str) -> None:
        self.append((event, sentence))

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self]

    def sentence(self, event: str) -> str:
        return next(sentence for found, sentence in self if found == event)


@asynccontextmanager
async def opened(directory: Path, **options: Any) -> AsyncIterator[Store]:
    store = await Store.open(directory, **options)
    try:
        yield store
    finally:
        await store.close()


def crashed_copy(directory: Path, to: Path) -> Path:
    """The files as a kill would leave them: copied while the store is still open."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*-shm"))
    return to


START = 1_800_000_000.0


@dataclass
class Rig:
    """Every part that deals with dead letters, on one store; `now` is whatever the test says."""

    store: Store
    letters: DeadLetters
    listing: Listing
    operator: Operator
    successes: Successes
    counts: Stored
    told: Told
    terms: dict[str, Terms] = field(default_factory=dict)
    now: float = START

    async def entry(self, dlq_id: str) -> Any:
        return await self.letters.get(dlq_id)

    async def ids(self, wanted: Any, **options: Any) -> list[str]:
        return [entry.dlq_id for entry in (await self.listing.page(wanted, **options)).items]


def terms(
    dead_letter: dict[str, Any] | None = None,
    replay: dict[str, Any] | None = None,
    idempotency: dict[str, Any] | None = None,
    redactor: Redactor | None = None,
) -> Terms:
    return Terms(
        DeadLetter.model_validate(dead_letter or {}),
        Replay.model_validate(replay or {}),
        Idempotency.model_validate(idempotency or {}),
        redactor or Redactor(),
    )


@asynccontextmanager
async def rig_in(
    directory: Path, upstreams: dict[str, Terms] | None = None, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Rig]:
    keys, told, counts, known = load_keyring(directory, None), Told(), Stored(), upstreams or {}
    options.setdefault("report", told)
    async with opened(directory, hooks=[keys.prove], **options) as store:
        letters = DeadLetters(
            store,
            keys,
            settings=DeadLetterStore.model_validate(settings or {}),
            registry=registry(),
            terms_of=lambda upstream: known.get(upstream) or terms(),
            counts=counts,
            now=lambda: rig.now,
        )
        rig = Rig(store, letters, Listing(letters), Operator(letters), Successes(letters), counts, told, known)
        yield rig


def failed(number: int = 0, **changed: Any) -> Failure:
    """A POST that was sent and never answered, unless the test says otherwise."""
    code = changed.pop("code", "NETWORK_TIMEOUT")
    at = changed.pop("at", START)
    attempts = changed.pop("attempts", [Tried(changed.pop("phase", SENT), code, changed.pop("status", None))])
    given: dict[str, Any] = {
        "upstream": "payments",
        "method": "POST",
        "url": f"https://api.payments.test/v1/charges?order={number}&token=canary-in-url",
        "headers": [
            (b"Host", b"api.payments.test"),
            (b"Authorization", b"Bearer canary-credential"),
            (b"Content-Type", b"application/json"),
        ],
        "attempts": attempts,
        "error_class": code,
        "category": registry()[code].category,
        "error_message": "no answer within 30 s",
        "first_failure_at": at,
        "last_failure_at": at + 2,
        "body": b'{"card": "canary-card", "order": %d}' % number,
    }
    return Failure(**{**given, **changed})
