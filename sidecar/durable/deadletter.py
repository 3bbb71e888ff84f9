"""Dead letters: requests that finally failed, kept until somebody has dealt with them.

Law: `keep` returns after the entry is durable, or raises NotKept, and then nothing of it is there. The same failure
again updates one entry; a later success closes it. Nothing is ever removed to make room. Secrets are sealed before
they are written, and shown to nobody: listings pass through the one redactor.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from config.durable import DeadLetter, DeadLetterStore, Replay
from config.errors import ErrorCode
from config.idempotency import Idempotency
from sidecar import clock
from sidecar.durable import rows
from sidecar.durable.bodies import INLINE, Bodies, BodyFile, Spool
from sidecar.durable.entry import Entry, Failure, host_of, new_id
from sidecar.durable.intake import Prepared, prepare
from sidecar.durable.payloads import Payloads, Request
from sidecar.durable.rows import Row
from sidecar.durable.seal import Keyring
from sidecar.durable.steps import Steps
from sidecar.durable.store import Store
from sidecar.durable.trouble import Damaged, NoSuchThing, NotKept
from sidecar.durable.verdict import Verdict, judge, worse
from sidecar.durable.workflow import WAITING, Ask, View, refuse_replay
from telemetry.metrics import Stored
from telemetry.record import PHASE_WORDS
from telemetry.redact import Redactor

T = TypeVar("T")


class Terms(NamedTuple):
    """The settings of one upstream that matter here."""

    dead_letter: DeadLetter
    replay: Replay
    idempotency: Idempotency
    redactor: Redactor


DEFAULT_TERMS = Terms(DeadLetter(), Replay(), Idempotency(), Redactor())


@dataclass(frozen=True, slots=True)
class Kept:
    """The promise: this entry is on disk."""

    dlq_id: str
    created: bool
    """False: it was known already and has been updated."""


class DeadLetters:
    """Takes entries in and gives them out. Lists are in listing.py, what operators do in operator.py."""

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        *,
        settings: DeadLetterStore,
        registry: Mapping[str, ErrorCode],
        terms_of: Callable[[str], Terms] = lambda upstream: DEFAULT_TERMS,
        counts: Stored | None = None,
        now: Callable[[], float] = clock.steady,
        steps: Steps | None = None,
        on_kept: Callable[[Failure, Kept], None] | None = None,
    ) -> None:
        self.store = store
        self.keyring = keyring
        self.bodies = Bodies(store, keyring, lambda: self.settings.max_bytes)
        self.payloads = Payloads(keyring, self.bodies)
        self.settings = settings
        self.registry = registry
        self.terms_of = terms_of
        self.counts = counts or Stored()
        self.now = now
        self.steps = steps or Steps()
        self.on_kept = on_kept
        """Told about every entry that was kept, for events and notifications."""
        self.waiting: set[str] = set()
        """Upstreams that may have entries; never too few."""

    # ---- in ----------------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """For a body that is spooled before it is known whether the request fails."""
        return new_id(self.now())

    def spool(self, dlq_id: str, upstream: str, url: str) -> Spool:
        return self.bodies.spool(host_of(url), dlq_id, self.terms_of(upstream).dead_letter.max_body_bytes)

    async def keep(self, failure: Failure) -> Kept:
        """Goes on when the caller is cancelled: the app may have gone, the failed request has not."""
        return await asyncio.shield(clock.spawn(self._keep(failure), "dead letter"))

    async def _keep(self, failure: Failure) -> Kept:
        begun = clock.monotonic()
        try:
            kept = await self._write(failure)
        except NotKept as refused:
            self.counts.dead_letter_rejected(refused.reason)
            raise
        self.waiting.add(failure.upstream)
        self.counts.dead_lettered(failure.upstream, failure.error_class)
        self.counts.written(clock.monotonic() - begun)
        if self.on_kept is not None:
            self.on_kept(failure, kept)
        return kept

    async def _write(self, failure: Failure) -> Kept:
        terms, dlq_id, body = self.terms_of(failure.upstream), failure.dlq_id or self.new_id(), failure.body
        if isinstance(body, bytes) and len(body) > terms.dead_letter.max_body_bytes:
            body = None
        size = failure.body_size if failure.body is None else _size(failure.body)
        if isinstance(body, bytes) and len(body) > INLINE:
            body = await self.bodies.keep(host_of(failure.url), dlq_id, body)
        prepared = prepare(
            failure, dlq_id, body, size, self.keyring, terms.dead_letter, terms.idempotency, terms.redactor
        )
        kept: Kept | None = None
        try:
            kept = await self.store.write(lambda connection: self._insert(connection, prepared), grows=prepared.grows)
            return kept
        finally:
            if isinstance(body, BodyFile):
                if kept is not None and kept.created:
                    self.bodies.settled(body.name)
                else:
                    await self.bodies.remove([body.name])

    def _insert(self, connection: sqlite3.Connection, prepared: Prepared) -> Kept:
        twin = self._twin(connection, prepared.row)
        if twin is not None:
            self._merge(connection, twin, prepared)
            return Kept(twin.entry.dlq_id, created=False)
        self.check_room(connection, prepared.grows + _stored(prepared.body))
        row = prepared.row
        row.seq = rows.next_seq(connection, row.entry.created_at)
        row.payload_size = self.payloads.insert(
            connection, row.seq, row.entry, prepared.head, prepared.body, prepared.answer
        )
        rows.save(connection, row, self.judge, new=True)
        return Kept(row.entry.dlq_id, created=True)

    def check_room(self, connection: sqlite3.Connection, grows: int) -> None:
        """One budget for all that is kept: dead letters, deliveries, and bodies on their way to the disk."""
        most = self.settings.max_bytes
        used = self.bodies.used = rows.bytes_kept(connection)
        if used + self.bodies.spooled + grows > most:
            raise NotKept(
                "full",
                f"dead letters and deliveries take {used + self.bodies.spooled} bytes, and `dead_letter.max_bytes` is "
                f"{most}",
                "replay or discard entries, let the outbox drain, or raise the limit",
            )

    def _twin(self, connection: sqlite3.Connection, row: Row) -> Row | None:
        """The entry of the same failure: same key and content, or, without a key, same content a moment ago."""
        entry = row.entry
        window = self.terms_of(entry.upstream).dead_letter.dedupe_window
        found = connection.execute(
            "SELECT seq FROM dead_letters WHERE fingerprint = ? ORDER BY seq DESC LIMIT 20", (row.fingerprint,)
        ).fetchall()
        for (seq,) in found:
            try:
                other = rows.load_seq(connection, seq)
            except Damaged:
                continue  # found and set aside when it is read or scrubbed
            if other is None or other.entry.identity != entry.identity or other.entry.status not in WAITING:
                continue
            if other.entry.idempotency_key != entry.idempotency_key:
                continue
            if entry.idempotency_key is not None or entry.last_failure_at - other.entry.last_failure_at < window:
                return other
        return None

    def _merge(self, connection: sqlite3.Connection, twin: Row, prepared: Prepared) -> None:
        old, new = twin.entry, prepared.row.entry
        old.occurrences += 1
        old.error_class, old.category, old.error_details = new.error_class, new.category, new.error_details
        old.last_failure_at = max(old.last_failure_at, new.last_failure_at)
        old.last_attempt = max(old.last_attempt, new.last_attempt)
        old.exposure = worse(old.exposure, new.exposure)
        old.send_phase = max(old.send_phase, new.send_phase, key=PHASE_WORDS.index)
        old.last_stack, old.sanitized_context = new.last_stack, new.sanitized_context
        old.response = new.response or old.response
        if not old.edited:
            old.headers, old.sealed_headers = new.headers, new.sealed_headers
            old.credential_expires_at = new.credential_expires_at
        old.happened(new.last_failure_at, "failed_again", code=new.error_class)
        self.payloads.refresh(connection, twin.seq, old, prepared.head, prepared.answer)
        rows.save(connection, twin, self.judge)

    # ---- judging -----------------------------------------------------------------------------------------------

    def judge(self, entry: Entry) -> Verdict:
        terms = self.terms_of(entry.upstream)
        correction = self.steps.correction(entry.created_at)  # its times are those of the clock that stamped it
        verdict = judge(entry.facts(), terms.replay, terms.idempotency, self.now() - correction)
        if correction and verdict.until is not None:
            return verdict._replace(until=verdict.until + correction)
        return verdict

    def view(self, entry: Entry) -> View:
        """What the rules of the workflow look at, judged now."""
        verdict = self.judge(entry)
        known = self.registry.get(entry.error_class)
        return View(
            status=entry.status,
            state=entry.state,
            error_class=entry.error_class,
            critical=(known.category if known is not None else entry.category) == "CRITICAL",
            verdict=verdict.word,
            sentence=verdict.sentence,
            has_evidence=bool(entry.remediation and entry.remediation["evidence"]),
            replays=entry.replays,
            replayed_at=entry.replayed_at,
        )

    def is_fatal(self, code: str) -> bool:
        known = self.registry.get(code)
        return known is not None and known.retry == "fatal"

    # ---- out ---------------------------------------------------------------------------------------------------

    async def get(self, dlq_id: str) -> Entry:
        """Raises NoSuchThing, or Damaged after it was set aside."""
        row, _ = await self._read(dlq_id, lambda connection, row: None)
        return row.entry

    async def detail(self, dlq_id: str) -> dict[str, Any]:
        """As it may be shown: everything but secrets, the url redacted, the verdict of this moment, and what the rules
        say about a replay."""
        try:
            row, url = await self._read(dlq_id, lambda connection, row: self._url(connection, row))
        except Damaged as damaged:  # set aside by now; what is not sealed can still be shown
            try:
                row, url = await self._read(dlq_id, lambda connection, row: "")
            except NoSuchThing:
                raise damaged from None
        view, terms = self.view(row.entry), self.terms_of(row.entry.upstream)
        against = refuse_replay(view, terms.replay, Ask())
        return {
            **row.entry.shown(),
            "url": terms.redactor.url(url),
            "verdict": view.verdict,
            "sentence": view.sentence,
            "replay": {
                "allowed": against is None,
                "why_not": None if against is None else against.why,
                "what_to_do": None if against is None else against.what_to_do,
            },
        }

    def _url(self, connection: sqlite3.Connection, row: Row) -> str:
        head = connection.execute("SELECT head FROM payloads WHERE seq = ?", (row.seq,)).fetchone()
        if head is None:
            raise Damaged(f"what was sealed with {row.entry.dlq_id} is missing")
        return self.payloads.url(row.entry, head[0])

    async def request(self, dlq_id: str) -> Request:
        """With its secrets, for sending."""
        _, request = await self._read(
            dlq_id, lambda connection, row: self.payloads.request(connection, row.seq, row.entry)
        )
        return request

    async def last_answer(self, dlq_id: str) -> bytes | None:
        """The body of the upstream's last answer; it may hold secrets, so it is for the application's owner only."""
        _, answer = await self._read(
            dlq_id, lambda connection, row: self.payloads.answer(connection, row.seq, row.entry)
        )
        return answer

    async def _read(self, dlq_id: str, work: Callable[[sqlite3.Connection, Row], T]) -> tuple[Row, T]:
        def reading(connection: sqlite3.Connection) -> tuple[Row, T]:
            row = rows.load(connection, dlq_id)
            if row is None:
                raise no_such(dlq_id)
            return row, work(connection, row)

        try:
            return await self.store.read(reading)
        except Damaged as damaged:
            await self.set_aside(dlq_id, damaged.message)
            raise

    async def set_aside(self, dlq_id: str, why: str) -> None:
        """Quarantine what is damaged: the whole row, or only what was sealed."""

        def work(connection: sqlite3.Connection) -> bool:
            try:
                row = rows.load(connection, dlq_id)
            except Damaged:
                found = connection.execute("SELECT seq FROM dead_letters WHERE dlq_id = ?", (dlq_id,)).fetchone()
                rows.quarantine(connection, found[0], why, self.now())
                return True
            if row is None or row.entry.body.get("note") == DAMAGED_BODY:
                return False
            row.entry.body = {**row.entry.body, "kept": False, "note": DAMAGED_BODY}
            row.entry.happened(self.now(), "damaged", why=why)
            rows.save(connection, row, self.judge)
            return True

        if await self.store.write(work):
            self.counts.dead_letter_evicted("corrupt")
            self.store.report("sidecar.dlq.damaged", f"{dlq_id}: {why}; it is set aside and cannot be replayed")

    async def take_back(self, dlq_id: str) -> None:
        """What was set aside opens again: its file or key was put back."""

        def work(connection: sqlite3.Connection) -> bool:
            row = rows.load(connection, dlq_id)
            if row is None or row.entry.body.get("note") != DAMAGED_BODY:
                return False
            stored = connection.execute(
                "SELECT body IS NOT NULL OR body_file IS NOT NULL FROM payloads WHERE seq = ?", (row.seq,)
            ).fetchone()
            kept = bool(stored and stored[0])
            row.entry.body = {**row.entry.body, "kept": kept, "note": "" if kept else "not kept"}
            row.entry.happened(self.now(), "repaired")
            rows.save(connection, row, self.judge)
            return True

        if await self.store.write(work):
            self.store.report("sidecar.dlq.repaired", f"{dlq_id} is whole again, and can be replayed")


DAMAGED_BODY = "damaged on disk"


def no_such(dlq_id: str) -> NoSuchThing:
    return NoSuchThing(f"there is no dead letter {dlq_id[:80]!r}", "list them with `sidecar dlq list`")


def _size(body: bytes | BodyFile) -> int:
    return body.size if isinstance(body, BodyFile) else len(body)


def _stored(body: bytes | BodyFile | None) -> int:
    return body.stored if isinstance(body, BodyFile) else 0
